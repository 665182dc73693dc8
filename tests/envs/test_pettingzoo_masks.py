"""Infos and their masks; agents in other containers than lists; pictures."""

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from pettingzoo import AECEnv, ParallelEnv
from support.zoo import Countdown, Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import MASKED, BoundEnv, contained, legal, masked, scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import AgentLists, PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
KINDS = pytest.mark.parametrize("kind", [ScriptedEnv, ScriptedTurns])


def in_info(i: int, step: int) -> dict[str, Any]:
    return {"action_mask": legal(i, step)}


def from_step_one(i: int, step: int) -> dict[str, Any]:
    return in_info(i, step) if step else {}


@KINDS
def test_masks_can_be_taken_from_infos(kind: Any) -> None:
    script = Script(info=from_step_one)
    keywords: dict[str, Any] = {"group_map": IN_ONE, "action_mask": "info"}
    env = BoundEnv(PettingZooWrapper(kind(script), **keywords))
    assert env["agents", "action_mask"].all()
    env.step()
    acting = env["agents", "mask"]
    expected = np.array([legal(i, 1) for i in range(3)], dtype=bool)
    assert (env["agents", "action_mask"] == expected | ~acting[:, None]).all()
    check_env(lambda: PettingZooWrapper(kind(script), **keywords))


def test_a_missing_mask_does_not_keep_the_previous_one() -> None:
    def info(i: int, step: int) -> Any:
        if step == 2:
            return {0: None, 1: {}, 2: {"action_mask": None}}[i]
        return in_info(i, step)

    env = scripted(Script(info=info))
    env.step()
    assert not env["agent", "action_mask"].all(-1).any()
    env.step()
    assert env["agent", "action_mask"].all()
    with pytest.raises(ContractError, match="agent_0 acts, but its info has no action"):
        check_env(lambda: PettingZooWrapper(ScriptedEnv(Script(info=info))))
    check_env(
        lambda: PettingZooWrapper(ScriptedEnv(Script(info=info)), action_mask="info")
    )


def test_masks_can_be_left_out() -> None:
    env = scripted(Script(info=in_info), action_mask=None)
    env.step()
    assert ("agent", "action_mask") not in env.row
    env = scripted(Script(observation=MASKED, observe=masked), action_mask=None)
    assert ("agent", "action_mask") not in env.row
    mask = env["agent", "observation", "action_mask"]
    assert mask.tolist() == [legal(i, 0).tolist() for i in range(3)]


def test_action_mask_selects_the_source_if_there_are_two() -> None:
    script = Script(observation=MASKED, observe=masked, info=lambda i, s: in_info(4, s))
    env = scripted(script, action_mask="info")
    assert (env["agent", "action_mask"] == legal(4, 0)).all()
    assert ("agent", "observation", "action_mask") in env.row
    env = scripted(script, action_mask="observation")
    assert env["agent", "action_mask"].tolist() == [
        legal(i, 0).astype(bool).tolist() for i in range(3)
    ]


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


@KINDS
@pytest.mark.parametrize("name", SEQUENCES)
def test_agents_may_be_in_any_sequence(kind: Any, name: str) -> None:
    script = Script(
        ends={"agent_1": (2, "terminated")}, joins={"agent_2": 2}, max_cycles=5
    )
    options: dict[str, Any] = {"group_map": IN_ONE, "done_on_any": False}

    def make() -> PettingZooWrapper:
        raw = contained(kind(script), SEQUENCES[name])
        return PettingZooWrapper(raw, **options)

    env, reference = (
        BoundEnv(wrapped)
        for wrapped in (make(), PettingZooWrapper(kind(script), **options))
    )
    for _ in range(5):
        env.step(agents=[1, 2, 3])
        reference.step(agents=[1, 2, 3])
        for key, array in reference.row.items():
            assert np.array_equal(array, env[key]), key
    assert env.env.env.unwrapped.received == reference.env.env.received
    assert env.env.description.group_map == {"agents": [f"agent_{i}" for i in range(3)]}
    check_env(make, episodes=1)


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
