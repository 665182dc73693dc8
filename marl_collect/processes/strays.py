"""Processes that workers have started and left behind, such as a game's binary.

The kernel gives the orphans of a worker to the fork server, its nearest living
"subreaper". The server finds out whose they were by a variable that every
worker has in its environment, which programs inherit. Those of a worker that has
ended get SIGTERM, and SIGKILL a second later: some, like the resource tracker of
``multiprocessing``, have something to clean up themselves.

Source:
    prctl(2), PR_SET_CHILD_SUBREAPER; proc(5), /proc/<pid>/task/<tid>/children.
"""

import contextlib
import os
import signal
import time
from collections.abc import Container
from pathlib import Path
from typing import Final, final

WORKER_VARIABLE: Final = "MARL_COLLECT_WORKER"
"""In a worker's environment: its process id."""

_GRACE_SECONDS: Final = 1.0


@final
class Strays:
    """The orphans that are being ended."""

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}

    def sweep(self, workers: Container[int], *, everything: bool = False) -> bool:
        """End orphans of workers that are no more; never waits.

        Args:
            workers: process ids of the workers that have not ended.
            everything: end all orphans, also those whose origin is not known: a
                forked copy of a worker has not got the worker's variable.

        Returns:
            Whether another sweep is due soon: some have not ended yet, or have just
            done so and may have left us theirs.
        """
        again = False
        for pid in _children():
            if pid in workers:
                continue
            if self._has_ended(pid):
                again = True
                continue
            origin = _origin(pid)
            if everything or (origin is not None and origin not in workers):
                self._end(pid)
        return again or bool(self._kill_at)

    def _has_ended(self, pid: int) -> bool:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        if ended:
            self._kill_at.pop(pid, None)
        return ended

    def _end(self, pid: int) -> None:
        # It is our child and not reaped, so the number is still its own.
        if pid not in self._kill_at:
            self._kill_at[pid] = time.monotonic() + _GRACE_SECONDS
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # A stopped process cannot end.
        elif time.monotonic() >= self._kill_at[pid]:
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return our children; none where the kernel does not list them."""
    me = os.getpid()
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{me}/task/{me}/children").read_text("ascii")
        return [int(pid) for pid in text.split()]
    return []


def _origin(pid: int) -> int | None:
    """Return the process id of the worker that a process comes from."""
    prefix = f"{WORKER_VARIABLE}=".encode()
    with contextlib.suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(prefix):
                return int(entry.removeprefix(prefix))
    return None
