"""Spans: consecutive frames of a dataset, by their numbers.

All frames of a dataset are numbered in the order of the file, also those that are not
valid: row ``b``, frame ``t`` of a batch ``[B, T]`` has the number of the batch's first
frame plus ``b * T + t``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@final
@dataclass(frozen=True)
class Spans:
    """Items, such as episodes, of one or more spans each.

    Attributes:
        begin: ``[s]``, number of the first frame of each span.
        end: ``[s]``, behind the last one.
        first: ``[n + 1]``, first span of each item, and the number of spans.
    """

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    first: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of items."""
        return len(self.first) - 1

    @property
    def starts(self) -> NDArray[np.int64]:
        """``[s + 1]``: where each span begins with all back to back, and the end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.end - self.begin)])

    @property
    def item_starts(self) -> NDArray[np.int64]:
        """``[n + 1]``: where each item begins with all back to back, and the end."""
        return self.starts[self.first]

    def take(self, items: NDArray[np.int64]) -> "Spans":
        """Return the spans of some items, in this order."""
        counts = np.diff(self.first)[items]
        chosen = ranges(self.first[items], counts)
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        return Spans(self.begin[chosen], self.end[chosen], first)

    def frames(self) -> NDArray[np.int64]:
        """Return the number of every frame."""
        return ranges(self.begin, self.end - self.begin)

    def locate(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of frames at positions with all spans back to back."""
        if len(self.begin) == 1:
            return positions + self.begin[0]
        starts = self.starts
        span = np.searchsorted(starts, positions, side="right") - 1
        return self.begin[span] + positions - starts[span]

    def joined(self) -> "Spans":
        """Return the same frames as one item per span, joining neighbours."""
        continues = self.end[:-1] == self.begin[1:]
        begin = self.begin[np.append(True, ~continues)[: len(self.begin)]]
        end = self.end[np.append(~continues, True)[: len(self.end)]]
        return Spans(begin, end, np.arange(len(begin) + 1))


def ranges(begin: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers ``begin[i], ..., begin[i] + counts[i] - 1`` of each i."""
    shift = begin - np.cumsum(counts) + counts
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def item_numbers(numbers: Any, count: int, what: str) -> NDArray[np.int64]:
    """Return numbers of ``count`` items, which may count from the end, from 0 on.

    Args:
        numbers: integers of any shape.
        count: number of items.
        what: an item, for the error.

    Raises:
        IndexError: if one is out of range. It names the first one.
    """
    array = np.asarray(numbers, np.int64)
    wrong = array[(array < -count) | (array >= count)]
    if wrong.size:
        raise IndexError(
            f"{what.capitalize()} {wrong[0]} is out of range: there are {count}."
        )
    return np.where(array < 0, array + count, array)


def draw(
    n: int, count: int, what: str, generator: "torch.Generator | None"
) -> NDArray[np.int64]:
    """Draw ``n`` of ``count`` items uniformly, with replacement.

    Args:
        n: number of items.
        count: number of items to draw from.
        what: the items and where they are, for the error.
        generator: random generator; torch's default if None.

    Raises:
        ValueError: if there are no items, or ``n`` is not an integer of at least 0.
    """
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise ValueError(f"n must be an integer of at least 0, but is {n!r}.")
    if not count:
        raise ValueError(f"There are no {what}.")
    import torch

    numbers: NDArray[np.int64] = torch.randint(
        count, (n,), generator=generator, device="cpu"
    ).numpy()
    return numbers
