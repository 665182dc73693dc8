"""Derives the seeds of episodes and the generators of noise from one seed.

Every episode of every environment has its own seed, derived from the collector's
seed, the environment's index and the episode's number. So data do not depend on how
environments are distributed over workers, and any single episode can be repeated.
"""

import numpy as np

_EPISODES = 0
_NOISE = 1
_LIMIT = 2**31 - 1
"""PettingZoo and Box2D environments take seeds below 2**31."""


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """Return the seed, in ``[0, 2**31 - 1)``, that an episode is reset with."""
    sequence = np.random.SeedSequence((seed, _EPISODES, environment, episode))
    return int(sequence.generate_state(1)[0]) % _LIMIT


def noise_generator(
    seed: int, environment: int, stream: int, generation: int = 0
) -> np.random.Generator:
    """Return the generator of one environment's action noise.

    Args:
        seed: the collector's seed.
        environment: index of the environment.
        stream: index of the purpose, such as the group, so that streams are
            independent.
        generation: how often the environment was rebuilt after a failure.
    """
    sequence = np.random.SeedSequence((seed, _NOISE, environment, stream, generation))
    return np.random.Generator(np.random.SFC64(sequence))


def next_seed(seed: int) -> int:
    """Return the seed that follows ``seed``, in ``[0, 2**32 - 1)``.

    Source:
        The chain that TorchRL's ``set_seed`` returns, so that scripts which use the
        returned seed get the same numbers.
    """
    data = np.random.default_rng(seed).bytes(8)
    return int.from_bytes(data, byteorder="big") % (2**32 - 1)
