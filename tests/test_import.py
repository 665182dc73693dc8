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


def modules_loaded_by(name: str) -> set[str]:
    """Top-level modules that importing `name` in a new interpreter adds."""
    code = (
        "import sys, json; before = set(sys.modules); "
        f"import {name}; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return {module.partition(".")[0] for module in json.loads(run.stdout)}


def test_importing_the_package_loads_the_standard_library_only():
    assert modules_loaded_by("marl_collect") <= sys.stdlib_module_names | {
        "marl_collect"
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_neither_torch_nor_environments(package: str):
    assert modules_loaded_by(package).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", marl_collect.__all__)
def test_a_public_name_resolves(name: str):
    module, attribute = lazy.public_names("marl_collect")[name]
    assert getattr(marl_collect, name) is getattr(
        importlib.import_module(module), attribute
    )


def test_no_public_name_is_the_name_of_a_module():
    modules = {module.name for module in pkgutil.iter_modules(marl_collect.__path__)}
    assert modules.isdisjoint(marl_collect.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_can_be_imported(package: str):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert set(names) <= set(dir(module))
    for name in names:
        getattr(module, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'marl_collect' has no attribute 'Colle"):
        marl_collect.Collektor  # noqa: B018
