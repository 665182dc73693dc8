"""Random frames are valid observations."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from marl_collect.core.description import EnvDescription, GroupDescription, allocate
from marl_collect.core.signature import IS_INIT
from marl_collect.policies.fused.random_frames import RandomFrames


def test_observations_are_in_their_spaces_and_masks_have_legal_actions() -> None:
    observation: Any = spaces.Dict(
        {
            "box": spaces.Box(
                np.array([-1.0, 2.0], np.float32),
                np.array([0.0, 9.0], np.float32),
                dtype=np.float32,
            ),
            "free": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "kind": spaces.Discrete(5, start=10),
            "choices": spaces.MultiDiscrete([2, 7], start=[3, -4]),
            "flags": spaces.MultiBinary(3),
        }
    )
    action: Any = spaces.Discrete(3)
    group = GroupDescription(("a", "b"), observation, action, action_mask=True)
    root: Any = {"state": spaces.Box(0, 1, (6,), np.float32)}
    description = EnvDescription("test", {"g": group}, root)
    memory = allocate(description.row(), (2,))
    frames = RandomFrames(description, memory)
    kinds = set()
    for _ in range(50):
        frames.draw()
        assert memory["g", "action_mask"].any(-1).all()
        assert description.root["state"].contains(memory["state",][0])
        for k in range(2):
            for agent in range(2):
                row = {
                    name: memory["g", "observation", name][k, agent]
                    for name in observation.spaces
                }
                row["flags"] = row["flags"].astype(np.int8)
                assert observation.contains(row)
                kinds.add(int(row["kind"]))
    assert kinds == set(range(10, 15))
    assert not memory["g", "action_mask"].all()


@pytest.mark.parametrize("size", [1, 30])
def test_frames_begin_an_episode_if_they_are_told_to(size: int) -> None:
    space: Any = spaces.Box(0, 1, (2,), np.float32)
    description = EnvDescription("test", {"g": GroupDescription(("a",), space, space)})
    memory = allocate(description.row(), (size,))
    memory[IS_INIT] = np.zeros((size, 1), np.bool_)
    frames = RandomFrames(description, memory)
    for begins in (True, False):
        frames.begins = begins
        for _ in range(10):
            frames.draw()
            assert memory[IS_INIT].any() == begins
    frames.begins = None
    flags = set()
    for _ in range(20):
        frames.draw()
        flags |= set(memory[IS_INIT].flat)
    assert flags == {True, False}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_are_moderate_although_bounds_are_not(dtype: Any) -> None:
    largest = float(np.finfo(np.float32).max)
    box: Any = spaces.Box(-largest, largest, (4,), dtype)
    group = GroupDescription(("a", "b"), box, spaces.Discrete(2))
    description = EnvDescription("wide", {"g": group})
    memory = allocate(description.row(), (3,))
    RandomFrames(description, memory).draw()
    numbers = memory["g", "observation"]
    assert (np.abs(numbers) < 100).all()
    assert len(np.unique(numbers)) > 10
