"""The three folders are one package, know only what they should, and import cheaply."""

import ast
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import marl_collect
from marl_collect import lazy

ROOT = Path(__file__).resolve().parents[1]
with (ROOT / "pyproject.toml").open("rb") as _file:
    PACKAGES = tomllib.load(_file)["tool"]["setuptools"]["packages"]
LINKS = {"envs": ROOT / "envs", "models": ROOT / "models"}
LAYERS = [
    {"errors"},
    {"lazy", "options"},
    {"programs"},
    {"core"},
    {"files", "processes"},
    {"buffers", "weights"},
    {"policies"},
    {"rollout", "parallel_env"},
    {"devices"},
    {"collectors"},
    {
        "distributed",
        "envs",
        "evaluation",
        "interop",
        "models",
        "rendering",
        "storage",
        "testing",
    },
    {"training"},
    {"cli"},
]
"""The rooms of the package, bottom first. A room imports from layers below its own."""
LOOSE_MODULES = 3
OUTSIDE_ENGINE = re.compile(r"marl_collect\.(envs|models|training)\b")
COLLECTING = {
    *("core", "processes", "buffers", "weights", "policies", "rollout"),
    *("parallel_env", "devices", "collectors", "distributed"),
}
"""The rooms that collect data."""
DO_WITHOUT = {
    "cli": {"envs", "models"},  # It finds them by name, through entry points.
    "training": {"envs"},
    "models": {"processes", "collectors"},
    **{room: {"files", "programs"} for room in COLLECTING},
}
"""Rooms on lower layers that a room does not import."""
TORCH = {"torch", "tensordict", "torchrl"}
FAMILIES = [
    {"pettingzoo", "mpe2", "multi_agent_ale_py"},
    {"meltingpot", "dmlab2d", "ml_collections"},
    {"lbforaging"},
    {"gymnasium_robotics"},
    {"overcooked_ai_py"},
    {"pyspiel", "shimmy"},
    {"rware"},
    {"vmas"},
    {"jaxmarl"},
]


def dotted(path: Path) -> str:
    """The package or module name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in LINKS:
        parts = ("marl_collect", *parts)
    return ".".join(part for part in parts if part != "__init__")


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Every dotted name that these nodes import, `from a import b` as `a.b`."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def nodes_at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Walks what runs on import: no function bodies, nothing under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from nodes_at_import_time(node)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def output(*command: str | Path, **options: Any) -> str:
    """Return what a command prints in the repository."""
    settings: Any = {"cwd": ROOT, "text": True, "check": True} | options
    return subprocess.run(command, stdout=subprocess.PIPE, **settings).stdout


def tracked() -> list[str]:
    """Files git knows or would add, relative to the root."""
    listing = output("git", "ls-files", "-z", "-co", "--exclude-standard")
    return [name for name in listing.strip("\0").split("\0") if (ROOT / name).exists()]


@cache
def sources() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    folders = [ROOT / "marl_collect", *LINKS.values()]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    inside = {
        path
        for path in files
        if path.relative_to(ROOT).parts[:2]
        not in {("marl_collect", link) for link in LINKS}
    }
    return {dotted(path): path for path in sorted(inside)}


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, anywhere in it."""
    found: dict[str, set[str]] = {module: set() for module in sources()}
    for module, path in sources().items():
        for name in imported(ast.walk(parsed(path))):
            candidates = (name, name.rpartition(".")[0])
            found[module] |= {next((c for c in candidates if c in sources()), module)}
        found[module].discard(module)
    return found


def room(module: str) -> str:
    """The first name below the package: a folder or a loose module."""
    return module.split(".")[1] if "." in module else ""


