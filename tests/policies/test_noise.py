"""Heads sample from the environments' generators, but only while a runner acts."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import InteractionType, set_interaction_type

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models.policy import make_policy
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


def test_marks_keep_the_states_of_generators() -> None:
    def drawn(generators: Generators) -> list[Any]:
        """Draw numbers of 64 and 32 bits; half of the latter is left for the next."""
        both = [*generators.of(0), *generators.of(1007)]
        return [(g.random(), g.integers(2**32, dtype=np.uint32)) for g in both]

    generators = Generators(3, range(2, 6))
    states: list[Any] = []
    for frame in range(5):
        drawn(generators)
        if frame == 3:
            generators.restart(1, 99)
        mark = generators.mark()
        expected = [g.bit_generator.state for g in generators.of(1007)]
        for words, state in zip(states_of(mark)[1007].tolist(), expected, strict=True):
            assert [n % 2**64 for n in words[:4]] == state["state"]["state"].tolist()
            assert words[4:] == [state["has_uint32"], state["uinteger"]]
        states.append((mark, drawn(generators)))
    assert any(state["has_uint32"] for state in expected)
    for mark, numbers in states:
        loaded = Generators(0, range(4))
        loaded.mark()
        loaded.load(states_of(mark))
        assert loaded.mark() == mark
        assert drawn(loaded) == numbers


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
