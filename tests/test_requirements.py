"""What is installed: exact versions, once, and all of them within what is declared."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support.scripts import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]

with (ROOT / "pyproject.toml").open("rb") as _file:
    PROJECT = tomllib.load(_file)["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHER_VERSIONS = {"benchmarl"}
"""Extras that need other versions than the tested: see `make test-versions`."""
CLASHES = {"jaxmarl", "overcooked"}
"""Extras with a dependency that replaces files or versions of another extra."""
DECLARED = sorted(
    {
        *PROJECT["dependencies"],
        *(
            each
            for name, extra in EXTRAS.items()
            if name not in OTHER_VERSIONS
            for each in extra
        ),
    }
)


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return dict(pairs)


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> Any:
    """Run a command, outside of the make and of the paths that run the tests."""
    names = [n for n in os.environ if "MAKE" not in n and n != "PYTHONPATH"]
    env = {name: os.environ[name] for name in names} | variables
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def plan(target: str, venv: Path) -> list[str]:
    """The commands make would run for `target` with this virtual environment."""
    process = run("make", "--dry-run", "--no-print-directory", target, f"VENV={venv}")
    assert process.returncode == 0, process.stderr
    lines: list[str] = process.stdout.replace("\\\n", "").splitlines()
    return lines


def test_check_makes_each_target_in_order_up_to_the_first_failure(
    tmp_path: Path,
) -> None:
    assert "\nmake check\n" in (ROOT / ".ci" / "run").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (rules,) = re.findall(r"^CHECKS := .*?\n\n", makefile, re.DOTALL | re.MULTILINE)
    targets = rules.partition("\n")[0].split()[2:]
    assert all(f"\n{target}: " in makefile for target in targets)
    fails = "%:\n\t@echo made $@; test $@ != $(FAILS)\n"
    (tmp_path / "Makefile").write_text(rules + fails, "utf-8")
    before_types = targets[: targets.index("typecheck") + 1]
    for failure, expected in (("typecheck", before_types), ("none", targets)):
        process = run("make", "check", f"FAILS={failure}", cwd=tmp_path)
        assert re.findall(r"^made (.*)", process.stdout, re.MULTILINE) == expected
        assert (process.returncode == 0) == (failure == "none"), process.stderr


@pytest.mark.parametrize("line", DECLARED)
def test_the_constraints_give_each_requirement_a_version_it_allows(line: str) -> None:
    requirement = Requirement(line)
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= set(EXTRAS)
    else:
        assert requirement.specifier.contains(pins()[requirement.name])


def test_all_means_every_extra() -> None:
    (line,) = EXTRAS["all"]
    everything = Requirement(line).extras
    bench = Requirement(EXTRAS["bench"][0]).extras
    assert everything | bench == set(EXTRAS) - {"all"} - OTHER_VERSIONS - CLASHES


@pytest.mark.parametrize(
    ("target", "last"), [("demo", "marl-collect"), ("try", "-m"), ("test", "-m")]
)
def test_a_first_run_installs_the_tested_versions(
    target: str, last: str, tmp_path: Path
) -> None:
    commands = plan(target, tmp_path / "venv")
    installing = [c for c in commands if " install " in c or "scripts/" in c]
    assert installing
    assert all("-c constraints.txt" in command for command in installing)
    assert last in commands[-1]


@pytest.mark.parametrize(
    "target", ["demo", "docs", "try", "test", "lint", "format-check"]
)
def test_a_second_run_installs_nothing(target: str, tmp_path: Path) -> None:
    (tmp_path / ".made").touch()
    for name in ("demo", "docs", "try", "all"):
        (tmp_path / f".installed-{name}").touch()
    (command,) = plan(target, tmp_path)
    assert " install " not in command


def test_tests_leave_the_demo_installed(tmp_path: Path) -> None:
    assert plan("test", tmp_path / "venv")[-2].count(".installed-") == 4


def test_the_documentation_installs_no_library_of_environments(tmp_path: Path) -> None:
    (command,) = [c for c in plan("docs", tmp_path / "venv") if " install " in c]
    _, packages = command.split(" -e ")
    assert packages.split() == [
        *(".", "mkdocs", "mkdocs-material", "mkdocstrings-python", "pettingzoo")
    ]


def test_each_extra_is_installed_alone_and_used() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    (matrix,) = re.findall(r"extra: \[(.*?)\]", workflow, re.DOTALL)
    assert {entry.strip() for entry in matrix.split(",")} == {'""', *EXTRAS}
    script = (ROOT / "scripts" / "check_package.py").read_text("utf-8")
    (uses,) = re.findall(r"^USES: .*?^}", script, re.DOTALL | re.MULTILINE)
    used = set(re.findall(r'^    "(\w+)": ', uses, re.MULTILINE))
    assert used == set(EXTRAS) - {"all"}


@pytest.mark.parametrize("name", ["ci", "daily", "docs", "release"])
def test_the_workflows_run_commands_that_exist(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs the extra dev")
    path = ROOT / ".github" / "workflows" / f"{name}.yml"
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    commands = [step["run"] for step in steps if "run" in step]
    assert commands
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands:
        tool, *arguments = shlex.split(re.sub(r"\${{.*?}}", "", command))
        if tool == "make":
            assert {name for name in arguments if "=" not in name} <= set(targets)
        elif arguments[0].endswith(".py"):
            assert run(sys.executable, arguments[0], "--help").returncode == 0
        else:
            begin = f"{tool} {arguments[0]}"
            assert begin in ("pip install", "python -m", "grep -qx", "grep -q")


def test_the_release_workflow_finds_the_version() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    (command,) = re.findall(r"run: (grep -qx .*)", text)
    package = (ROOT / "marl_collect" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.*)"', package, re.MULTILINE)
    for tag, code in ((f"v{version}", 0), ("v99.0", 1)):
        assert run("bash", "-c", command, GITHUB_REF_NAME=tag).returncode == code


@pytest.mark.parametrize("target", ["fuzz", "fuzz-storage"])
def test_the_fuzzers_start(target: str, tmp_path: Path) -> None:
    command = plan(target, tmp_path)[-1]
    command = command.replace(f"{tmp_path}/bin/python", sys.executable)
    process = run("sh", "-c", f"{command} --help")
    assert process.stdout.startswith("usage: "), process.stderr


EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
OPTIONAL = (
    *("benchmarl", "dmlab2d", "imageio", "lbforaging", "matplotlib", "meltingpot"),
    *("mpe2", "pettingzoo", "pyarrow", "ray", "torchrl"),
)
RUN_ALL = f"""
    import contextlib, io, runpy, sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {OPTIONAL}:
                raise ModuleNotFoundError(f"No module named {{name!r}}")

    sys.meta_path.insert(0, Blocker())
    for path in sys.argv[1:]:
        for arguments in (["--help"], []):
            sys.argv = [path, *arguments]
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    runpy.run_path(path, run_name="__main__")
            except SystemExit as error:
                print(path, arguments, error.code, *printed.getvalue().split()[:1])
"""


def test_every_example_has_help_and_names_its_extras(tmp_path: Path) -> None:
    script = tmp_path / "run_all.py"
    script.write_text(textwrap.dedent(RUN_ALL), encoding="utf-8")
    process = run_python(  # Its own interpreter: others have imported some of them.
        "-W", "ignore", script, *EXAMPLES, cwd=tmp_path, interpreter=True
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 2 * len(EXAMPLES) > 15
    for path, helps, runs in zip(EXAMPLES, lines[::2], lines[1::2], strict=True):
        assert helps == f"{path} ['--help'] 0 usage:"
        needs = re.escape(str(path)) + r" \[\] .*No module named '.*: pip install "
        assert re.match(needs + r'"marl-collect\[[a-z,]+\]"$', runs), runs
