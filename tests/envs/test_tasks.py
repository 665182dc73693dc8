"""PettingZoo tasks by name, and the advice for tasks that are not found."""

import importlib.util
import sys

import pytest
from support.packages import hide
from support.scripts import run_python

pytest.importorskip("pettingzoo")

from marl_collect.envs import (
    MissingPackageError,
    PettingZooEnv,
    UnknownTaskError,
    available_envs,
)
from marl_collect.envs.pettingzoo import tasks
from marl_collect.envs.pettingzoo.tasks import find_task


def test_a_task_is_found_with_and_without_its_family() -> None:
    pytest.importorskip("mpe2")
    names = ["simple_spread_v3", "mpe/simple_spread_v3", "mpe2/simple_spread_v3"]
    assert len({find_task(name) for name in names}) == 1


def test_the_tasks_of_every_family_are_listed() -> None:
    available = available_envs()
    for task in ("sisl/multiwalker_v9", "butterfly/pistonball_v6", "atari/pong_v3"):
        assert task in available
    for name, family in tasks.FAMILIES.items():
        package = family.package.split(".")[0]
        if importlib.util.find_spec(package) is None:
            assert available[f"{name}/..."] == f'pip install "{family.install}"'


def test_missing_packages_of_a_task_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "Box2D")
    available = available_envs()
    expected = 'Box2D missing: pip install "pettingzoo[sisl]"'
    assert available["sisl/multiwalker_v9"] == expected
    assert "Box2D" not in available["sisl/pursuit_v5"]


def test_missing_packages_have_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("pettingzoo.sisl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(MissingPackageError, match=r'Box2D.*pip install "pettingzoo\[s'):
        PettingZooEnv("multiwalker_v9")


def test_families_of_other_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mpe2")
    with pytest.raises(UnknownTaskError, match='pip install "mpe2"'):
        find_task("simple_tag_v3")
    with pytest.raises(UnknownTaskError, match='pip install "mpe2"'):
        find_task("mpe/simple_tag_v2")
    assert available_envs()["mpe/..."] == 'pip install "mpe2"'


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("pursuit_v4", "has sisl/pursuit_v5"),
        ("sisl/pursuit_v4", "has sisl/pursuit_v5"),
        ("multiwalker", "has sisl/multiwalker_v9"),
        ("waterworld_v4", r"left PettingZoo with 1.26.*pettingzoo\[sisl\]<1.26"),
        ("gin_rummy_v4", "RLCard"),
        ("multiwaker_v9", "Did you mean sisl/multiwalker_v9"),
        ("butterfly/pistonbal_v6", "butterfly/pistonball_v6"),
        ("qqq", r"available_envs\(\)"),
        ("nowhere/pong_v3", "no task family 'nowhere'.*sisl"),
    ],
)
def test_an_unknown_task_is_an_error_with_advice(task: str, message: str) -> None:
    with pytest.raises(UnknownTaskError, match=message):
        find_task(task)


def test_an_aec_only_task_is_an_error_that_suggests_parallel_false() -> None:
    pytest.importorskip("pygame")
    with pytest.raises(UnknownTaskError, match="parallel=False"):
        PettingZooEnv("tictactoe_v3")


def test_a_module_without_the_callable_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no attribute 'Nothing'"):
        find_task("workloads.pair:Nothing")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "other_modules"),
    [
        ("sisl/multiwalker_v9", ["pettingzoo.classic.", "pymunk", "mpe2", "magent2"]),
        ("mpe/simple_v3", ["pettingzoo.sisl.", "pettingzoo.classic.", "Box2D"]),
    ],
)
def test_only_the_task_s_family_is_imported(
    task: str, other_modules: list[str]
) -> None:
    pytest.importorskip("Box2D" if "sisl" in task else "mpe2")
    script = f"""
import sys
from marl_collect.envs import PettingZooEnv, available_envs
available_envs()
env = PettingZooEnv({task!r})
for name in sorted(sys.modules):
    if name == "torch" or name.startswith(tuple({other_modules!r})):
        print("loaded", name)
"""
    process = run_python("-W", "ignore", "-c", script, check=True, interpreter=True)
    assert "loaded" not in process.stdout
