"""Checks of arguments that select workers, and workers in words."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np


def chosen_workers(reset_idx: Sequence[bool] | None, workers: int) -> list[int] | None:
    """Return the indices of the workers that ``reset_idx`` selects, None for all.

    Raises:
        ValueError: if it does not have one bool per worker.
    """
    if reset_idx is None:
        return None
    chosen = np.asarray(reset_idx)
    if chosen.dtype != np.bool_ or chosen.shape != (workers,):
        first = [worker == 0 for worker in range(workers)]
        raise ValueError(
            f"reset_idx must be a bool for each of the {workers} workers, such as "
            f"{first} for the first, but is {reset_idx!r}."
        )
    return [int(worker) for worker in np.flatnonzero(chosen)]


def listed_workers(worker_ids: int | Sequence[int]) -> list[int]:
    """Return ``worker_ids``, one index or several, as a list.

    Raises:
        TypeError: for booleans, which would be read as workers 0 and 1.
    """
    listed: list[Any] = (
        [worker_ids] if isinstance(worker_ids, int | np.integer) else list(worker_ids)
    )
    if any(isinstance(index, (bool, np.bool_)) for index in listed):
        raise TypeError(
            f"worker_ids must be indices of workers, such as [0, 2], but is "
            f"{worker_ids!r}."
        )
    return [operator.index(index) for index in listed]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sized_workers(sizes: Sequence[int]) -> str:
    """Return the numbers of workers and environments in words."""
    workers = counted(len(sizes), "worker")
    if len(set(sizes)) == 1:
        return f"{workers} x {counted(sizes[0], 'environment')}"
    return f"{workers}, {counted(sum(sizes), 'environment')}"
