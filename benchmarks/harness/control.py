"""A fixed loop, timed before and after: was the machine disturbed meanwhile?"""

import statistics
import timeit

_ROUNDS = 40
_LENGTH = 20_000
TOLERANCE = 0.03
"""Relative difference from which an experiment counts as disturbed."""


def control() -> float:
    """Return rounds per second of a loop that does the same work every time.

    The median of several rounds, because one of them may be interrupted by anything.
    """
    return 1 / statistics.median(timeit.repeat(_work, number=1, repeat=_ROUNDS))


def _work() -> None:
    total = 0
    for value in range(_LENGTH):
        total += value


def disturbed(before: float, after: float) -> bool:
    """Return whether the two differ by more than the tolerance."""
    return abs(after / before - 1) > TOLERANCE
