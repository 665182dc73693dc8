"""PettingZoo: conversion of actions."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("pettingzoo")

from support.zoo import Script
from zoo_tools import scripted


@pytest.mark.parametrize(
    ("space", "passed", "received"),
    [
        (spaces.Discrete(5, dtype=np.int16, start=7), [0, 1, 4], [7, 8, 11]),
        (
            spaces.MultiDiscrete([3, 4], dtype=np.int8, start=[5, -2]),
            [[0, 0], [2, 3], [1, 1]],
            [[5, -2], [7, 1], [6, -1]],
        ),
        (spaces.MultiBinary(2), [[0, 1], [1, 1], [0, 0]], [[0, 1], [1, 1], [0, 0]]),
        (
            spaces.Box(-1, 1, (2,), np.float16),
            [[0, 0.5], [-3, 3], [1, -0.25]],
            [[0, 0.5], [-1, 1], [1, -0.25]],
        ),
        (
            spaces.Box(-1, 1, (2,), np.float32),
            [[0, 0.5], [-7, 7], [np.inf, -np.inf]],
            [[0, 0.5], [-1, 1], [1, -1]],
        ),
    ],
)
def test_actions_are_converted_to_their_space(
    space: Any, passed: Any, received: Any
) -> None:
    env = scripted(Script(action=space))
    env.step(agent=passed)
    actions = env.env.env.received[0]
    assert [np.asarray(a).tolist() for a in actions.values()] == received
    env.step(agent=[passed[0]] * 3)
    # The environment's earlier arrays do not change.
    assert [np.asarray(a).tolist() for a in actions.values()] == received
    if not isinstance(space, spaces.Box):
        assert env["agent", "action"].dtype == np.int64
        assert all(space.contains(action) for action in actions.values())


@pytest.mark.parametrize(
    "wrong", [[0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 1, -1, 0]]
)
def test_a_row_that_is_not_one_hot_is_an_error(wrong: list[int]) -> None:
    env = scripted(categorical_actions=False)
    action = np.eye(5, dtype=np.int64)[[4, 0, 2]]
    action[1] = wrong
    with pytest.raises(ValueError, match=r"of agent agent_1 in agent/action is not on"):
        env.step(agent=action)
    # There are three ones, as many as agents, but not one per row.
    rows = [[1, 0, 0, 0, 1], [0] * 5, [0, 1, 0, 0, 0]]
    with pytest.raises(ValueError, match="agent_0 in agent/action is not one-hot"):
        env.step(agent=rows)


def test_rows_of_dead_agents_need_not_be_one_hot() -> None:
    script = Script(ends={"agent_1": (1, "terminated")})
    env = scripted(script, categorical_actions=False, done_on_any=False)
    action = np.eye(5, dtype=np.int64)[[4, 0, 2]]
    env.step(agent=action)
    action[1] = 0
    env.step(agent=action)
    assert env.env.env.received[1] == {"agent_0": 4, "agent_2": 2}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_is_an_error_that_names_group_and_agent(dtype: Any) -> None:
    # The square of 60000 is infinite in float16.
    env = scripted(Script(action=spaces.Box(-np.inf, np.inf, (2,), dtype)))
    env.step(agent=[60000, 1])
    assert env.env.env.received[-1]["agent_1"].tolist() == [60000, 1]
    with pytest.raises(ValueError, match="agent_1 in agent/action: expected .* no NaN"):
        env.step(agent=[[0, 0], [0, np.nan], [0, 0]])


@pytest.mark.parametrize("action", [-1, 5])
def test_an_action_out_of_range_is_an_error(action: int) -> None:
    env = scripted()
    with pytest.raises(ValueError, match=f"{action} of agent agent_2.*from 0 to 4"):
        env.step(agent=[0, 0, action])


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        (spaces.MultiDiscrete([3, 4]), [0, 4]),
        (spaces.MultiDiscrete([3, 4]), [3, 0]),
        (spaces.MultiDiscrete([3, 4]), [-1, 0]),
        (spaces.MultiDiscrete([3, 4], start=[5, 5]), [0, 4]),
        (spaces.MultiBinary(2), [2, 0]),
        (spaces.MultiBinary(2), [0, -1]),
    ],
)
def test_numbers_out_of_range_are_an_error(space: Any, wrong: list[int]) -> None:
    script = Script(action=space, ends={"agent_2": (1, "terminated")})
    env = scripted(script, done_on_any=False)
    env.step()
    with pytest.raises(ValueError, match="agent agent_1 in agent/action: expected int"):
        env.step(agent=[[0, 0], wrong, [0, 0]])
    assert len(env.env.env.received) == 1
    env.step(agent=[[0, 0], [0, 0], wrong])  # agent_2 is dead
