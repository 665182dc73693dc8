"""Derives all random numbers from seeds, by one function; saves torch's generators.

Every episode of every environment has its own seed, derived from the collector's
seed, the environment's index and the episode's number. So data do not depend on how
environments are distributed over workers, and any single episode can be repeated.

``derive(seed, purpose, *indices)`` starts with 0, and replaces it for each number n in
turn by output n of the SplitMix64 generator that is seeded with it. A step is a
bijection of the number. So what differs in the last number only never coincides:
neither two purposes of a seed, nor two environments, nor two episodes of one. Any
other two coincide with a chance of 2**-64. Weights are initialised with the seed
itself, as by ``torch.manual_seed(seed)``, except for those of the later factories in a
list.

Source:
    Sebastiano Vigna, https://prng.di.unimi.it/splitmix64.c (public domain), after Guy
    Steele, Doug Lea, Christine Flood, "Fast splittable pseudorandom number
    generators", 2014.
"""

import random
from collections.abc import Mapping
from enum import IntEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

LARGEST_SEED: Final = 2**63 - 1
"""Seeds are kept in arrays of int64."""

_EPISODE_BITS = 31
"""PettingZoo and Box2D environments take seeds below 2**31."""

_MASK: Final = 2**64 - 1
_INCREMENT: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a number is derived for. The comments name the indices that follow."""

    EPISODE = 0  # environment, number of the episode
    NOISE = 1  # environment, stream, restarts of its worker
    WORKER = 2  # first environment of the worker, its restarts, generator
    POOL_VERSION = 3  # none; the seed is an episode's
    POOL_PLACE = 4  # number of the version
    SEATS = 5  # none; the seed is an episode's
    LOADER = 6  # epoch
    MINIBATCHES = 7  # none
    CHECKED_ACTIONS = 8  # none
    FACTORY = 9  # index of the policy factory in a list, from 1


@overload
def derive(seed: int, purpose: Purpose, *indices: int) -> int: ...
@overload
def derive(
    seed: int, purpose: Purpose, *indices: NDArray[np.integer]
) -> NDArray[np.uint64]: ...
def derive(seed: int, purpose: Purpose, *indices: Any) -> Any:
    """Return a number in ``[0, 2**64)`` that depends on all arguments.

    Args:
        seed: the root.
        purpose: what the number is for.
        indices: numbers, or arrays of them that broadcast, below 2**32 and not
            negative; each purpose has its own.

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it is negative or larger than ``LARGEST_SEED``.
    """
    state: Any = _output(_output(0, checked_seed(seed)), purpose)
    for index in indices:
        array = isinstance(index, np.ndarray)
        state = _output(state, index.astype(np.uint64) if array else index)
    return state


def _output(state: Any, number: Any) -> Any:
    """Return output ``number`` of SplitMix64 seeded with ``state``; 0 is its first."""
    state = (state + _INCREMENT * (number + 1)) & _MASK
    state = ((state ^ (state >> 30)) * _FACTORS[0]) & _MASK
    state = ((state ^ (state >> 27)) * _FACTORS[1]) & _MASK
    return state ^ (state >> 31)


def generator_for(seed: int, purpose: Purpose, *indices: int) -> np.random.Generator:
    """Return a generator that is seeded with what ``derive`` returns."""
    return np.random.Generator(np.random.SFC64(derive(seed, purpose, *indices)))


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """Return the seed, in ``[0, 2**31)``, that an episode is reset with."""
    return derive(seed, Purpose.EPISODE, environment, episode) >> (64 - _EPISODE_BITS)


def episode_seeds(
    seed: int, environments: NDArray[np.int64], episodes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return ``episode_seed`` of many episodes, computed together.

    Args:
        seed: the collector's seed.
        environments: indices.
        episodes: numbers, of the same shape or one that broadcasts.
    """
    numbers = derive(seed, Purpose.EPISODE, environments, episodes)
    return (numbers >> (64 - _EPISODE_BITS)).astype(np.int64)


