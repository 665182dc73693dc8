"""Checks of arguments that select workers, and workers in words."""

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np

from marl_collect.errors import counted


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


def listed_workers(worker_ids: int | Sequence[int], number: int) -> list[int]:
    """Return ``worker_ids``, one index or several, as a list.

    Raises:
        TypeError: if they are no indices.
        ValueError: if there are fewer workers, or if none is named.
    """
    is_one = isinstance(worker_ids, int | np.integer)
    chosen = _indices("worker_ids", "workers", [worker_ids] if is_one else worker_ids)
    if not chosen:
        raise ValueError("worker_ids names no worker; None selects all of them.")
    for worker in chosen:
        if not 0 <= worker < number:
            raise ValueError(
                f"worker_ids names worker {worker} of {number}: indices are 0 to "
                f"{number - 1}."
            )
    return chosen


def the_only(*sources: Any) -> Any:
    """Return the one source of weights that is not None; None if there is none.

    Raises:
        ValueError: if there are several.
    """
    passed = [source for source in sources if source is not None]
    if len(passed) > 1:
        raise ValueError(
            "Pass only one of policy_or_weights, weights, policy and weights_dict."
        )
    return passed[0] if passed else None


def are_by_worker(weights: Any) -> bool:
    """Return whether ``weights`` maps worker indices to weights."""
    return (
        isinstance(weights, Mapping)
        and len(weights) > 0
        and all(isinstance(key, Integral) for key in weights)
    )


def listed_environments(
    environments: Sequence[int] | None, number: int
) -> tuple[int, ...]:
    """Return the indices of chosen environments in order; None chooses all.

    Raises:
        IndexError: if there are fewer environments.
        TypeError: if they are no indices.
    """
    if environments is None:
        return tuple(range(number))
    chosen = sorted(set(_indices("environments", "environments", environments)))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < number:
        raise IndexError(
            f"environments must be indices from 0 to {number - 1}, but are "
            f"{list(environments)}."
        )
    return tuple(chosen)


def _indices(argument: str, things: str, values: Any) -> list[int]:
    try:
        listed = list(values)
        if any(isinstance(index, bool | np.bool_) for index in listed):
            raise TypeError  # A mask would choose 0 and 1.
        return [operator.index(index) for index in listed]
    except TypeError:
        raise TypeError(
            f"{argument} must be indices of {things}, such as [0, 2], but is "
            f"{values!r:.100}."
        ) from None


def plain(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return a copy of an argument that ``torch.load`` reads without running code.

    Args:
        value: to copy.
        within: ids of the containers that it is in.

    Raises:
        TypeError: if there is none.
        ValueError: if a container contains itself.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if id(value) in within:
        raise ValueError(
            "Arguments of call_env() are stored in state_dict(), but one is a "
            f"{type(value).__name__} that contains itself."
        )
    inside = partial(plain, within=(*within, id(value)))
    if type(value) in (list, tuple):
        return type(value)(map(inside, value))
    if type(value) is dict:
        return {inside(key): inside(entry) for key, entry in value.items()}
    raise TypeError(
        "Arguments of call_env() are stored in state_dict(), so they must be numbers, "
        f"strings, None, lists, tuples or dicts, but one is a {type(value).__name__}: "
        f"{value!r:.100}."
    )


def sized_workers(sizes: Sequence[int]) -> str:
    """Return the numbers of workers and environments in words."""
    workers = counted(len(sizes), "worker")
    if len(set(sizes)) == 1:
        return f"{workers} x {counted(sizes[0], 'environment')}"
    return f"{workers}, {counted(sum(sizes), 'environment')}"
