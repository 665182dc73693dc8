"""Finds workers that hang: alive, expected to work, and without progress.

Progress is a change of the worker's line on the status board. The time without progress
is summed over checks, and the interval between two checks counts for at most a quarter
of the limit. So pauses of the trainer and a Ctrl-Z of the whole job do not look like a
hang. A worker without progress over several checks is found even if the trainer always
has other data to read.

Without a limit a busy worker may take any time. One that a signal has stopped is not
busy, and would be waited for without end.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

from marl_collect.processes.status_board import MESSAGES_READ, PHASE, Phase, StatusBoard

STOPPED_SECONDS: Final = 60.0
"""Limit of a worker that has none, while it is stopped."""

_STARTING = (Phase.START, Phase.CREATE)


class HangWatch:
    """A stopwatch per worker that runs while the worker is expected to progress."""

    def __init__(
        self,
        status_board: StatusBoard,
        start_timeout: float | None,
        is_stopped: Callable[[int], bool],
    ) -> None:
        """Watch the workers of a status board.

        Args:
            status_board: the workers' progress.
            start_timeout: allowed seconds without progress during the start; None for
                no limit.
            is_stopped: returns whether a signal has stopped a worker.
        """
        self._status_board = status_board
        self._start_timeout = start_timeout
        self._is_stopped = is_stopped
        self._clocks = [self._new_clock(i) for i in range(len(status_board.lines))]

    def restart(self, worker: int) -> None:
        """Set a worker's stopwatch to zero."""
        self._clocks[worker] = self._new_clock(worker)

    def find(
        self, sent: Mapping[int, int], timeout: float | None
    ) -> tuple[int, float] | None:
        """Check some workers; return one that hangs and its limit in seconds.

        Args:
            sent: number of messages sent to each worker that is checked. A worker that
                has not read them all is expected to progress even if it is idle.
            timeout: allowed seconds without progress; None for no limit, but
                ``STOPPED_SECONDS`` for a worker that is stopped.
        """
        now, pause = time.monotonic(), self.pause(timeout)
        for worker, messages in sent.items():
            before, checked, quiet = self._clocks[worker]
            if now - checked < pause / 2:
                continue  # Thousands of messages may arrive, and a check takes 5 us.
            cells = self._status_board.lines[worker].cells.tolist()
            limit = self._start_timeout if cells[PHASE] in _STARTING else timeout
            idle = cells[PHASE] == Phase.IDLE and cells[MESSAGES_READ] >= messages
            same = not idle and cells == before
            if limit is None and same and self._is_stopped(worker):
                limit = STOPPED_SECONDS
            quiet = quiet + min(now - checked, limit / 4) if same and limit else 0.0
            self._clocks[worker] = cells, now, quiet
            if limit and quiet >= limit:
                return worker, limit
        return None

    def pause(self, timeout: float | None) -> float:
        """Return the seconds until the next check."""
        limits = [t for t in (timeout, self._start_timeout) if t is not None]
        return min([1.0, *(limit / 10 for limit in limits)])

    def _new_clock(self, worker: int) -> tuple[list[int], float, float]:
        """Return a line's cells, when they were read, and the seconds without change.

        They are of the last check.
        """
        cells = self._status_board.lines[worker].cells.tolist()
        return cells, time.monotonic(), 0.0
