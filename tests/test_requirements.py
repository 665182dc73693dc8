"""What is installed: exact versions, once, and all of them within what is declared."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

with (ROOT / "pyproject.toml").open("rb") as _file:
    PROJECT = tomllib.load(_file)["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHER_VERSIONS = {"benchmarl"}
"""Extras that need other versions than the tested: see `make test-versions`."""
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


def plan(target: str, venv: Path) -> list[str]:
    """The commands make would run for `target` with this virtual environment."""
    command = ["make", "--dry-run", "--no-print-directory", target, f"VENV={venv}"]
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    run = subprocess.run(
        command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True
    )
    return run.stdout.replace("\\\n", "").splitlines()


@pytest.mark.parametrize("line", DECLARED)
def test_the_constraints_give_each_requirement_a_version_it_allows(line: str):
    requirement = Requirement(line)
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= set(EXTRAS)
    else:
        assert requirement.specifier.contains(pins()[requirement.name])


def test_all_means_every_extra():
    (line,) = EXTRAS["all"]
    everything = Requirement(line).extras
    bench = Requirement(EXTRAS["bench"][0]).extras
    assert everything | bench == set(EXTRAS) - {"all"} - OTHER_VERSIONS


@pytest.mark.parametrize(("target", "last"), [("demo", "marl-collect"), ("test", "-m")])
def test_a_first_run_installs_the_tested_versions(target, last, tmp_path):
    commands = plan(target, tmp_path / "venv")
    installing = [
        each for each in commands if " install " in each or "scripts/" in each
    ]
    assert installing
    assert all("-c constraints.txt" in each for each in installing)
    assert last in commands[-1]


@pytest.mark.parametrize("target", ["demo", "test", "lint", "format-check"])
def test_a_second_run_installs_nothing(target, tmp_path):
    for stamp in (".made", ".installed-demo", ".installed-all"):
        (tmp_path / stamp).touch()
    (command,) = plan(target, tmp_path)
    assert " install " not in command


def test_tests_leave_the_demo_installed(tmp_path):
    assert plan("test", tmp_path / "venv")[-2].count(".installed-") == 2


def test_each_extra_is_installed_alone_and_used():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    (matrix,) = re.findall(r"extra: \[(.*?)\]", workflow, re.DOTALL)
    assert {each.strip() for each in matrix.split(",")} == {'""', *EXTRAS}
    script = (ROOT / "scripts" / "check_package.py").read_text("utf-8")
    (uses,) = re.findall(r"^USES: .*?^}", script, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r'^    "(\w+)": ', uses, re.MULTILINE)) == set(EXTRAS) - {
        "all"
    }
