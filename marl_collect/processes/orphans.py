"""Processes that workers have started and left behind, such as a game's binary.

The kernel gives the orphans of a worker to the fork server, its nearest living
"subreaper". The server finds out whose they were by a variable that every
worker has in its environment. Programs inherit it. Forked copies of a worker, such
as processes of ``multiprocessing``, inherit the memory in which the kernel shows the
environment that a process was started with: the worker writes its number there.

Those of a worker that has ended get SIGTERM, and SIGKILL a second later: some, like
the resource tracker of ``multiprocessing``, have something to clean up themselves.

Source:
    prctl(2), PR_SET_CHILD_SUBREAPER; proc(5), /proc/<pid>/task/<tid>/children and
    /proc/<pid>/environ.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Container
from pathlib import Path
from typing import Final, Self, final

WORKER_VARIABLE: Final = "MARL_COLLECT_WORKER"
"""In a worker's environment: its process id."""

_DIGITS: Final = 10
_GRACE_SECONDS: Final = 1.0


def room_for_mark() -> dict[str, str]:
    """Return the variable with which the fork server is started.

    It has room for the number of each worker, and says until then whose program the
    server itself is: 0 for nobody's.
    """
    return {WORKER_VARIABLE: _written(int(os.environ.get(WORKER_VARIABLE, "0")))}


@final
class Mark:
    """Where the environment that this process was started with has the variable."""

    def __init__(self, address: int | None) -> None:
        self._address = address

    @classmethod
    def reserved(cls) -> Self:
        """Find the place; must be called before anything changes the variable."""
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        return cls(libc.getenv(WORKER_VARIABLE.encode()))

    def write(self, worker: int) -> None:
        """Let this process, and all forks of it, be known as the worker's."""
        # A library that sets the title of the process may have taken the place.
        if self._address is not None:
            found = ctypes.string_at(self._address, _DIGITS)
            if found.isdigit():
                ctypes.memmove(self._address, _written(worker).encode(), _DIGITS)


@final
class Orphans:
    """The orphans that are being ended."""

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}

    def sweep(self, workers: Container[int], *, everything: bool = False) -> bool:
        """End orphans of workers that are no more; never waits.

        Args:
            workers: process ids of the workers that have not ended.
            everything: end all orphans, also those whose origin is not known, such
                as programs that were started with an environment of their own.

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
    """Return the process id of the worker that a process comes from, if it is known."""
    prefix = f"{WORKER_VARIABLE}=".encode()
    with contextlib.suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(prefix):
                return int(entry.removeprefix(prefix)) or None
    return None


def _written(worker: int) -> str:
    return f"{worker:0{_DIGITS}d}"
