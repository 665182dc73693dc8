"""The frames of a dataset as one long list."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.core.description import Key
from marl_collect.storage.frames import Frames, draw, item_numbers
from marl_collect.storage.loading import Loadable
from marl_collect.storage.statistics import Moments, moments_of


@final
class Transitions(Loadable):
    """Frames, each with its ``next``, in the order in which they were collected.

    It is a map-style dataset for torch's ``DataLoader``, which reads whole batches at
    once.
    """

    def __init__(
        self, frames: Frames, numbers: NDArray[np.int64] | None = None
    ) -> None:
        self._frames, self._numbers = frames, numbers

    def __len__(self) -> int:
        return len(self._frames if self._numbers is None else self._numbers)

    def __getitem__(self, index: int | slice | Sequence[int] | Any) -> TensorDict:
        """Read frames into new memory.

        Args:
            index: an integer returns ``[]``; a slice, a list or an integer tensor
                ``[n]`` returns ``[n]``; one boolean per frame returns the frames where
                it is True.

        Raises:
            IndexError: if a number is out of range.
            TypeError: if ``index`` has another dtype or several dimensions.
        """
        if isinstance(index, slice):
            return self._read(np.arange(*index.indices(len(self)), dtype=np.int64))
        array = np.asarray(index)
        if array.dtype == np.bool_ and array.shape == (len(self),):
            array = np.flatnonzero(array)
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                "The index must be an integer, a slice, a list of integers, or "
                f"{len(self)} booleans, but is {array.dtype} {list(array.shape)}."
            )
        numbers = item_numbers(array, len(self), "frame")
        frames = self._read(numbers.reshape(-1))
        return frames if numbers.ndim else frames[0]

    def __getitems__(self, indices: list[int]) -> TensorDict:
        return self[indices]

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> TensorDict:
        """Sample ``n`` frames uniformly, with replacement: ``[n]``.

        Raises:
            ValueError: if there are no frames, or if ``n`` is invalid.
        """
        what = f"frames to sample in {self._frames.name}"
        return self._read(draw(n, len(self), what, generator))

    def select(self, *keys: str | Key) -> "Transitions":
        """Return the same frames with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        return Transitions(self._frames.select(*keys), self._numbers)

    def moments(self, *keys: str | Key) -> dict[Key, Moments]:
        """Return the mean and the standard deviation of each element of keys.

        They are over all frames, and over the agents of a group. All frames are read
        once, in parts. Moments of ``dataset.transitions`` are kept in the cache.

        Args:
            keys: numeric keys at the root, such as ``("agent", "observation")``.

        Raises:
            KeyError: if a key does not exist.
            ValueError: if there are no frames.
        """
        chosen = self._frames.select(*keys)
        if not len(self):
            raise ValueError(f"There are no frames in {self._frames.name}.")
        cache, is_all = chosen.cache, self._numbers is None
        saved = cache.saved("moments") if is_all else {}
        missing = [column for column in chosen.keys if column.name not in saved]
        if missing:
            numbers = range(len(self)) if self._numbers is None else self._numbers
            parts = chosen.select(*(c.key for c in missing)).parts(numbers)
            computed = moments_of(parts, chosen.groups)
            saved |= {c.name: computed[c.key].to_json() for c in missing}
            if is_all:
                cache.save("moments", saved)
        return {c.key: Moments.from_json(saved[c.name]) for c in chosen.keys}

    def __repr__(self) -> str:
        return f"Transitions({self._frames.name!r}, {len(self)} frames)"

    def _read(self, positions: NDArray[np.int64]) -> TensorDict:
        if self._numbers is not None:
            positions = self._numbers[positions]
        frames = self._frames.read(positions)
        return self._frames.nested(frames, [len(positions)], time=False)