def episode_seeds_on(
    seed: int, environments: "torch.Tensor", episodes: "torch.Tensor"
) -> "torch.Tensor":
    """Return ``episode_seeds`` of tensors, int64, computed on their device.

    Args:
        seed: the collector's seed.
        environments: indices, int64.
        episodes: numbers, int64, of the same shape or one that broadcasts.
    """
    state: Any = _signed(derive(seed, Purpose.EPISODE))
    for number in (environments, episodes):
        # Products and sums of int64 wrap around, like those of uint64.
        state = (number + 1) * _signed(_INCREMENT) + state
        state = (state ^ _shifted(state, 30)) * _signed(_FACTORS[0])
        state = (state ^ _shifted(state, 27)) * _signed(_FACTORS[1])
        state = state ^ _shifted(state, 31)
    return _shifted(state, 64 - _EPISODE_BITS)


def _signed(number: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return number - 2**64 if number >> 63 else number


def _shifted(state: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Shift int64 to the right like uint64."""
    return (state >> bits) & (_MASK >> bits)


def weights_seed(seed: int, factory: int) -> int:
    """Return the seed of the weights of what a policy factory builds.

    Args:
        seed: the collector's seed, which is that of factory 0.
        factory: its index in a list of factories.
    """
    return derive(seed, Purpose.FACTORY, factory) if factory else seed


def checked_seed(seed: Any) -> int:
    """Return ``seed`` as a Python integer.

    Raises:
        TypeError: if it is not an integer.
        ValueError: if it is negative or larger than ``LARGEST_SEED``.
    """
    if not isinstance(seed, Integral) or isinstance(seed, bool):
        raise TypeError(f"A seed must be an integer, but is {seed!r}.")
    if not 0 <= int(seed) <= LARGEST_SEED:
        raise ValueError(f"A seed must be at least 0 and below 2**63, but is {seed}.")
    return int(seed)


def draw_seed(seed: Any) -> int:
    """Return ``seed``, or a seed drawn from torch's generator if it is None.

    Raises:
        TypeError: as ``checked_seed``.
        ValueError: as ``checked_seed``.
    """
    import torch

    if seed is None:
        return int(torch.randint(2**_EPISODE_BITS, (), device="cpu"))
    return checked_seed(seed)


def next_seed(seed: int) -> int:
    """Return the seed that follows ``seed``, in ``[0, 2**32 - 1)``.

    Source:
        The chain that TorchRL's ``set_seed`` returns, so that scripts which use the
        returned seed get the same numbers.
    """
    data = np.random.default_rng(seed).bytes(8)
    return int.from_bytes(data, byteorder="big") % (2**32 - 1)


def seed_global_generators(seed: int, first: int, generation: int) -> None:
    """Seed torch's, numpy's and Python's global generators for one worker.

    So random numbers of users' modules and environments are reproducible per worker.
    The seeds differ, because equal ones would give numpy and Python equal numbers.

    Args:
        seed: the collector's.
        first: index of the worker's first environment.
        generation: how often the worker was restarted.
    """
    import torch

    torch.manual_seed(derive(seed, Purpose.WORKER, first, generation))
    number = derive(seed, Purpose.WORKER, first, generation, 1)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])  # noqa: NPY002 - the global one
    random.seed(derive(seed, Purpose.WORKER, first, generation, 2))


def global_generators() -> dict[str, Any]:
    """Return the states of torch's, numpy's and Python's global generators."""
    import torch

    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    state = numpy | {"state": numpy["state"] | {"key": key}}
    return torch_generators() | {"numpy": state, "python": random.getstate()}


def set_global_generators(states: Mapping[str, Any]) -> None:
    """Restore what ``global_generators`` returned.

    Args:
        states: those of numpy, Python and GPUs may be missing.
    """
    set_torch_generators(states)
    if "numpy" in states:
        numpy = states["numpy"]
        key = np.asarray(numpy["state"]["key"]).astype(np.uint32)
        state = numpy | {"state": numpy["state"] | {"key": key}}
        np.random.set_state(state)  # noqa: NPY002
    if "python" in states:
        random.setstate(states["python"])


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
        states: those of GPUs may be missing, or be more than there are GPUs.
    """
    import torch

    torch.set_rng_state(states["torch"])
    gpus = states.get("cuda", [])[: torch.cuda.device_count()]
    for index, state in enumerate(gpus):
        torch.cuda.set_rng_state(state, index)
