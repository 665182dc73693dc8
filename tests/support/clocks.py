"""Clocks of tests, in place of pauses that they would wait for; and faults that wait.

A worker hangs if it makes no progress for some time on the trainer's clock. With the
true clock a healthy worker that gets no processor time would count as hung. A test lets
`Clock` go on only while the worker that hangs is the only one at work. In the same way
`ClosingClock` replaces the time that environments may take to close.
"""

import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
from workloads.counting import stuck

from marl_collect.processes import closing, hang
from marl_collect.processes.hang import HangWatch
from marl_collect.processes.status_board import MESSAGES_READ, PHASE, Phase
from marl_collect.processes.worker_handle import WorkerHandle
from support.processes import wait_until

LIMIT: Final = 100.0
"""Seconds of `Clock` after which a worker counts as hung."""


class Clock:
    """Replaces the clock of the search for hung workers; it stands still at first.

    Attributes:
        now: seconds.
        readings: how many times it was read: once per search.
        runs_when: whether every reading advances it, by a quarter of the limit.
        quiet: the workers that had work at the last search, and had made no progress
            since the one before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the clock until the end of the test."""
        # The true time, which pools have noted that were started before.
        self._begin = self.now = time.monotonic()
        self.readings = 0
        self.runs_when: Callable[[], bool] = lambda: False
        self.quiet: frozenset[int] = frozenset()
        self._cells: dict[tuple[int, int], list[int]] = {}
        clock = SimpleNamespace(monotonic=self._monotonic)
        monkeypatch.setattr(hang, "time", clock)
        # The interval of the searches, which is up to one true second otherwise.
        monkeypatch.setattr(HangWatch, "pause", lambda *_: 0.02)
        find = HangWatch.find

        def look_and_find(
            watch: HangWatch, sent: Mapping[int, int], timeout: float | None
        ) -> tuple[int, float] | None:
            self.quiet = frozenset(w for w in sent if self._is_quiet(watch, w, sent[w]))
            return find(watch, sent, timeout)

        monkeypatch.setattr(HangWatch, "find", look_and_find)

    @property
    def passed(self) -> float:
        """Seconds that have passed on this clock."""
        return self.now - self._begin

    def _is_quiet(self, watch: HangWatch, worker: int, sent: int) -> bool:
        cells = watch._status_board.lines[worker].cells.tolist()
        before = self._cells.get((id(watch), worker))
        self._cells[id(watch), worker] = cells
        idle = cells[PHASE] == Phase.IDLE and cells[MESSAGES_READ] >= sent
        return cells == before and not idle

    def _monotonic(self) -> float:
        self.readings += 1
        if self.runs_when():
            self.now += LIMIT / 4
        return self.now

    def pass_slowly(self, seconds: float) -> None:
        """Let seconds pass, a quarter of them between two searches."""
        for _ in range(4):
            self.now += seconds / 4
            target = self.readings + 2  # Until then a whole search has been made.
            wait_until(lambda target=target: self.readings >= target)  # type: ignore[misc]


class ClosingClock:
    """Replaces the clock of closing: its limits pass when a condition holds.

    Close within 1000 seconds, which the true clock does not reach. The first leap is to
    SIGTERM, the second one to SIGKILL.

    Attributes:
        leaps: how many there were.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, leaps_when: Callable[[], bool]
    ) -> None:
        """Replace the clock until the end of the test."""
        self.leaps = 0
        self._leaps_when = leaps_when
        self._has_begun = False
        self._real: Final = time.monotonic
        monkeypatch.setattr(closing, "time", SimpleNamespace(monotonic=self._monotonic))
        poll = SimpleNamespace(poll=lambda: _ImpatientPoll(self._monotonic))
        monkeypatch.setattr(
            closing, "select", SimpleNamespace(**vars(select) | vars(poll))
        )
        wait_for_ends(monkeypatch)

    def _monotonic(self) -> float:
        # The limits are measured from the first reading.
        if self._has_begun and self._leaps_when():
            self.leaps += 1
        self._has_begun = True
        return self._real() + 900 * self.leaps


class _ImpatientPoll:
    """A poll whose limit counts on a clock that leaps."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        deadline = self._monotonic() + milliseconds / 1000
        while True:
            ready = self._poll.poll(10 if milliseconds else 0)
            if ready or self._monotonic() >= deadline:
                return ready


def wait_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker that was told to end take the time that it needs.

    The limits of the package are a few seconds, in which a process of a busy machine
    may get no processor time.
    """
    join = WorkerHandle.join
    monkeypatch.setattr(WorkerHandle, "join", lambda self, _=None: join(self, LIMIT))


def hangs(started_file: Path) -> Callable[[], None]:
    """Return a fault that creates a file and then waits forever."""

    def strike() -> None:
        started_file.touch()
        threading.Event().wait()

    return strike


def hangs_in_c(started_file: Path) -> Callable[[], None]:
    """Return the same that waits in C code, holding the interpreter lock."""

    def strike() -> None:
        started_file.touch()
        stuck()

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
