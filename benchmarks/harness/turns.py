"""Calls of this process, measured in turn: A B C, C B A, and so on.

Whatever slows the machine slows all of them, and ratios are taken within a round.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

Call = Callable[[], float]
"""Does some work, and returns how much: frames, steps, bytes or calls."""

_TICK = 1e-3
"""Seconds between two looks at the clock. Shorter ones would measure the clock, which
takes up to a microsecond."""

_SLOW = 0.5
"""Seconds of a call that is not called twice before it is measured."""


@final
@dataclass(frozen=True)
class Alternative:
    """One of the calls that are compared.

    Attributes:
        call: is measured.
        nbytes: returns the size of what the call has made, in bytes.
    """

    call: Call
    nbytes: Callable[[], float] | None = None

    @classmethod
    def once(cls, call: Callable[[], object]) -> "Alternative":
        """Return the alternative whose unit of work is one call."""
        return cls(lambda: (call(), 1.0)[1])


def measure(
    alternatives: Mapping[str, Alternative],
    rounds: int,
    *,
    seconds: float = 0.1,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Return the seconds per unit of work of every round, by name.

    Args:
        alternatives: by name.
        rounds: how many windows each gets.
        seconds: of a window. A call that takes longer is a window of its own.
        clock: processor time, unless the calls wait for disks or other processes.
    """
    repeats = {}
    for name, alternative in alternatives.items():
        elapsed, _ = _window(alternative, 1, 0.0, clock)
        if elapsed < _SLOW:  # The first call compiles, allocates and fills caches.
            elapsed, _ = _window(alternative, 1, 0.0, clock)
        repeats[name] = max(1, int(_TICK / max(elapsed, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in alternatives}
    for repetition in range(rounds):
        order = list(alternatives.items())
        for name, alternative in order if repetition % 2 == 0 else order[::-1]:
            elapsed, work = _window(alternative, repeats[name], seconds, clock)
            times[name].append(elapsed / work)
    return times


def _window(
    alternative: Alternative, repeats: int, seconds: float, clock: Callable[[], float]
) -> tuple[float, float]:
    """Call until the seconds are over, at least once; return seconds and work."""
    elapsed = work = 0.0
    while not work or elapsed < seconds:
        begin = clock()
        for _ in range(repeats):
            work += alternative.call()
        elapsed += clock() - begin
    return elapsed, work
