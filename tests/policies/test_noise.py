"""Noise of heads, and random frames, which are valid observations."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import InteractionType, set_interaction_type

from marl_collect.core.description import EnvDescription, GroupDescription, allocate
from marl_collect.core.signature import IS_INIT
from marl_collect.models.policy import make_policy
from marl_collect.policies.fused.random_frames import RandomFrames
from marl_collect.policies.noise import HeadNoise, noise
from marl_collect.policies.runner import Generators, states_of


def environment() -> EnvDescription:
    box: Any = spaces.Box(-1, 1, (2,), np.float32)
    return EnvDescription(
        "test",
        {
            "a": GroupDescription(("x", "y"), box, spaces.Discrete(3)),
            "b": GroupDescription(("z",), box, box),
        },
    )


@pytest.mark.parametrize("kind", ["normal", "gumbel"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_has_the_named_distribution(kind: Any, dtype: Any) -> None:
    sample = noise(kind, np.random.default_rng(0), (20_000,), dtype)
    assert sample.dtype == dtype
    points = np.linspace(-2, 3, 11)
    if kind == "normal":
        expected = torch.special.ndtr(torch.from_numpy(points)).numpy()
    else:
        expected = np.exp(-np.exp(-points))
    actual = (sample[:, None] <= points).mean(0)
    # Four standard deviations of a share of 20,000 draws.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * 0.5 / 20_000**0.5)


def test_deterministic_actions_sample_no_noise() -> None:
    description = environment()
    head_noise = HeadNoise(make_policy(description), description, 1)
    generators = Generators(0, range(1))
    with set_interaction_type(InteractionType.RANDOM):
        head_noise.begin(3, generators)
    before = generators.mark()
    with set_interaction_type(InteractionType.MODE):
        head_noise.begin(5, generators)
    assert generators.mark() == before
    head_noise.load(4)


def test_a_mark_has_the_state_of_a_generator_that_was_restarted() -> None:
    generators = Generators(3, range(2, 6))
    for _ in range(2):
        drawing = generators.of(1007)[1]
        words = states_of(generators.mark())[1007][1].tolist()
        state: Any = drawing.bit_generator.state
        assert [n % 2**64 for n in words[:4]] == state["state"]["state"].tolist()
        generators.restart(1, 99)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_precision_of_the_policy(dtype: torch.dtype) -> None:
    description = environment()
    head_noise = HeadNoise(make_policy(description).to(dtype), description, 1)
    assert [stream.tensor.dtype for stream in head_noise.streams] == [dtype] * 2
    with set_interaction_type(InteractionType.RANDOM):
        head_noise.begin(50, Generators(0, range(1)))
    for stream in head_noise.streams:
        slot: Any = stream.slot
        assert (slot == slot.astype(np.float32)).all() == (dtype == torch.float32)


LARGEST = float(np.finfo(np.float32).max)


def test_observations_are_in_their_spaces_and_masks_have_legal_actions() -> None:
    wide: dict[str, Any] = {
        dtype.__name__: spaces.Box(-LARGEST, LARGEST, (4,), dtype)
        for dtype in (np.float32, np.float64)
    }
    observation: Any = spaces.Dict(
        {
            **wide,
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
        # Numbers are moderate although their bounds are not.
        numbers = np.stack([memory["g", "observation", name] for name in wide])
        assert (np.abs(numbers) < 100).all()
        assert len(np.unique(numbers)) > 10
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
