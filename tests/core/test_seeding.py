"""Seeds and generators are those of the documented derivation, number by number.

The expected numbers are written out, and computed here by SplitMix64 as its author
gives it, without the package.
"""

from typing import Any

import numpy as np
import pytest
import torch

from marl_collect.core.seeding import (
    Purpose,
    checked_seed,
    derive,
    draw_seed,
    episode_seed,
    episode_seeds,
    episode_seeds_on,
    generator_for,
    next_seed,
    seed_global_generators,
)
from marl_collect.policies.runner import Generators

ROOTS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1]


NEXT_SEEDS = [795726461, 4087425277, 881585298]
"""What TorchRL's ``set_seed`` returns for 0, 1 and 7."""


def splitmix64(state: int, number: int) -> int:
    """Return output ``number`` of Vigna's splitmix64.c; the first is number 0."""
    state = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def derived(*numbers: int) -> int:
    state = 0
    for number in numbers:
        state = splitmix64(state, number)
    return state


def first_draws(random: np.random.Generator) -> list[int]:
    return random.integers(0, 2**32, 3).tolist()


def expected_draws(*numbers: int) -> list[int]:
    return first_draws(np.random.Generator(np.random.SFC64(derived(*numbers))))


def test_the_outputs_of_splitmix64_are_the_published_ones() -> None:
    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    assert [splitmix64(1234567, i) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(
    ("seed", "purpose", "indices", "expected"),
    [
        (7, Purpose.EPISODE, (3, 1000), 13041480395040837022),
        (7, Purpose.NOISE, (2, 1001, 3), 18183962507684438405),
        (0, Purpose.WORKER, (0, 0), 9523871107687072808),
        (5, Purpose.POOL_VERSION, (), 7755499775663759721),
        (5, Purpose.POOL_PLACE, (8,), 8625520146000515483),
        (5, Purpose.SEATS, (), 14949488594255536292),
        (5, Purpose.LOADER, (2,), 15539843378701342658),
        (5, Purpose.MINIBATCHES, (), 18052161788806903081),
        (5, Purpose.CHECKED_ACTIONS, (), 12400744821908193623),
        (7, Purpose.FACTORY, (1,), 8003195879595699209),
    ],
)
def test_derived_numbers(
    seed: int, purpose: Purpose, indices: tuple[int, ...], expected: int
) -> None:
    assert derive(seed, purpose, *indices) == expected
    assert derived(seed, list(Purpose).index(purpose), *indices) == expected


@pytest.mark.parametrize("seed", ROOTS)
def test_seeds_of_episodes(seed: int) -> None:
    random = np.random.default_rng(0)
    environments = np.array([0, 1, 4095, 2**31 - 1, *random.integers(0, 2**31, 20)])
    episodes = np.array([0, 3, 0, 2**32 - 1, *random.integers(0, 2**32, 20)])
    pairs = list(zip(environments.tolist(), episodes.tolist(), strict=True))
    expected = [derived(seed, 0, k, number) // 2**33 for k, number in pairs]
    assert [episode_seed(seed, k, number) for k, number in pairs] == expected
    seeds = episode_seeds(seed, environments, episodes)
    assert seeds.tolist() == expected
    assert seeds.dtype == np.int64


@pytest.mark.parametrize("seed", ROOTS)
def test_tensors_have_the_same_seeds(seed: int) -> None:
    random = np.random.default_rng(0)
    index = np.array([0, 1, 2**31 - 1, *random.integers(0, 2**31, 20)])[:, None]
    numbers = np.array([0, 3, 2**32 - 1, *random.integers(0, 2**32, 20)])
    actual = episode_seeds_on(seed, torch.from_numpy(index), torch.from_numpy(numbers))
    assert actual.dtype == torch.int64
    assert actual.tolist() == episode_seeds(seed, index, numbers).tolist()


def test_noise_of_other_policies_and_of_given_seeds() -> None:
    generators = Generators(7, range(2, 4), 1).apart(2)
    actual = first_draws(generators.of(1000)[1])
    assert actual == expected_draws(7, 1, 3, 2_001_000, 1)
    generators.restart(1, 99)
    actual = first_draws(generators.of(1000)[1])
    assert actual == expected_draws(99, 1, 0, 2_001_000, 1)


def test_torch_of_workers_is_seeded_with_these_numbers() -> None:
    seeds = []
    for first, restarts in ((0, 0), (0, 1), (2, 0)):
        seed_global_generators(0, first, restarts)
        seeds.append(torch.initial_seed())
    assert seeds == [9523871107687072808, 16943748999857591265, 7675744577136099914]


def test_the_next_seed_is_torchrls() -> None:
    assert [next_seed(seed) for seed in (0, 1, 7)] == NEXT_SEEDS


def test_nothing_coincides() -> None:
    """Not even the parts that torch's generator reads, of small numbers."""
    paths: list[tuple[Any, ...]] = []
    for seed in range(4):
        paths += [(seed, p) for p in Purpose]
        paths += [(seed, p, i) for p in Purpose for i in range(8)]
        paths += [(seed, p, i, j) for p in Purpose for i in range(8) for j in range(8)]
        paths += [
            (seed, Purpose.NOISE, k, stream, restarts)
            for k in range(8)
            for stream in (0, 1, 1000, 1001, 1_000_000)
            for restarts in range(4)
        ]
    numbers = [derive(*path) for path in paths]
    assert len({number % 2**32 for number in numbers}) == len(set(paths)) == len(paths)


def test_bits_of_seeds_of_successive_episodes_are_balanced() -> None:
    seeds = episode_seeds(0, np.arange(64)[:, None], np.arange(1024)[None]).ravel()
    bits = (seeds[:, None] >> np.arange(31)) & 1
    assert abs(bits.mean(0) - 0.5).max() < 0.01  # 5 standard deviations
    together = np.corrcoef(bits.T) - np.eye(31)
    assert abs(together).max() < 0.02


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    message = rf"at least 0 and below 2\*\*63, but is {seed}"
    for call in (checked_seed, draw_seed, lambda s: episode_seed(s, 0, 0)):
        with pytest.raises(ValueError, match=message):
            call(seed)


@pytest.mark.parametrize("seed", [True, 1.0, "1"])
def test_seeds_that_are_no_integers_are_refused(seed: Any) -> None:
    for call in (checked_seed, draw_seed):
        with pytest.raises(TypeError, match="must be an integer, but is"):
            call(seed)


def test_integers_of_numpy_are_seeds() -> None:
    assert derive(np.int64(7), Purpose.LOADER, 0) == derived(7, 6, 0)  # type: ignore[call-overload]
    actual = first_draws(generator_for(7, Purpose.LOADER, 3))
    assert actual == expected_draws(7, 6, 3)
