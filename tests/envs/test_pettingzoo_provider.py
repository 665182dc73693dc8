"""Tasks called ``"module:name"``: whose keywords are the wrapper's."""

import re
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest

pytest.importorskip("pettingzoo")

from support.zoo import Script, ScriptedEnv

from marl_collect.envs import PettingZooWrapper
from marl_collect.envs.pettingzoo.provider import find_task, settings


class Makers:
    """Callables that build environments, each with other parameters."""

    seed: Any = None
    built: ClassVar[list[PettingZooWrapper]] = []

    @staticmethod
    def plain(n_agents: int = 2) -> ScriptedEnv:
        return ScriptedEnv(Script(n_agents=n_agents))

    @staticmethod
    def any_keyword(**keywords: Any) -> ScriptedEnv:
        return Makers.plain(**keywords)

    @staticmethod
    def named(seed: int = 0) -> ScriptedEnv:
        Makers.seed = seed
        return ScriptedEnv()

    @staticmethod
    def wraps() -> PettingZooWrapper:
        Makers.built.append(PettingZooWrapper(ScriptedEnv()))
        return Makers.built[-1]

    @staticmethod
    def wraps_any(**keywords: Any) -> PettingZooWrapper:
        Makers.built.append(PettingZooWrapper(ScriptedEnv(), **keywords))
        return Makers.built[-1]


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("own_tasks")
    module.Makers, module.Env = Makers, ScriptedEnv
    monkeypatch.setitem(sys.modules, "own_tasks", module)
    Makers.built.clear()


@pytest.mark.parametrize("name", ["plain", "any_keyword"])
def test_the_wrapper_takes_its_keywords(name: str) -> None:
    keywords = {"done_on_any": False, "agent_ids": True, "fast": False}
    with find_task(f"own_tasks:Makers.{name}")(n_agents=3, **keywords) as env:
        assert env.n_agents == 3
        assert not env.description.done_on_any
        assert env.observation_space["agent"]["observation"].shape == (3, 6)


def test_a_keyword_that_the_callable_names_is_its_own() -> None:
    with find_task("own_tasks:Makers.named")(seed=7) as env:
        assert Makers.seed == 7
        assert env.description.pinned_seed is None


def test_a_callable_that_wraps_takes_the_keywords_itself() -> None:
    with find_task("own_tasks:Makers.wraps_any")(done_on_any=False) as env:
        assert not env.description.done_on_any
    assert len(Makers.built) == 2
    assert all(env.is_closed for env in Makers.built)


def test_a_callable_that_wraps_must_name_the_keywords() -> None:
    message = (
        "own_tasks:Makers.wraps has no argument 'done_on_any', and the "
        "PettingZooWrapper that it returns takes none any more: add a parameter "
        "done_on_any to the callable"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        find_task("own_tasks:Makers.wraps")(done_on_any=False)
    assert all(env.is_closed for env in Makers.built)


def test_the_settings_of_a_pettingzoo_environment_include_the_wrappers() -> None:
    own = settings("own_tasks:Env")
    assert list(own)[:2] == ["script", "render_mode"]
    assert own["done_on_any"] is None
    assert own["absent"] == "dead"
    assert settings("own_tasks:Makers.wraps") == {}
