# Everything happens in .venv, made with the first Python 3.11 or newer that is found
# (or `make PYTHON=...`). The stamps in it say what is installed, so that a second run
# installs nothing; they follow pyproject.toml and constraints.txt.
#
#   make demo       install what the example needs, and collect 20,000 frames
#   make test       install every extra, MeltingPot included, and run the tests
#   make test-versions  run the core tests with the oldest and the newest tensordict
#   make docs       build the documentation into build/docs
#   make fuzz       compare random combinations with the reference (MINUTES=30)
#   make lint format typecheck bench clean
#
# `make test ARGS="tests/test_groups.py -k order"` passes its arguments to pytest, which
# runs JOBS tests at a time; `ARGS="-n 0 ..."` runs them in one process, for a debugger.
# On Linux the usual torch brings CUDA along; for the much smaller CPU build, let
# PIP_EXTRA_INDEX_URL name the index of CPU builds that PyTorch documents.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
JOBS ?= 2
MINUTES ?= 30
NEW_ENOUGH := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3 python; do \
	$$each -c "$(NEW_ENOUGH)" 2>/dev/null && echo $$each && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --prefer-binary -c constraints.txt
SOURCES := pyproject.toml constraints.txt

# An editable install needs no repeating when a source file changes.
STAMP_VENV := $(VENV)/.made
STAMP_DEMO := $(VENV)/.installed-demo
STAMP_ALL := $(VENV)/.installed-all

# The ends of the ranges in pyproject.toml. They are installed in front of the others, so
# that a run costs a download of two packages.
OLDEST := tensordict==0.11.0 torchrl==0.11.1
NEWEST := tensordict==0.15.3 torchrl==0.14.1
VERSIONED_TESTS ?= tests/core tests/models tests/policies tests/weights tests/interop \
	tests/collectors/test_single.py tests/collectors/test_multi_sync.py
VERSIONS := build/versions

.PHONY: demo test test-versions docs lint format format-check typecheck bench fuzz equality \
	environments constraints clean

demo: $(STAMP_DEMO)
	$(BIN)/marl-collect collect multiwalker_v9 --frames 20000 --workers 2 $(ARGS)

test: $(STAMP_ALL)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

test-versions: $(VERSIONS)/oldest/.made $(VERSIONS)/newest/.made
	for end in oldest newest; do \
		echo "With the $$end tensordict:" && \
		PYTHONPATH=$(CURDIR)/$(VERSIONS)/$$end $(BIN)/python -m pytest -q \
			-n $(JOBS) --dist loadgroup $(VERSIONED_TESTS) $(ARGS) || exit 1; \
	done

$(VERSIONS)/oldest/.made: PINS := $(OLDEST)
$(VERSIONS)/newest/.made: PINS := $(NEWEST)
$(VERSIONS)/%/.made: $(STAMP_ALL) Makefile
	rm -rf $(@D)
	$(PIP) install --quiet --prefer-binary --no-deps --target $(@D) $(PINS)
	touch $@

# Strict: a link that leads nowhere is an error. NO_MKDOCS_2_WARNING: it is about others.
docs: $(STAMP_ALL)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(STAMP_ALL)
	$(BIN)/ruff check

format: $(STAMP_ALL)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix --select I

format-check: $(STAMP_ALL)
	$(BIN)/ruff format --check

# The package under its one name, links followed; then what stands beside it. Tests are
# checked where they are annotated, but not for what torch types too widely: a
# submodule reached by its attribute is "Tensor | Module".
LOOSE := --follow-imports=silent --allow-untyped-defs --allow-incomplete-defs \
	--allow-untyped-decorators --no-check-untyped-defs --disable-error-code=operator \
	--disable-error-code=union-attr --disable-error-code=index \
	--exclude '/.*/conftest\.py$$'  # mypy knows one module of a name

typecheck: $(STAMP_ALL)
	$(BIN)/mypy -p marl_collect
	$(BIN)/mypy --follow-imports=silent scripts benchmarks
	MYPYPATH=benchmarks $(BIN)/mypy $(LOOSE) tests

# Measures everything: docs/benchmarks.md. Other peers' environments come from
# benchmarks/peers/install.py, which is not run here.
bench: $(STAMP_ALL)
	$(BIN)/python benchmarks/suite.py $(ARGS)

# Compares collectors with the reference of tests/oracle on combinations that nobody has
# tried before. Mismatches become scripts in build/fuzz. Ends with code 1 if there were any.
fuzz: $(STAMP_ALL)
	$(BIN)/python tests/oracle/oracle_fuzz.py --minutes $(MINUTES) --jobs $(JOBS) $(ARGS)

# Proves for the installed versions that the fast path gives PettingZoo's own data: hours.
equality: $(STAMP_ALL)
	$(BIN)/python scripts/equality.py $(ARGS)

# Tries every task and writes the tables of docs/environments.md.
environments: $(STAMP_ALL)
	$(BIN)/python scripts/environments.py $(ARGS)

# Writes down the versions that are installed, once the tests have passed with newer
# ones (after `.venv/bin/python -m pip install --upgrade ...`).
constraints: $(STAMP_ALL)
	$(BIN)/python scripts/write_constraints.py constraints.txt

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
	@$(INSTALL) -e ".[pettingzoo]"
	@touch $@

# MeltingPot comes first: its own installer knows how to build it without a network,
# and pip then finds the requirement fulfilled.
$(STAMP_ALL): $(SOURCES) scripts/install_meltingpot.py | $(STAMP_VENV)
	@echo "Installing every extra into $(VENV): several minutes, once."
	@$(BIN)/python scripts/install_meltingpot.py --quiet -c constraints.txt
	@$(INSTALL) -e ".[all]"
	@touch $(STAMP_DEMO) $@
