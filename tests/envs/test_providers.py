"""Each family finds its tasks by name; the command line merges the families."""

import importlib
import importlib.util
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.packages import hide, skip_without
from support.scripts import run_python

from marl_collect.cli import tasks
from marl_collect.envs.family import Family, UnknownTaskError
from marl_collect.envs.jaxmarl.provider import FAMILY as JAXMARL
from marl_collect.envs.lab2d.provider import FAMILY as LAB2D
from marl_collect.envs.lbforaging.provider import FAMILY as LBFORAGING
from marl_collect.envs.mamujoco.provider import FAMILY as MAMUJOCO
from marl_collect.envs.matrix.provider import FAMILY as MATRIX
from marl_collect.envs.meltingpot.provider import FAMILY as MELTINGPOT
from marl_collect.envs.openspiel.provider import FAMILY as OPENSPIEL
from marl_collect.envs.overcooked.provider import FAMILY as OVERCOOKED
from marl_collect.envs.pettingzoo import provider as pettingzoo
from marl_collect.envs.rware.provider import FAMILY as RWARE
from marl_collect.envs.vmas.provider import FAMILY as VMAS
from marl_collect.errors import MissingPackageError
from marl_collect.programs.task_providers import GROUP

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the entry points of pyproject.toml, independently of the environment."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"][GROUP]
    info = tmp_path / "marl_collect-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: marl-collect\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)


def test_meltingpot_has_priority_over_lab2d() -> None:
    skip_without("meltingpot", "needs the extra meltingpot")
    assert "clean_up" in _built_by("clean_up", MELTINGPOT)
    assert "clean_up" in _built_by("lab2d/clean_up", LAB2D)
    assert "clean_up_0" in _built_by("clean_up_0", MELTINGPOT)  # a scenario


def test_aec_tasks_need_no_parallel_false() -> None:
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    env = pettingzoo.find_task("tictactoe_v3")()
    assert env.description.group_map
    env.close()


FAMILIES = [
    *(JAXMARL, LAB2D, LBFORAGING, MAMUJOCO, MATRIX, MELTINGPOT, OPENSPIEL),
    *(OVERCOOKED, RWARE, VMAS),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_wrong_name_is_refused_by_the_environment(family: Family) -> None:
    if any(importlib.util.find_spec(module) is None for module in family.modules):
        pytest.skip(f"needs the extra {family.extra}")
    kind = pkgutil.resolve_name(family.env)
    for name in (5, None, ["a"], b"a"):
        with pytest.raises(TypeError, match=re.escape(repr(name))):
            kind(name)
    with pytest.raises(Exception, match=r"cramped_rom\b|lists robots"):
        kind("cramped_rom")


@pytest.mark.parametrize("family", [pettingzoo, *FAMILIES])
def test_a_family_has_no_advice_on_unrelated_names(family: Any) -> None:
    with pytest.raises(UnknownTaskError, match="^$"):
        family.find_task("elsewhere/nothing")


def test_an_unknown_task_is_an_error_with_the_advice_of_its_family() -> None:
    pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    with pytest.raises(ValueError, match="This installation has sisl/multiwalker_v9"):
        tasks.find_factory("multiwalker_v8", {})


def test_similar_names_come_from_all_families() -> None:
    skip_without("meltingpot", "needs the extra meltingpot")
    with pytest.raises(ValueError, match="Did you mean meltingpot/hidden_agenda"):
        tasks.find_factory("hiden_agenda", {})


def test_only_pettingzoo_tasks_need_a_render_mode() -> None:
    skip_without("meltingpot", "needs the extra meltingpot")
    for task, expected in [
        ("multiwalker_v9", {"render_mode": "rgb_array"}),
        ("hidden_agenda", {}),
        ("os:getcwd", {}),
    ]:
        factory = tasks.find_factory(task, {}, pictures=True)
        assert factory.keywords == expected  # type: ignore[attr-defined]


def test_own_factories_get_their_render_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_tasks")
    module.make = lambda render_mode=None: render_mode
    monkeypatch.setitem(sys.modules, "own_tasks", module)
    users = {"render_mode": "human"}
    for pictures, given, keywords in [
        *((True, {}, {"render_mode": "rgb_array"}), (False, {}, {})),
        (True, users, users),
    ]:
        factory: Any = tasks.find_factory("own_tasks:make", given, pictures=pictures)
        assert factory.keywords == keywords


def _built_by(task: str, family: Family) -> tuple[Any, ...]:
    """Return the arguments with which ``family`` builds ``task``."""
    factory: Any = tasks.find_factory(task, {})
    env, *arguments = factory.args
    assert env == family.env
    return tuple(arguments)


def test_own_tasks_need_no_pettingzoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    monkeypatch.delitem(sys.modules, "marl_collect.envs.pettingzoo.env", raising=False)
    factory = tasks.find_factory("workloads.counting:CountingEnv", {})
    assert type(factory()).__name__ == "CountingEnv"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_without_its_library_says_how_to_install_it(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, family.modules[0])
    command = f'pip install "marl-collect[{family.extra}]"'
    assert family.available_tasks() == {f"{family.name}/...": command}
    for use in (family.find_task, family.settings):
        with pytest.raises(MissingPackageError, match=re.escape(command)):
            use(f"{family.name}/anything")
        for task in ("elsewhere/anything", "anything"):
            with pytest.raises(UnknownTaskError, match="^$"):
                use(task)
    assert tasks.available_tasks()[f"{family.name}/..."] == command


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        *(("JaxMarlEnv", "jaxmarl", "jaxmarl"), ("RwareEnv", "rware", "rware")),
        ("OvercookedEnv", "overcooked_ai_py", "overcooked"),
    ],
)
def test_libraries_that_are_imported_late_are_named_with_their_extra(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(library, f"needs {extra}")
    environment = getattr(importlib.import_module("marl_collect.envs"), name)
    for imported in [module for module in sys.modules if module.startswith(library)]:
        monkeypatch.delitem(sys.modules, imported)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingPackageError, match=rf"collect\[{extra}\]") as failure:
        environment("coin_game")
    assert str(failure.value.name).startswith(library)


