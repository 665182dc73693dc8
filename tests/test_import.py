"""Importing the package is cheap, and every public name is there when asked for."""

import importlib
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import marl_collect
from marl_collect import lazy

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "tensordict", "torchrl", "pettingzoo", "meltingpot", "dmlab2d")

with (ROOT / "pyproject.toml").open("rb") as _file:
    PACKAGES = tomllib.load(_file)["tool"]["setuptools"]["packages"]


PROBE = """
import importlib, json, os, sys

before = set(sys.modules)
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        importlib.import_module(name)
        print(json.dumps([name, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return the top-level modules that importing a package in an interpreter adds.

    Each is imported in a fork of an interpreter that has imported nothing of ours.
    """
    command = [sys.executable, "-c", PROBE, *PACKAGES]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = dict(json.loads(line) for line in process.stdout.splitlines())
    return {
        package: {name.partition(".")[0] for name in names}
        for package, names in modules.items()
    }


@pytest.mark.processes
def test_importing_the_package_loads_the_standard_library_only(
    loaded: dict[str, set[str]],
) -> None:
    assert loaded["marl_collect"] <= sys.stdlib_module_names | {"marl_collect"}


@pytest.mark.processes
@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_neither_torch_nor_environments(
    package: str, loaded: dict[str, set[str]]
) -> None:
    assert "marl_collect" in loaded[package]
    assert loaded[package].isdisjoint(HEAVY)


@pytest.mark.parametrize("name", marl_collect.__all__)
def test_a_public_name_resolves(name: str) -> None:
    module, attribute = lazy.public_names("marl_collect")[name]
    assert getattr(marl_collect, name) is getattr(
        importlib.import_module(module), attribute
    )


def test_no_public_name_is_the_name_of_a_module() -> None:
    modules = {module.name for module in pkgutil.iter_modules(marl_collect.__path__)}
    assert modules.isdisjoint(marl_collect.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert set(names) <= set(dir(module))
    for name in names:
        getattr(module, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'marl_collect' has no attribute 'Colle"):
        marl_collect.Collektor  # noqa: B018
