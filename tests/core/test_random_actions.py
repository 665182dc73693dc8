"""Random actions have the values and the frequencies of the space's own samples."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.random_actions import RandomPolicy, Sampler

DRAWS = 4000
SMALL = [(-1, 1, np.int8), (0, 1, np.uint8), (0, 3, np.int64), (0, 1, np.bool_)]
LARGE = [np.int64, np.uint64, np.int8, np.uint8]


def drawn(space: spaces.Box) -> Any:
    noise = np.random.default_rng(0).random((DRAWS, 1, *space.shape))
    actions = Sampler(("g", "action"), space, 1, False, None).actions(noise)
    assert actions.dtype == space.dtype
    assert all(action in space for action in actions[:, 0])
    return actions


@pytest.mark.parametrize(("low", "high", "dtype"), SMALL)
def test_integers_of_a_box_are_equally_likely(low: int, high: int, dtype: Any) -> None:
    numbers = drawn(spaces.Box(low, high, (2,), dtype))
    values, counts = np.unique(numbers, return_counts=True)
    assert values.tolist() == list(range(low, high + 1))
    share = 2 * DRAWS / len(values)
    assert abs(counts - share).max() < 5 * np.sqrt(share)


@pytest.mark.parametrize("dtype", LARGE)
def test_the_largest_integers_of_a_dtype_do_not_overflow(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    whole = drawn(spaces.Box(limits.min, limits.max, (3,), dtype))
    middle = limits.max // 2 + limits.min // 2
    assert 0.4 < (whole > middle).mean() < 0.6
    space = spaces.Box(limits.max - 1, limits.max, (1,), dtype)
    noise = np.full((1, 1, 1), 1 - 2**-53)
    assert Sampler(("g", "action"), space, 1, False, None).actions(noise)[0, 0] > middle


@pytest.mark.filterwarnings("error")
def test_random_actions_in_the_widest_box_are_finite() -> None:
    largest = float(np.finfo(np.float64).max)
    actions = drawn(spaces.Box(-largest, largest, (2,), np.float64))
    assert np.isfinite(actions).all()
    assert (actions < 0).any()
    assert (actions > 0).any()


def test_without_an_upper_bound_integers_begin_at_the_lower_one() -> None:
    space = spaces.Box(2, np.inf, (1,), np.int64)
    values = drawn(space)
    assert values.min() == 2
    assert 0.5 < (values == 2).mean() < 0.75  # 1 - 1/e


@pytest.mark.parametrize("one_hot", [False, True])
def test_each_legal_action_is_drawn_equally_often(one_hot: bool) -> None:
    legal = np.array([[n >> bit & 1 for bit in range(4)] for n in range(1, 16)], bool)
    noise = np.random.default_rng(0).random((DRAWS, len(legal)))
    space = spaces.Discrete(4)
    sampler = Sampler(("g", "action"), space, len(legal), one_hot, ("g", "action_mask"))
    actions = sampler.actions(noise, legal)
    if not one_hot:
        actions = np.eye(4)[actions]
    shares = actions.mean(0)
    assert not shares[~legal].any()
    expected = legal / legal.sum(1, keepdims=True)
    np.testing.assert_allclose(shares, expected, atol=5 * 0.5 / DRAWS**0.5)


def test_each_group_has_its_own_mask() -> None:
    group = GroupDescription(
        ("x", "y"), spaces.Box(0, 1), spaces.Discrete(3), action_mask=True
    )
    policy = RandomPolicy(EnvDescription("two", {"a": group, "b": group}))
    legal = {"a": torch.tensor([0, 2]), "b": torch.tensor([1, 0])}
    masks = {
        name: {"action_mask": torch.nn.functional.one_hot(only, 3).bool()}
        for name, only in legal.items()
    }
    acted = policy(TensorDict(masks))
    assert all(torch.equal(acted[name, "action"], only) for name, only in legal.items())
