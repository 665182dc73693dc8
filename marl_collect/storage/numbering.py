"""Numbers of frames and of items."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def ranges(begin: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers ``begin[i], ..., begin[i] + counts[i] - 1`` of each i."""
    shift = begin - np.cumsum(counts) + counts
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[n + 1]``: where each item begins with all back to back, and the end."""
    return np.append(np.int64(0), np.cumsum(lengths))


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
    n: int, count: int, what: str, generator: torch.Generator | None
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
    drawn: NDArray[np.int64] = torch.randint(
        count, (n,), generator=generator, device="cpu"
    ).numpy()
    return drawn
