"""Infos that are no dicts, agents that are no lists, pictures without a mode."""

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper
from support.zoo import Countdown, Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import BoundEnv

from marl_collect import MarlGroupMapType
from marl_collect.envs import AgentLists, PettingZooWrapper
from marl_collect.testing.check_env import check_env

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
KINDS = pytest.mark.parametrize("kind", [ScriptedEnv, ScriptedTurns])
READERS: Any = pytest.mark.parametrize(
    "keywords", [{}, {"info_keys": ["speed"]}, {"action_mask": "info"}]
)


def with_infos(kind: Any, infos: dict[str, Any], script: Script | None = None) -> Any:
    """Return an environment that adds ``infos`` to its own."""
    raw = kind(script)

    def change(results: Any) -> None:
        (raw.infos if results is None else results[-1]).update(infos)

    return altered(raw, reset=change, step=change)


@KINDS
@READERS
def test_infos_may_have_other_keys_than_agents(kind: Any, keywords: Any) -> None:
    script = Script(info=lambda i, step: {"speed": 10 * i + step})

    def factory() -> PettingZooWrapper:
        raw = with_infos(kind, {"count": 3, "speeds": np.ones(2), "all": {}}, script)
        return PettingZooWrapper(raw, group_map=IN_ONE, **keywords)

    env = BoundEnv(factory())
    env.step()
    if "info_keys" in keywords:
        assert env["agents", "info", "speed"].tolist() == [1, 11, 21]
    check_env(factory, episodes=1)


@KINDS
@READERS
@pytest.mark.parametrize("info", [np.ones(2), [1], 3, "text"])
def test_an_info_that_is_no_dict_is_an_error_that_names_the_agent(
    kind: Any, keywords: Any, info: Any
) -> None:
    raw = with_infos(kind, {"agent_0": info})
    message = "scripted_v0: the info of agent agent_0 must be a dict, but is"
    with pytest.raises(TypeError, match=message):
        BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE, **keywords))


def test_an_info_that_is_no_dict_in_a_later_step_is_an_error() -> None:
    raw = altered(ScriptedEnv(), step=lambda r: r[-1].update(agent_1=np.ones(2)))
    env = BoundEnv(PettingZooWrapper(raw))
    with pytest.raises(TypeError, match="scripted_v0: the info of agent agent_1 must"):
        env.step()


def test_infos_that_nobody_reads_may_be_anything() -> None:
    raw = with_infos(ScriptedEnv, {"agent_0": np.ones(2)})
    env = BoundEnv(PettingZooWrapper(raw, action_mask=None))
    env.step()


SEQUENCES = {
    "array": np.array,
    "tuple": tuple,
    "keys": lambda names: dict.fromkeys(names).keys(),
    "deque": deque,
}


class _Contained:
    """Mixed into PettingZoo's wrappers: agents are in another container than a list."""

    def __init__(self, raw: Any, container: Any) -> None:
        super().__init__(raw)  # type: ignore[call-arg]
        self.container = container

    @property
    def possible_agents(self) -> Any:
        return self.container(self.env.possible_agents)  # type: ignore[attr-defined]

    @property
    def agents(self) -> Any:
        return self.container(self.env.agents)  # type: ignore[attr-defined]


class ContainedParallel(_Contained, BaseParallelWrapper):
    pass


class ContainedTurns(_Contained, BaseWrapper):
    pass


def contained(kind: Any, container: Any) -> PettingZooWrapper:
    script = Script(
        ends={"agent_1": (2, "terminated")}, joins={"agent_2": 2}, max_cycles=5
    )
    wrapper = ContainedParallel if kind is ScriptedEnv else ContainedTurns
    raw = kind(script)
    if container is not None:
        raw = wrapper(raw, container)
    return PettingZooWrapper(raw, group_map=IN_ONE, done_on_any=False)


@KINDS
@pytest.mark.parametrize("name", SEQUENCES)
def test_agents_may_be_in_any_sequence(kind: Any, name: str) -> None:
    env = BoundEnv(contained(kind, SEQUENCES[name]))
    reference = BoundEnv(contained(kind, None))
    for _ in range(5):
        env.step(agents=[1, 2, 3])
        reference.step(agents=[1, 2, 3])
        for key, array in reference.row.items():
            assert np.array_equal(array, env[key]), key
    assert env.env.env.unwrapped.received == reference.env.env.received
    assert env.env.description.group_map == {"agents": [f"agent_{i}" for i in range(3)]}
    check_env(lambda: contained(kind, SEQUENCES[name]), episodes=1)


def test_numbers_in_an_array_are_agents() -> None:
    class Numbered(ParallelEnv):
        metadata = {"name": "numbered_v0"}
        possible_agents = np.arange(2)

        def observation_space(self, agent: int) -> Any:
            return spaces.Box(0, 9, (1,))

        def action_space(self, agent: int) -> Any:
            return spaces.Discrete(3)

        def reset(self, seed: Any = None, options: Any = None) -> Any:
            self.agents = np.arange(2)
            return dict.fromkeys(range(2), np.zeros(1)), {}

        def step(self, actions: Any) -> Any:
            self.received = dict(actions)
            flags = dict.fromkeys(range(2), False)
            seen = dict.fromkeys(range(2), np.ones(1))
            return seen, dict.fromkeys(range(2), 1.0), flags, flags, {}

    raw = Numbered()
    env = BoundEnv(PettingZooWrapper(raw, group_map=IN_ONE))
    env.step(agents=[1, 2])
    assert raw.received == {0: 1, 1: 2}
    assert env.env.group_map == {"agents": ["0", "1"]}


@KINDS
@pytest.mark.parametrize(
    "container", [set, iter, ",".join, lambda names: np.array([names]), lambda _: None]
)
def test_agents_without_an_order_or_a_name_are_refused(
    kind: Any, container: Any
) -> None:
    with pytest.raises(
        ValueError, match="scripted_v0 must have a list possible_agents"
    ):
        contained(kind, container)


@KINDS
@pytest.mark.parametrize("missing", [None, 3])
def test_agents_that_are_no_sequence_are_an_error(kind: Any, missing: Any) -> None:
    raw = kind()
    wrapper = ContainedParallel if kind is ScriptedEnv else ContainedTurns
    wrapped = wrapper(raw, list)
    env = PettingZooWrapper(wrapped, group_map=IN_ONE)
    wrapped.container = lambda _: missing
    with pytest.raises(TypeError, match="scripted_v0: env.agents must be a list of"):
        BoundEnv(env)


@KINDS
def test_own_pictures_need_no_render_mode(kind: Any) -> None:
    raw = kind()
    del raw.render_mode
    env = BoundEnv(PettingZooWrapper(raw))
    env.step()
    picture = env.env.render()
    assert picture is not None
    assert (picture == 1).all()


@KINDS
def test_an_environment_without_render_has_no_picture(kind: Any) -> None:
    raw = kind()
    del raw.render_mode
    raw.render = partial((ParallelEnv if kind is ScriptedEnv else AECEnv).render, raw)
    assert BoundEnv(PettingZooWrapper(raw)).env.render() is None
    raw.render_mode = None
    raw.render = lambda: np.zeros((1, 1, 3), np.uint8)
    assert BoundEnv(PettingZooWrapper(raw)).env.render() is None


def test_pictures_of_agents_in_lists_need_no_render_mode() -> None:
    raw: Any = Countdown()
    raw.render = lambda: np.ones((2, 2, 3), np.uint8)
    env = BoundEnv(PettingZooWrapper(AgentLists(raw))).env
    picture = env.render()
    assert picture is not None
    assert picture.all()
