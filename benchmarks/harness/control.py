"""A fixed loop, timed before and after: was the machine disturbed meanwhile?"""

import time

_ROUNDS = 40
_LENGTH = 20_000
TOLERANCE = 0.03
"""Relative difference from which an experiment counts as disturbed."""


def control() -> float:
    """Return rounds per second of a loop that does the same work every time.

    The median of several rounds, because one of them may be interrupted by anything.
    """
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        total = 0
        for value in range(_LENGTH):
            total += value
        times.append(time.perf_counter() - begin)
    return 1 / sorted(times)[_ROUNDS // 2]


def disturbed(before: float, after: float) -> bool:
    """Return whether the two differ by more than the tolerance."""
    return abs(after / before - 1) > TOLERANCE
