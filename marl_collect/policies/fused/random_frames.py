"""Random observations and noise, to compare two ways of computing a policy."""

from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Key, Row, leaf_spaces
from marl_collect.core.random_actions import Sampler
from marl_collect.core.signature import IS_INIT
from marl_collect.policies.noise import NoiseStream, noise

Array = NDArray[Any]

_LARGEST = 1e6


@final
class RandomFrames:
    """Fills the memory of environments with random valid observations.

    Attributes:
        begins: whether any environment begins an episode; None for either.
    """

    begins: bool | None = None

    def __init__(self, description: EnvDescription, memory: Row) -> None:
        """Write to ``memory``, ``[K, ...]`` per key."""
        self._memory = memory
        self._rng = np.random.default_rng(0)
        self._samplers: dict[Key, Sampler] = {}
        self._starts: dict[Key, Any] = {}
        for name, group in description.groups.items():
            self._add(group.observation, (name, "observation"), group.n_agents)
        for name, space in description.root.items():
            self._add(space, (name,), 1)

    def draw(self) -> None:
        """Sample a frame: observations from their spaces, masks with a legal action."""
        for key, array in self._memory.items():
            sampler = self._samplers.get(key)
            if sampler is None:
                array[...] = self._by_dtype(key, array)
            else:
                noise = self._rng.random(array.shape)
                values = sampler.actions(noise) + self._starts.get(key, 0)
                array[...] = self._moderate(sampler.space, values)

    def _moderate(self, space: spaces.Space[Any], values: Array) -> Array:
        """Replace numbers so large that a network's output would not be finite."""
        if not isinstance(space, spaces.Box) or values.dtype.kind != "f":
            return values
        usual = self._rng.standard_normal(values.shape).clip(space.low, space.high)
        # The limit is beyond the numbers of float16.
        is_moderate = np.abs(values.astype(np.float64)) < _LARGEST
        return np.where(is_moderate, values, usual)

    def fill_noise(self, stream: NoiseStream) -> None:
        """Sample a frame of a head's noise."""
        kind, array = stream.head.noise_kind, stream.array
        array[...] = noise(kind, self._rng, array.shape, array.dtype.type)

    def _add(self, space: spaces.Space[Any], key: Key, n_agents: int) -> None:
        for leaf_key, leaf in leaf_spaces(space, key):
            if isinstance(leaf, (spaces.Discrete, spaces.MultiDiscrete)):
                self._starts[leaf_key] = leaf.start
            if not isinstance(leaf, spaces.MultiDiscrete) or leaf.nvec.ndim == 1:
                self._samplers[leaf_key] = Sampler(
                    leaf_key, leaf, n_agents, one_hot=False, mask_key=None
                )

    def _by_dtype(self, key: Key, array: Array) -> Array:
        shape = array.shape
        if array.dtype == np.bool_:
            flags = self._rng.random(shape) < 0.5
            if key == IS_INIT and self.begins is not None:
                flags &= self.begins
                flags.flat[self._rng.integers(flags.size)] = self.begins
            if key[-1] == "action_mask":
                # At least one action is legal.
                legal = self._rng.integers(shape[-1], size=shape[:-1])
                np.put_along_axis(flags, legal[..., None], True, axis=-1)
            return flags
        if array.dtype.kind == "f":
            return self._rng.standard_normal(shape)
        return np.zeros(shape)
