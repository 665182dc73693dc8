# All commands use .venv, which is created with the first Python 3.11 or newer on PATH
# (or `make PYTHON=...`). Stamp files in it record what is installed, so a second run
# installs nothing unless pyproject.toml or constraints.txt has changed.
#
#   make demo       install the example's requirements, and collect 20,000 frames
#   make try        install the core and pytest alone, and run tests that need no more
#   make check      everything that CI runs, cheapest first, up to the first failure
#   make test       install every extra, MeltingPot included, and run the tests
#   make test-random-order  run them in a random order: SEED=7 repeats one
#   make test-fast  run the tests that start no process: at every change
#   make test-fresh run the tests that start programs, each in a fresh interpreter
#   make test-versions  run the core tests with the oldest and the newest tensordict, and
#                   with the newest releases of everything on newer Pythons
#   make docs       install what the documentation needs, and build it into build/docs
#   make check-package  build, install in clean environments, and run
#   make fuzz       compare new random combinations with the reference (TIMES=20)
#   make fuzz-storage  damage datasets at random, and kill their writers and readers;
#                      reading must not give wrong data
#   make mutations  run the tests with one-line faults, which they must detect
#   make lint format typecheck bench clean
#
# `make test ARGS="tests/core -k groups"` passes its arguments to pytest, which
# runs JOBS tests at a time (test-fast 2, the others 3: tests that start processes wait for
# some of their time); `ARGS="-n 0 ..."` runs them in one process, for a debugger.
# `make test VENV=build/versions/python3.13` runs all tests in an environment of
# test-versions.
# On Linux the default build of torch includes CUDA. For the much smaller CPU build, set
# PIP_EXTRA_INDEX_URL to the index of CPU builds in PyTorch's documentation.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	$$python -c "$(NEW_ENOUGH)" 2>/dev/null && echo $$python && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS ?= -c constraints.txt
INSTALL := $(PIP) install --prefer-binary $(CONSTRAINTS)
SOURCES := pyproject.toml constraints.txt

# An editable install need not be repeated when a source file changes.
STAMP_VENV := $(VENV)/.made
STAMP_DEMO := $(VENV)/.installed-demo
STAMP_DOCS := $(VENV)/.installed-docs
STAMP_TRY := $(VENV)/.installed-try
STAMP_ALL := $(VENV)/.installed-all

# The ends of the ranges in pyproject.toml. They are installed in front of the others, so
# that a run costs a download of two packages.
OLDEST := tensordict==0.11.0 torchrl==0.11.1 benchmarl==1.5.2 hydra-core==1.3.2 \
	omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 tqdm==4.67.1
NEWEST := tensordict==0.15.3 torchrl==0.14.1
# Tests of what uses the inside of tensordict, or TorchRL. The daily workflow runs more.
VERSIONED_TESTS ?= tests/policies tests/weights \
	tests/core/test_torchrl_names.py \
	$(addprefix tests/models/test_,policy.py heads.py recurrent.py) \
	$(addprefix tests/interop/test_,benchmarl.py examples.py torchrl_ours.py torchrl_theirs.py) \
	$(addprefix tests/torchrl_conformance/test_conformance_,networks.py pettingzoo.py trajectories.py) \
	tests/collectors/test_single.py
VERSIONS := build/versions

# Pythons that test-versions tries beside the one of VENV. NEWER_PYTHONS= leaves them out.
NEWER_PYTHONS ?= 3.12 3.13

EXTRAS ?=

# Python and pytest keep what they compiled: this package, and tests with their assertions.
# Otherwise every process that runs tests compiles them anew, in 6 to 8 seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo try check test test-random-order test-fast test-processes test-envpool test-fresh test-versions test-tensordict docs check-package lint format format-check typecheck bench fuzz \
	fuzz-storage mutations equality environments constraints clean

demo: $(STAMP_DEMO)
	$(BIN)/marl-collect collect multiwalker_v9 --frames 20000 --workers 2 $(ARGS)

# With other tests in ARGS, it is the way to a first change.
try: $(STAMP_TRY)
	$(BIN)/python -m pytest -n 0 $(or $(ARGS),tests/core/test_groups.py tests/core/test_batched.py)

test test-random-order test-processes test-fresh: JOBS ?= 3
test-fast test-tensordict fuzz: JOBS ?= 2
test-python-%: JOBS ?= 2

