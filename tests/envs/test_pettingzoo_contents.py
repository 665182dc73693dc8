"""PettingZoo: how results, masks and infos are written to rows, and actions read."""

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from pettingzoo import AECEnv, ParallelEnv
from support.zoo import Countdown, Script, ScriptedEnv, ScriptedTurns, altered
from zoo_tools import MASKED, BoundEnv, legal, masked, scripted

from marl_collect import MarlGroupMapType
from marl_collect.envs import AgentLists, PettingZooWrapper
from marl_collect.testing.check_env import ContractError, check_env

torch = pytest.importorskip("torch")

IN_ONE = MarlGroupMapType.ALL_IN_ONE_GROUP
RAW = pytest.mark.parametrize("raw", [ScriptedEnv, ScriptedTurns])


def wrapped(raw: Any, script: Script | None = None, **keywords: Any) -> BoundEnv:
    return BoundEnv(PettingZooWrapper(raw(script), group_map=IN_ONE, **keywords))


class Sloppy(ScriptedEnv):  # type: ignore[misc]
    """Accepts actions of any agents, and has results that can be changed."""

    def __init__(self, spoil: Any) -> None:
        super().__init__(Script(ends={"agent_1": (2, "terminated")}, max_cycles=4))
        altered(self, reset=lambda r: spoil(self, r), step=lambda r: spoil(self, r))

    def step(self, actions: Any) -> Any:
        return super().step({a: actions.get(a, 0) for a in self.agents})


def drop(index: int, step: int) -> Any:
    def spoil(env: Sloppy, results: Any) -> None:
        if env.steps >= step and len(results) > index:
            results[index].pop("agent_2", None)

    return spoil


def stay(env: Sloppy, _: Any) -> None:
    if env.steps in (2, 3):
        env.agents = ["agent_0", "agent_1", "agent_2"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop(0, 0), r"After reset_row.*lists agent_2, but it has no observation"),
        (drop(0, 1), r"Step 1 of .*lists agent_2, but it has no observation"),
        (drop(1, 2), r"Step 2 of .*lists agent_2, but it has no reward"),
        (drop(2, 3), r"Step 3 of .*lists agent_2, but it has no termination"),
        (stay, r"Step 2 of .*agent_1 is done, but env.agents still lists it"),
    ],
)
def test_check_env_finds_results_without_an_agent(spoil: Any, message: str) -> None:
    def factory() -> PettingZooWrapper:
        return PettingZooWrapper(Sloppy(spoil), done_on_any=False)

    with pytest.raises(ContractError) as excinfo:
        check_env(factory, episodes=2)
    assert any(re.search(message, finding) for finding in excinfo.value.findings)
    assert len(excinfo.value.findings) <= 3, "a finding is repeated for every step"


@RAW
@pytest.mark.parametrize(
    "dtype", [np.uint8, np.bool_, np.int16, np.uint64, np.float16, np.float64]
)
def test_a_state_without_space_may_have_any_dtype(raw: Any, dtype: Any) -> None:
    def factory() -> PettingZooWrapper:
        env = raw()
        env.state = lambda: np.array([[env.steps > 2, True]], dtype)
        return PettingZooWrapper(env, return_state=True)

    env = BoundEnv(factory())
    assert env["state"].dtype == dtype
    assert env["state"].tolist() == [[False, True]]
    space = env.env.observation_space["state"]
    assert space.contains(np.ones((1, 2), dtype))
    check_env(factory)


@RAW
def test_an_error_in_state_is_raised_until_an_agent_left(raw: Any) -> None:
    script = Script(ends={"agent_1": (2, "terminated")})
    env = wrapped(raw, script, return_state=True, done_on_any=False)
    zoo = env.env.env
    state = zoo.state

    def broken() -> Any:
        raise ZeroDivisionError

    zoo.state = broken
    with pytest.raises(ZeroDivisionError):
        env.env.reset_row(0)
    with pytest.raises(ZeroDivisionError):
        env.step()
    zoo.state = state
    env.step()
    assert not env["agents", "done"].all()
    assert env["agents", "done"].any()
    zoo.state = broken
    env.step()
    assert env["state"].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_actions_beyond_a_box_are_clipped_and_large_ones_are_kept(dtype: Any) -> None:
    env = scripted(Script(action=spaces.Box(-1, 1, (2,), dtype)))
    env.step(agent=[[0, 0.5], [-7, 7], [np.inf, -np.inf]])
    actions = [action.tolist() for action in env.env.env.received[0].values()]
    assert actions == [[0, 0.5], [-1, 1], [1, -1]]
    env = scripted(Script(action=spaces.Box(-np.inf, np.inf, (2,), dtype)))
    env.step(agent=[60000, 1])  # Its square is infinite in float16.
    assert env.env.env.received[0]["agent_1"].tolist() == [60000, 1]


FIRST, FROM_FIVE = [1, 0, 0, 0, 0], spaces.MultiDiscrete([3, 4], start=[5, 5])


@pytest.mark.parametrize(
    ("space", "legal", "wrong", "words"),
    [
        (spaces.Discrete(5), 0, -1, "The action -1 of IN: .*from 0 to 4"),
        (spaces.Discrete(5), 0, 5, "The action 5 of IN: .*from 0 to 4"),
        *[
            (None, FIRST, wrong, "IN is not one-hot")
            for wrong in ([0] * 5, [0, 2, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, -1, 0])
        ],
        *[
            (spaces.MultiDiscrete([3, 4]), [0, 0], wrong, "IN: expected int")
            for wrong in ([0, 4], [3, 0], [-1, 0])
        ],
        (FROM_FIVE, [0, 0], [0, 4], "IN: expected int"),
        (spaces.MultiBinary(2), [0, 0], [2, 0], "IN: expected int"),
        (spaces.MultiBinary(2), [0, 0], [0, -1], "IN: expected int"),
        *[
            (spaces.Box(-9, np.inf, (2,), dtype), [0, 0], [0, np.nan], "IN: .*no NaN")
            for dtype in (np.float16, np.float32)
        ],
    ],
)
def test_an_impossible_action_is_an_error_only_of_an_agent_that_acts(
    space: Any, legal: Any, wrong: Any, words: str
) -> None:
    script = Script(
        action=space or spaces.Discrete(5), ends={"agent_2": (1, "terminated")}
    )
    options = {"categorical_actions": space is not None, "done_on_any": False}
    env = scripted(script, **options)
    env.step(agent=[legal] * 3)
    words = words.replace("IN", "agent agent_1 in agent/action")
    with pytest.raises(ValueError, match=words):
        env.step(agent=[legal, wrong, legal])
    assert len(env.env.env.received) == 1
    env.step(agent=[legal, legal, wrong])  # agent_2 is dead


def test_as_many_ones_as_agents_are_not_one_hot() -> None:
    rows = [[1, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="agent_0 in agent/action is not one-hot"):
        scripted(categorical_actions=False).step(agent=rows)


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
