"""Derives seeds of episodes and generators of noise from one seed; saves torch's.

Every episode of every environment has its own seed, derived from the collector's
seed, the environment's index and the episode's number. So data do not depend on how
environments are distributed over workers, and any single episode can be repeated.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EPISODES = 0
_NOISE = 1
_LIMIT = 2**31 - 1
"""PettingZoo and Box2D environments take seeds below 2**31."""


def draw_seed(seed: int | None) -> int:
    """Return ``seed``, or a seed drawn from torch's generator if it is None."""
    import torch

    return int(torch.randint(_LIMIT, ())) if seed is None else seed


def torch_generators() -> dict[str, Any]:
    """Return the states of torch's global generators, of the CPU and of all GPUs.

    Those of GPUs are left out if this process has not used one.
    """
    import torch

    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": gpus}


def set_torch_generators(states: Mapping[str, Any]) -> None:
    """Restore what ``torch_generators`` returned, on the GPUs that there are.

    Args:
        states: states of GPUs may be missing, as in files of earlier versions.
    """
    import torch

    torch.set_rng_state(states["torch"])
    gpus = states.get("cuda", [])[: torch.cuda.device_count()]
    for index, state in enumerate(gpus):
        torch.cuda.set_rng_state(state, index)


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """Return the seed, in ``[0, 2**31 - 1)``, that an episode is reset with."""
    sequence = np.random.SeedSequence((seed, _EPISODES, environment, episode))
    return int(sequence.generate_state(1)[0]) % _LIMIT


def episode_seeds(
    seed: int, environments: NDArray[np.int64], episodes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return ``episode_seed`` of many episodes, computed together.

    Args:
        seed: the collector's seed.
        environments: indices, below 2**32.
        episodes: numbers, of the same shape or one that broadcasts.
    """
    words = [*_words(seed), np.uint32(_EPISODES)]
    entropy = [*words, environments.astype(np.uint32), episodes.astype(np.uint32)]
    with np.errstate(over="ignore"):
        mixed = _mixed(entropy)
        state = (mixed ^ _INIT_B) * (_INIT_B * _MULT_B)
        state = state ^ (state >> _SHIFT)
    return state.astype(np.int64) % _LIMIT


_INIT_A, _MULT_A = np.uint32(0x43B0D7E5), np.uint32(0x931E8875)
_INIT_B, _MULT_B = np.uint32(0x8B51F9DD), np.uint32(0x58F38DED)
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)
_POOL = 4
"""Constants of numpy's SeedSequence, which promises never to change them."""


def _mixed(entropy: Sequence[Any]) -> Any:
    """Return the first word of SeedSequence's pool, for words or arrays of words."""
    constant = _INIT_A

    def hashed(value: Any) -> Any:
        nonlocal constant
        value = value ^ constant
        constant = constant * _MULT_A
        value = value * constant
        return value ^ (value >> _SHIFT)

    def mix(one: Any, two: Any) -> Any:
        result = _MIX_LEFT * one - _MIX_RIGHT * two
        return result ^ (result >> _SHIFT)

    padded = [*entropy, *[np.uint32(0)] * (_POOL - len(entropy))]
    pool = [hashed(word) for word in padded[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mix(pool[target], hashed(pool[source]))
    for word in padded[_POOL:]:
        for target in range(_POOL):
            pool[target] = mix(pool[target], hashed(word))
    return pool[0]


def _words(number: int) -> list[np.uint32]:
    """Return a non-negative integer as 32-bit words, the lowest first.

    Raises:
        ValueError: if it is negative.
    """
    if number < 0:
        raise ValueError(f"A seed must be a non-negative integer, but is {number}.")
    words = [np.uint32(number & 0xFFFFFFFF)]
    while number := number >> 32:
        words.append(np.uint32(number & 0xFFFFFFFF))
    return words


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