test: $(STAMP_ALL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

# All test processes collect the same order, so it needs one seed.
SEED ?= $(shell date +%s)
test-random-order: $(STAMP_ALL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
		--random-order --random-order-seed=$(SEED) $(ARGS)

test-fast: $(STAMP_ALL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --fast $(ARGS)

# With test-fast, these are all the tests.
test-processes: $(STAMP_ALL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --processes $(ARGS)

# The other commands fork the programs of tests from a process that has imported torch,
# which hides what depends on a cold start (tests/support/scripts.py).
test-fresh: $(STAMP_ALL)
	MARL_COLLECT_TEST_FRESH=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup \
		--processes $(filter-out tests/test_support.py,$(shell \
		grep -rlE "support.(ranks|scripts) import" tests --include "test_*.py")) $(ARGS)

# No extra installs EnvPool: its wheels take 740 MB.
test-envpool: $(STAMP_ALL)
	$(INSTALL) envpool
	$(BIN)/python -m pytest tests/envs/test_gymnasium_vector.py $(ARGS)

# Cheapest first. test-fast and test-processes together are all the tests.
CHECKS := lint format-check docs typecheck test-fast test-processes test-tensordict
check: $(STAMP_ALL)
	@for step in $(CHECKS); do \
		echo "--- make $$step" && $(MAKE) --no-print-directory $$step || exit 1; \
	done

test-versions: test-tensordict $(NEWER_PYTHONS:%=test-python-%)

test-tensordict: $(VERSIONS)/oldest/.made $(VERSIONS)/newest/.made
	for end in oldest newest; do \
		echo "With the $$end tensordict:" && \
		PYTHONPATH=$(CURDIR)/$(VERSIONS)/$$end $(BIN)/python -m pytest -q \
			-n $(JOBS) --dist loadgroup $(VERSIONED_TESTS) $(ARGS) || exit 1; \
	done

# Each Python has an environment of its own, which is built once: some minutes, and
# several gigabytes where torch comes with CUDA. It is kept until VERSIONS is deleted.
test-python-%: $(VERSIONS)/python%/.installed-all
	@echo "With the newest releases on Python $*:"
	$(VERSIONS)/python$*/bin/python -m pytest -q -n $(JOBS) --dist loadgroup \
		$(VERSIONED_TESTS) $(ARGS)

.PRECIOUS: $(VERSIONS)/python%/.installed-all
$(VERSIONS)/python%/.installed-all: pyproject.toml
	@command -v python$* >/dev/null || { \
		echo "There is no python$* on PATH. Install it, or leave it out:" \
			"make test-versions NEWER_PYTHONS=" >&2; exit 1; }
	mkdir -p $(VERSIONS)
	$(MAKE) VENV=$(@D) PYTHON=python$* CONSTRAINTS= $@

$(VERSIONS)/oldest/.made: PINS := $(OLDEST)
$(VERSIONS)/newest/.made: PINS := $(NEWEST)
$(VERSIONS)/%/.made: $(STAMP_ALL) Makefile
	rm -rf $(@D)
	$(PIP) install --quiet --prefer-binary --no-deps --target $(@D) $(PINS)
	touch $@

# --strict makes broken links errors. NO_MKDOCS_2_WARNING hides a warning about mkdocs 2.
docs: $(STAMP_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Builds wheel and sdist, installs them in clean environments outside the checkout, and
# runs commands. EXTRAS="video ray" checks these extras, one after the other.
check-package: $(STAMP_ALL)
	$(BIN)/python scripts/check_package.py $(EXTRAS)

lint: $(STAMP_ALL)
	$(BIN)/ruff check

format: $(STAMP_ALL)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix --select I

format-check: $(STAMP_ALL)
	$(BIN)/ruff format --check

# First the package, including linked folders, then all else. With the same flags, the second
# run reads torch from the first one's cache. They are for tests; pyproject.toml names the
# modules that are checked without them. mypy supports one module per name: no conftest.py.
LOOSE := --follow-imports=silent --allow-untyped-decorators \
	--disable-error-code=operator --disable-error-code=union-attr --disable-error-code=index

typecheck: $(STAMP_ALL)
	$(BIN)/mypy $(LOOSE) -p marl_collect
	mkdir -p build
	sed -n '/^```python/,/^```$$/{/^```/!p}' README.md > build/readme.py
	MYPYPATH=benchmarks:scripts:tests $(BIN)/mypy $(LOOSE) --exclude '/.*/conftest\.py$$' \
		scripts benchmarks examples build/readme.py tests

# Runs all benchmarks; see docs/benchmarks.md. benchmarks/peers/install.py installs the
# environments of other systems and is not run here.
bench: $(STAMP_ALL)
	$(BIN)/python benchmarks/suite.py $(ARGS)

# Compares collectors with the reference of tests/oracle on new random combinations.
# The first mismatch is minimised, and printed as code.
TIMES ?= 20
fuzz: $(STAMP_ALL)
	MARL_COLLECT_TIMES=$(TIMES) $(BIN)/python -m pytest -n $(JOBS) -m hypothesis \
		-o faulthandler_timeout=0 tests/oracle/test_oracle.py $(ARGS)

DAMAGES ?= 3000
fuzz-storage: $(STAMP_ALL)
	MARL_COLLECT_DAMAGES=$(DAMAGES) $(BIN)/python -m pytest -n 0 -rP --timeout 3600 \
		tests/storage/test_storage_damage.py

# Writes the faults of tests/mutations.toml, one at a time, into a copy of the commit, and
# runs their tests. ARGS=storage/ takes those of files with this in their names.
mutations: $(STAMP_ALL)
	$(BIN)/python scripts/mutations.py $(ARGS)

# Checks for the installed versions that the fast path gives PettingZoo's data. Takes hours.
equality: $(STAMP_ALL)
	$(BIN)/python scripts/equality.py $(ARGS)

# Tries every task and writes docs/tasks.md.
environments: $(STAMP_ALL)
	$(BIN)/python scripts/environments.py $(ARGS)

# Records the installed versions. Use it after an upgrade
# (`.venv/bin/python -m pip install --upgrade ...`), when the tests have passed. The CUDA
# libraries of a build of torch are left out, and so are local labels such as +cpu.
constraints: $(STAMP_ALL)
	{ echo "# The versions that the tests pass with, every extra included:" \
	    "$$($(BIN)/python -V), $$(uname -sm)."; \
	  echo "# Written by \`make constraints\`; not edited by hand."; \
	  $(PIP) list --format=freeze --exclude marl-collect --exclude pip | \
	  grep -vE '^(nvidia-|cuda-|triton)' | tr A-Z_ a-z- | sed 's/+[^=]*$$//' | sort; \
	} > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP_VENV):
	@test -n "$(PYTHON)" || { \
		echo "No Python 3.11 or newer with venv and pip was found on PATH." \
			"Install one (on Debian and Ubuntu: python3 and python3-venv)," \
			"or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMP_DEMO): $(SOURCES) | $(STAMP_VENV)
	@echo "Installing marl-collect with PettingZoo into $(VENV): a few minutes, once."
	@$(INSTALL) -e ".[datasets,pettingzoo]"
	@touch $@

$(STAMP_TRY): $(SOURCES) | $(STAMP_VENV)
	@$(INSTALL) -e . hypothesis pytest pytest-random-order pytest-timeout pytest-xdist
	@touch $@

# Some signatures in the reference are those of imported modules, one of which needs
# PettingZoo itself.
$(STAMP_DOCS): $(SOURCES) | $(STAMP_VENV)
	@$(INSTALL) -e . mkdocs mkdocs-material mkdocstrings-python pettingzoo
	@touch $@

# MeltingPot is installed first: our installer can build it without a network, and pip
# then finds the requirement satisfied. Overcooked-AI's dependencies would overwrite
# pygame-ce, and it works without them. JaxMARL's would install an older gymnasium; with
# MeltingPot's jax and chex, flax and jaxtyping are enough.
$(STAMP_ALL): $(SOURCES) scripts/install_meltingpot.py | $(STAMP_VENV)
	@echo "Installing every extra into $(VENV): several minutes, once."
	@$(BIN)/python scripts/install_meltingpot.py $(CONSTRAINTS)
	@$(INSTALL) -e ".[all]"
	@$(INSTALL) --no-deps overcooked-ai jaxmarl flax jaxtyping
	@touch $(STAMP_DEMO) $(STAMP_DOCS) $(STAMP_TRY) $@