PETTINGZOO = ("PettingZooEnv", "PettingZooWrapper")
# Top-level modules that extras install.
OF_EXTRAS = (
    *("dmlab2d", "gymnasium_robotics", "imageio", "jax", "jaxmarl", "lbforaging"),
    *("matplotlib", "meltingpot", "minari", "mpe2", "mujoco", "overcooked_ai_py"),
    *("pettingzoo", "pyarrow", "pyspiel", "ray", "rware", "shimmy", "tensorstore"),
    *("torchrl", "vmas"),
)
WITHOUT_EXTRAS = """
import sys
from importlib import import_module
from marl_collect.lazy import public_names
sys.modules |= dict.fromkeys(sys.argv[1:])  # Their imports fail.
for room in "envs", "collectors", "distributed", "evaluation", "models", "storage":
    for name in public_names(f"marl_collect.{room}"):
        try:
            value = getattr(import_module(f"marl_collect.{room}"), name)
            if room == "envs" and name in ("Lab2dEnv", "MeltingpotEnv"):
                value("clean_up")  # They import their libraries late.
        except Exception as error:
            print(room, name, type(error).__name__, *str(error).splitlines(), sep="\\t")
"""


@pytest.mark.processes
def test_without_any_extra_every_public_name_works_or_names_its_extra() -> None:
    process = run_python("-c", WITHOUT_EXTRAS, *OF_EXTRAS, check=True, interpreter=True)
    extras = {}
    for line in process.stdout.splitlines():
        room, name, kind, message = line.split("\t")
        assert kind == "MissingPackageError", line
        (extra,) = re.findall(r"pip install .marl-collect\[(\w+)\].", message)
        extras[room, name] = extra
    expected = {family.env.rpartition(":")[2]: family.extra for family in FAMILIES}
    expected |= dict.fromkeys(("AgentLists", *PETTINGZOO), "pettingzoo")
    of_envs = {name: extra for (room, name), extra in extras.items() if room == "envs"}
    assert of_envs == expected
    others = {extra for (room, _), extra in extras.items() if room != "envs"}
    assert others == {"datasets"}


SETTINGS = {
    "jaxmarl": ("num_envs", 32),
    "lab2d": ("max_steps", None),
    "meltingpot": ("max_steps", None),
    "vmas": ("num_envs", 32),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_listed_tasks_are_known_and_have_settings(family: Family) -> None:
    if any(importlib.util.find_spec(module) is None for module in family.modules):
        optional = family.name == "jaxmarl"
        pytest.skip("needs jaxmarl" if optional else f"needs the extra {family.extra}")
    available = family.available_tasks()
    assert len(available) >= 3
    assert available.items() <= tasks.available_tasks().items()
    for task, missing in available.items():
        assert missing == "" or family is MELTINGPOT  # Its bots may be missing.
        assert callable(family.find_task(task))
    settings = family.settings(task)
    name, default = SETTINGS.get(family.name, ("time_limit", None))
    assert settings[name] == default
