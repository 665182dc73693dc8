"""Clocks of tests, in place of pauses that they would wait for; and faults that wait.

A worker hangs if it makes no progress for some time on the trainer's clock. With the
true clock a healthy worker that gets no processor time would count as hung. A test lets
`Clock` go on only while the worker that hangs is the only one at work.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from marl_collect.processes import hang
from support.processes import wait_until

LIMIT: Final = 100.0
"""Seconds of `Clock` after which a worker counts as hung."""


class LeapingClock:
    """Replaces ``time.monotonic`` in this process; other processes do not see it.

    Use it with ``monkeypatch.setattr(time, "monotonic", clock.monotonic)``.
    """

    def __init__(self) -> None:
        self._real: Final = time.monotonic
        self._ahead = 0.0

    def monotonic(self) -> float:
        """Return the seconds of the real clock, plus those that were leapt over."""
        return self._real() + self._ahead

    def leap(self, seconds: float) -> None:
        """Let that many seconds pass at once."""
        self._ahead += seconds


class Clock:
    """Replaces the clock of the search for hung workers; it stands still at first.

    Attributes:
        now: seconds.
        readings: how many times it was read: once per search.
        runs_when: whether every reading advances it, by a quarter of the limit.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clock until the end of the test."""
        self.now = 0.0
        self.readings = 0
        self.runs_when: Callable[[], bool] = lambda: False
        clock = SimpleNamespace(monotonic=self._monotonic)
        monkeypatch.setattr(hang, "time", clock)
        # The interval of the searches, which is up to one true second otherwise.
        monkeypatch.setattr(hang.HangWatch, "pause", lambda *_: 0.02)

    def _monotonic(self) -> float:
        self.readings += 1
        if self.runs_when():
            self.now += LIMIT / 4
        return self.now

    def wait_for_search(self) -> None:
        """Wait until a whole search has been made from now on."""
        target = self.readings + 2
        wait_until(lambda: self.readings >= target)

    def pass_slowly(self, seconds: float) -> None:
        """Let seconds pass, a quarter of them between two searches."""
        for _ in range(4):
            self.now += seconds / 4
            self.wait_for_search()


def hangs(started_file: Path) -> Callable[[], None]:
    """Return a fault that creates a file and then waits forever."""

    def strike() -> None:
        started_file.touch()
        threading.Event().wait()

    return strike


def waits(started_file: Path, until: Path) -> Callable[[], None]:
    """Return a fault that creates a file and then waits for another."""

    def strike() -> None:
        started_file.touch()
        while not until.exists():
            threading.Event().wait(0.005)

    return strike


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[None]:
    """Run a function in a thread meanwhile."""
    with ThreadPoolExecutor(1) as threads:
        acting = threads.submit(act)
        yield
        acting.result()
