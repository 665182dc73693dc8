"""Seeds and noise as docs/architecture.md defines them, without the package."""

import numpy as np

EPISODE, NOISE, POOL_VERSION = 0, 1, 3
"""Purposes of derived numbers."""


def derived(*numbers: int) -> int:
    """Return what is derived from a seed, a purpose and indices."""
    state = 0
    for number in numbers:
        # Output `number` of the SplitMix64 generator that is seeded with `state`.
        state = (state + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """Return the seed of an episode: the upper 31 bits of what is derived for it."""
    return derived(seed, EPISODE, environment, episode) >> 33


def generator(*numbers: int) -> np.random.Generator:
    """Return the generator that is seeded with what is derived."""
    return np.random.Generator(np.random.SFC64(derived(*numbers)))