def test_a_room_imports_only_from_layers_below_and_what_it_may() -> None:
    floor = {name: n for n, layer in enumerate(LAYERS) for name in layer}
    edges = {(module, other) for module in imports() for other in imports()[module]}
    edges = {(m, o) for m, o in edges if room(m) and room(o) and room(m) != room(o)}
    assert [(m, o) for m, o in edges if floor[room(o)] >= floor[room(m)]] == []
    # Objects of the contract and collectors show themselves in notebooks.
    assert {(m, o) for m, o in edges if room(o) in DO_WITHOUT.get(room(m), ())} == {
        ("marl_collect.core.description", "marl_collect.programs.notebooks"),
        ("marl_collect.collectors.collector", "marl_collect.programs.notebooks"),
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    # A package's own file lists public names; nothing runs there.
    packages = {name for name, path in sources().items() if path.name == "__init__.py"}
    graph = {name: imports()[name] - packages for name in imports().keys() - packages}
    TopologicalSorter(graph).prepare()


def test_every_room_has_a_layer_and_few_modules_are_loose() -> None:
    loose = [
        path.stem
        for path in (ROOT / "marl_collect").glob("*.py")
        if path.stem != "__init__"
    ]
    rooms = {room(module) for module in sources()} - {""}
    assert rooms == set().union(*LAYERS)
    assert len(loose) <= LOOSE_MODULES


def test_every_package_is_listed_in_pyproject() -> None:
    inits = [ROOT / "marl_collect", *LINKS.values()]
    packages = {
        dotted(init) for folder in inits for init in folder.rglob("__init__.py")
    }
    assert packages == set(PACKAGES)
    assert len(PACKAGES) == len(packages)


def test_only_the_bridge_imports_torchrl() -> None:
    users = {
        room(module)
        for module, path in sources().items()
        for name in imported(ast.walk(parsed(path)))
        if name.partition(".")[0] == "torchrl"
    }
    assert users == {"interop"}


def test_the_engine_imports_no_module_above_it_by_its_name() -> None:
    names = {
        (module, argument.value)
        for module, path in sources().items()
        if room(module) not in {"cli", "training", *LINKS}
        for call in ast.walk(parsed(path))
        if isinstance(call, ast.Call)
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }
    assert not [name for name in names if OUTSIDE_ENGINE.match(name[1])]


@pytest.mark.parametrize("path", sorted(LINKS["envs"].rglob("*.py")), ids=dotted)
def test_an_environment_module_knows_one_family_and_imports_no_torch(
    path: Path,
) -> None:
    names = imported(nodes_at_import_time(parsed(path)))
    assert not {name for name in names if name.partition(".")[0] in TORCH}
    used = {name.partition(".")[0] for name in imported(ast.walk(parsed(path)))}
    assert len([family for family in FAMILIES if used & family]) <= 1


@pytest.mark.processes
@pytest.mark.parametrize("folder", LINKS)
def test_a_link_is_committed_as_one_and_its_folder_refuses_its_second_name(
    folder: str,
) -> None:
    staged = output("git", "ls-files", "--stage", f"marl_collect/{folder}")
    mode, blob, *_ = staged.split()
    assert mode == "120000"
    assert output("git", "cat-file", "blob", blob) == f"../{folder}"
    command = [sys.executable, "-c", f"import {folder}"]
    errors = output(*command, check=False, stderr=subprocess.STDOUT)
    assert f"Import marl_collect.{folder}, not {folder}" in errors


def test_test_files_have_names_of_their_own() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len({path.name for path in files}) == len(files)
    packages = [path.parent.name for path in (ROOT / "tests").rglob("__init__.py")]
    assert packages == ["support"]  # Imported by name, as tests are not.


BUILD = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"


@pytest.mark.processes
@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
def test_a_wheel_holds_the_three_folders_and_nothing_else(
    links: bool, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in tracked():
        copy = checkout / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if links or not (ROOT / name).is_symlink():
            shutil.copy2(ROOT / name, copy, follow_symlinks=False)
        else:  # what git writes where the file system has no links
            copy.write_text((ROOT / name).readlink().as_posix())
    if links:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        options = ["--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path)]
        output(*command, *options, checkout)
    else:  # What pip calls, without its preparations.
        build = [sys.executable, "-W", "ignore", "-c", BUILD, str(tmp_path)]
        output(*build, cwd=checkout)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    tops = {name.partition("/")[0] for name in names}
    expected = {
        dotted(ROOT / name).replace(".", "/")
        + ("/__init__.py" if name.endswith("__init__.py") else ".py")
        for name in tracked()
        if name.endswith(".py") and name.partition("/")[0] in {"marl_collect", *LINKS}
    }
    assert {top for top in tops if not top.endswith(".dist-info")} == {"marl_collect"}
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"marl_collect/py.typed", "marl_collect/cli/viewer/page.html"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    installed = str(tmp_path / "installed")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import marl_collect.envs, "
        "marl_collect.models; print(marl_collect.models.__file__)"
    )
    printed = output(sys.executable, "-c", code, installed, cwd=tmp_path)
    assert printed.startswith(installed)


@pytest.mark.processes
def test_the_tests_that_make_names_exist() -> None:
    make = ["env", "-u", "MAKEFLAGS", "make", "-n", "test-tensordict", "try", "ARGS="]
    named = re.findall(r"(?<!/)\btests/[\w/.]+", output(*make))
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


HEAVY = ("torch", "tensordict", "torchrl", "pettingzoo", "meltingpot", "dmlab2d")


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
    lines = output(sys.executable, "-c", PROBE, *PACKAGES).splitlines()
    modules = dict(json.loads(line) for line in lines)
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
