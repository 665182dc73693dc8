"""Seeds that are computed together equal those of numpy's SeedSequence."""

import numpy as np
import pytest

from marl_collect.core.seeding import episode_seed, episode_seeds


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1, 2**32, 2**63 + 5, 2**100 + 1])
def test_seeds_of_many_episodes_are_those_of_each(seed: int) -> None:
    random = np.random.default_rng(0)
    environments = np.array([0, 1, 4095, 2**32 - 1, *random.integers(0, 2**32, 20)])
    episodes = np.array([0, 3, 0, 2**32 - 1, *random.integers(0, 2**32, 20)])
    seeds = episode_seeds(seed, environments, episodes)
    pairs = zip(environments.tolist(), episodes.tolist(), strict=True)
    assert seeds.tolist() == [episode_seed(seed, k, number) for k, number in pairs]
    assert seeds.dtype == np.int64


def test_environments_and_episodes_broadcast() -> None:
    actual = episode_seeds(3, np.arange(2)[:, None], np.arange(4, 9)[None])
    expected = [[episode_seed(3, k, e) for e in range(4, 9)] for k in range(2)]
    assert actual.tolist() == expected


def test_negative_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="non-negative integer, but is -1"):
        episode_seeds(-1, np.zeros(1, np.int64), np.zeros(1, np.int64))
