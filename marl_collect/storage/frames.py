"""Reads frames by their numbers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from marl_collect.buffers.layout import VALID
from marl_collect.core.description import Key
from marl_collect.core.replay import frames_of
from marl_collect.core.tensordicts import assemble, key_path
from marl_collect.storage.cache import Cache
from marl_collect.storage.columns import Column
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.loading import Loadable, item_numbers
from marl_collect.storage.statistics import Moments, Range, moments_of

_PART: Final = 20_000
"""Frames that are read at once by what reads all of them."""


def starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[n + 1]``: where each item begins with all back to back, and the end."""
    return np.append(np.int64(0), np.cumsum(lengths))


@final
@dataclass(frozen=True, eq=False, repr=False)
class Transitions(Loadable):
    """Frames, each with its ``next``, in the order in which they were collected.

    It is a map-style dataset for torch's ``DataLoader``, which reads whole batches at
    once.

    Attributes:
        name: of the dataset in messages.
        cache: what is read.
        keys: key, shape of a frame, and dtype of every tensor that is read.
        description: of the dataset.
        runs: of the dataset, by number.
        chosen: numbers of the frames in the cache, ``[n]``; None for all.
    """

    name: str
    cache: Cache
    keys: tuple[Column, ...]
    description: DatasetDescription
    runs: tuple[RunDescription, ...]
    chosen: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.cache.records if self.chosen is None else self.chosen)

    def __repr__(self) -> str:
        return f"Transitions({self.name!r}, {len(self)} frames)"

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
            return self._items(np.arange(*index.indices(len(self)), dtype=np.int64))
        array = np.asarray(index)
        if array.dtype == np.bool_ and array.shape == (len(self),):
            array = np.flatnonzero(array)
        if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                "The index must be an integer, a slice, a list of integers, or "
                f"{len(self)} booleans, but is {array.dtype} {list(array.shape)}."
            )
        numbers = item_numbers(array, len(self), "frame")
        frames = self._items(numbers.reshape(-1))
        return frames if numbers.ndim else frames[0]

    def select(self, *keys: str | Key) -> Self:
        """Return the same frames with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        chosen: set[Column] = set()
        for key in map(key_path, keys):
            columns = {column for column in self.keys if column.key[: len(key)] == key}
            if not columns:
                names = ", ".join("/".join(column.key) for column in self.keys)
                raise KeyError(
                    f"There is no key {'/'.join(key)} in {self.name}; it has {names}."
                )
            chosen |= columns
        return replace(self, keys=tuple(c for c in self.keys if c in chosen))

    def moments(self, *keys: str | Key) -> dict[Key, Moments]:
        """Return the mean and the standard deviation of each element of keys.

        They are over all frames, and over the agents of a group. All frames are read
        once, in parts.

        Args:
            keys: numeric keys, such as ``("agent", "observation")``.

        Raises:
            KeyError: if a key does not exist.
            ValueError: if there are no frames, or a key is complex.
        """
        chosen = self.select(*keys)
        if not len(self):
            raise ValueError(f"There are no frames in {self.name}.")
        return moments_of(chosen.parts(), chosen.groups)

    def ranges(self) -> dict[Key, Range]:
        """Return the lowest and the highest value of each key, over all agents.

        All frames are read once, in parts.
        """
        ranges = {column.key: Range() for column in self.keys}
        for part in self.parts():
            for key, values in part.items():
                ranges[key] = ranges[key].joined(values)
        return ranges

    @cached_property
    def groups(self) -> dict[str, int]:
        """Number of agents of each group."""
        return self.description.environment.group_sizes

    @property
    def nbytes(self) -> int:
        """Size of all frames in memory."""
        return len(self) * sum(column.nbytes for column in self.keys)

    def numbers(
        self, first: NDArray[np.int64], length: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the numbers of frames of pieces, which begin in ``Cache.order``."""
        return np.asarray(self.cache.order[frames_of(first, length)])

    def read(
        self, numbers: NDArray[np.int64], keys: Sequence[Column] | None = None
    ) -> dict[Key, torch.Tensor]:
        """Copy frames of the cache, of all or some keys: each ``[n, ...]``."""
        return self.cache.read(numbers, self.keys if keys is None else keys)

    def arrays(self, numbers: NDArray[np.int64]) -> dict[Key, NDArray[Any]]:
        """Copy frames as ``read`` does, as arrays; float32 instead of bfloat16."""
        return {
            c.key: (t.float() if t.is_floating_point() and c.is_view else t).numpy()
            for c, t in zip(self.keys, self.read(numbers).values(), strict=True)
        }

    def parts(self) -> Iterator[dict[Key, torch.Tensor]]:
        """Read these frames in parts, as ``read`` does."""
        numbers = range(len(self)) if self.chosen is None else self.chosen
        for begin in range(0, len(numbers), _PART):
            yield self.read(np.asarray(numbers[begin : begin + _PART], np.int64))

    def nested(
        self, tensors: Mapping[Key, torch.Tensor], shape: Sequence[int]
    ) -> TensorDict:
        """Return tensors ``[prod(shape), ...]`` as a TensorDict ``[..., time]``."""
        shaped = {key: t.view(*shape, *t.shape[1:]) for key, t in tensors.items()}
        return assemble(shaped, shape, self.groups, time=True)

    def padded(
        self,
        first: NDArray[np.int64],
        lengths: NDArray[np.int64],
        width: int,
        padding: NDArray[np.int64] | int = 0,
    ) -> TensorDict:
        """Read pieces ``[n, width]`` and their mask.

        They begin at ``first`` in ``Cache.order``. In front of each there are
        ``padding`` frames of zeros; behind it they fill the row.
        """
        begin = np.zeros_like(lengths) + padding
        column = np.arange(width)
        end = (begin + lengths)[:, None]
        valid = (begin[:, None] <= column) & (column < end)
        tensors = self.read(self.numbers(first, lengths))
        if lengths.sum() < valid.size:
            positions = np.flatnonzero(valid)
            for of_key in self.keys:
                # By NumPy, because torch lacks this for some dtypes, such as uint16.
                out = np.zeros((valid.size, *of_key.shape), of_key.stored)
                out[positions] = of_key.array(tensors[of_key.key])
                tensors[of_key.key] = of_key.tensor(out)
        return self.nested(tensors, valid.shape).set(VALID, torch.from_numpy(valid))

    def _items(self, numbers: NDArray[np.int64]) -> TensorDict:
        numbers = numbers if self.chosen is None else self.chosen[numbers]
        return assemble(self.read(numbers), [len(numbers)], self.groups)
