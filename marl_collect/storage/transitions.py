"""The frames of a dataset as one long list."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.checks import Folder
from marl_collect.storage.frames import StoredFrames
from marl_collect.storage.index import Index
from marl_collect.storage.loading import Loadable
from marl_collect.storage.moments import load_moments, save_moments
from marl_collect.storage.parquet.moments import Moments
from marl_collect.storage.spans import Spans, draw, item_numbers

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_PART: Final = 20_000
"""Frames that are read at once to compute moments."""


@final
class Transitions(Loadable):
    """Frames, each with its ``next``, in the order in which they were collected.

    It is a map-style dataset for torch's ``DataLoader``, which reads whole batches at
    once.
    """

    def __init__(
        self,
        frames: StoredFrames,
        spans: Spans,
        part: tuple[Folder, Index] | None = None,
    ) -> None:
        """Number the frames of ``spans``; nothing is read yet.

        Args:
            frames: to read from.
            spans: their numbers.
            part: the folder that keeps the moments, if these are all of its frames.
        """
        self._frames = frames
        self._spans = spans
        self._part = part
        self._count = int((spans.end - spans.begin).sum())

    def __len__(self) -> int:
        """Number of frames."""
        return self._count

    def __getitem__(self, index: int | slice | Sequence[int] | Any) -> "TensorDict":
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
            numbers = np.arange(*index.indices(len(self)), dtype=np.int64)
            return self._read(numbers)
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

    def __getitems__(self, indices: list[int]) -> "TensorDict":
        """Read frames ``[n]``; torch's ``DataLoader`` calls this method."""
        return self[indices]

    def sample(
        self, n: int, *, generator: "torch.Generator | None" = None
    ) -> "TensorDict":
        """Sample ``n`` frames uniformly, with replacement: ``[n]``.

        Raises:
            ValueError: if there are no frames, or if ``n`` is invalid.
        """
        what = f"frames to sample in {self._frames.name}"
        return self._read(draw(n, len(self), what, generator))

    def select(self, *keys: str | Key) -> "Transitions":
        """Return the same frames with these keys, and those below them, only."""
        return Transitions(self._frames.select(*keys), self._spans, self._part)

    def __repr__(self) -> str:
        """Return the path and the number of frames."""
        return f"Transitions({self._frames.name!r}, {len(self)} frames)"

    def _read(self, numbers: NDArray[np.int64]) -> "TensorDict":
        tensors = self._frames.read(self._spans.locate(numbers))
        return self._frames.nested(tensors, [len(numbers)], time=False)

    def moments(self, *keys: str | Key) -> dict[Key, Moments]:
        """Return the mean and the standard deviation of each element of keys.

        They are over all frames, and over the agents of a group. All frames are read
        once, in parts. Moments of ``dataset.transitions`` are kept in the dataset's
        folder, if it can be written to; the next call reads them there and no frames.

        Args:
            keys: numeric keys at the root, such as ``("agent", "observation")``.

        Raises:
            KeyError: if a key does not exist.
            ValueError: if there are no frames.
        """
        chosen = self._frames.select(*keys)
        if not len(self):
            raise ValueError(f"There are no frames in {self._frames.name}.")
        moments = load_moments(*self._part) if self._part else {}
        missing = [item.key for item in chosen.keys if item.key not in moments]
        if missing:
            moments |= self._compute(chosen.select(*missing))
            if self._part:
                save_moments(*self._part, moments)
        return {item.key: moments[item.key] for item in chosen.keys}

    def _compute(self, chosen: StoredFrames) -> dict[Key, Moments]:
        sums: dict[Key, list[Any]] = {item.key: [0, 0, 0] for item in chosen.keys}
        for begin in range(0, len(self), _PART):
            numbers = np.arange(begin, min(begin + _PART, len(self)))
            for key, tensor in chosen.read(self._spans.locate(numbers)).items():
                values = tensor.double()
                if self._frames.in_group(key):
                    values = values.flatten(0, 1)
                part = len(values), values.sum(0), values.square().sum(0)
                sums[key] = [a + b for a, b in zip(sums[key], part, strict=True)]
        return {key: Moments.of(*values) for key, values in sums.items()}
