"""Finding workers that hang: alive, supposed to work, and without any progress.

Progress is a change of the worker's line on the status board. The time without one is
added up from look to look, and no single pause between two looks counts for
more than a quarter of the limit. So neither the trainer's own pauses nor a
Ctrl-Z of the whole job look like a hang, while a worker that makes no progress
over several looks is found even if the trainer always finds other data to read.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from marl_collect.processes.status_board import MESSAGES_READ, PHASE, Phase, StatusBoard

_STARTING = (Phase.START, Phase.CREATE)


@dataclass
class _Clock:
    cells: list[int]
    looked: float
    quiet: float = 0.0


class HangWatch:
    """A stopwatch per worker that runs while it owes progress."""

    def __init__(self, status_board: StatusBoard, start_timeout: float | None) -> None:
        self._status_board = status_board
        self._start_timeout = start_timeout
        self._clocks = [self._new_clock(i) for i in range(len(status_board.lines))]

    def restart(self, worker: int) -> None:
        """Set a worker's stopwatch to zero."""
        self._clocks[worker] = self._new_clock(worker)

    def find(
        self, sent: Mapping[int, int], timeout: float | None
    ) -> tuple[int, float] | None:
        """Look at some workers, and return one that hangs, and its limit in seconds.

        Args:
            sent: the workers to look at, with the number of messages sent to each:
                one that has not read them owes progress even if it is idle.
            timeout: seconds without progress that are allowed; None for no limit.
        """
        now, pause = time.monotonic(), self.pause(timeout)
        for worker, messages in sent.items():
            if now - self._clocks[worker].looked < pause / 2:
                continue  # Messages may come by the thousand: a look takes 5 us.
            limit = self._advance(worker, messages, timeout, now)
            if limit is not None and self._clocks[worker].quiet >= limit:
                return worker, limit
        return None

    def pause(self, timeout: float | None) -> float:
        """Return how many seconds may pass until the next look."""
        limits = [t for t in (timeout, self._start_timeout) if t is not None]
        return min([1.0, *(limit / 10 for limit in limits)])

    def _advance(
        self, worker: int, sent: int, timeout: float | None, now: float
    ) -> float | None:
        """Move a worker's stopwatch on; return the limit that it is under."""
        clock = self._clocks[worker]
        cells = self._status_board.lines[worker].cells.tolist()
        limit = self._start_timeout if cells[PHASE] in _STARTING else timeout
        idle = cells[PHASE] == Phase.IDLE and cells[MESSAGES_READ] >= sent
        if idle or limit is None or cells != clock.cells:
            clock.cells, clock.quiet = cells, 0.0
        else:
            clock.quiet += min(now - clock.looked, limit / 4)
        clock.looked = now
        return None if idle else limit

    def _new_clock(self, worker: int) -> _Clock:
        return _Clock(self._status_board.lines[worker].cells.tolist(), time.monotonic())
