"""Ends orphans: processes that an ended worker started, such as a game's binary.

The kernel reparents the orphans of a worker to the fork server, the nearest living
"subreaper". The server identifies their worker by an environment variable that every
worker sets. Programs inherit the variable. Forked copies of a worker, such as processes
of ``multiprocessing``, inherit the memory that /proc shows as a process's initial
environment, so the worker writes its process id there.

Orphans of a worker that has ended get SIGTERM, and SIGKILL a second later. Some, such
as the resource tracker of ``multiprocessing``, have cleanup of their own.

The environment of a process that is just starting a program is empty, so its worker is
not known yet. The search therefore goes on for some seconds after a worker has ended.

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
from typing import Final, final

from marl_collect.processes import linux

WORKER_VARIABLE: Final = "MARL_COLLECT_WORKER"
"""In a worker's environment: its process id."""

_DIGITS: Final = 10
_GRACE_SECONDS: Final = 1.0
_SEARCH_SECONDS: Final = 5.0  # Loading a program can take long on a busy machine.


def room_for_mark() -> dict[str, str]:
    """Return the environment variable to start the fork server with.

    Its value has room for any process id. Until a worker overwrites it, it names the
    worker that the server itself belongs to, or 0.
    """
    return {WORKER_VARIABLE: _written(int(os.environ.get(WORKER_VARIABLE, "0")))}


def address_of_mark() -> int | None:
    """Return where this process's initial environment has the variable's value.

    Call this before anything changes the variable.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    return libc.getenv(WORKER_VARIABLE.encode())


def write_mark(address: int | None, worker: int) -> None:
    """Mark this process and its future forks as belonging to ``worker``."""
    # A library that sets the process title may have overwritten it.
    if address is not None and ctypes.string_at(address, _DIGITS).isdigit():
        ctypes.memmove(address, _written(worker).encode(), _DIGITS)


@final
class Orphans:
    """The orphans that are being ended."""

    def __init__(self) -> None:
        self._kill_at: dict[int, float] = {}
        self._search_until = 0.0

    def worker_ended(self) -> None:
        """Search for orphans from now on; call ``sweep`` next."""
        self._search_until = time.monotonic() + _SEARCH_SECONDS

    def sweep(self, workers: Container[int], *, everything: bool = False) -> bool:
        """End orphans of workers that have ended; never blocks.

        Args:
            workers: process ids of the workers that still run.
            everything: end all orphans, including processes of unknown origin, such as
                programs that were started with their own environment.

        Returns:
            Whether another sweep is needed soon: some orphans have not ended yet, have
            just ended and may have left orphans of their own, or may not be known yet.
        """
        again = not everything and time.monotonic() < self._search_until
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
        # It is our child and not reaped, so the pid cannot have been reused.
        if pid not in self._kill_at:
            self._kill_at[pid] = time.monotonic() + _GRACE_SECONDS
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # A stopped process cannot end.
        elif time.monotonic() >= self._kill_at[pid]:
            os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Return our children; none if the kernel does not list them."""
    me = os.getpid()
    folder = linux.folder_of(me)
    if folder is not None:
        with contextlib.suppress(OSError):
            text = (folder / "task" / str(me) / "children").read_text("ascii")
            return [int(pid) for pid in text.split()]
    return []


def _origin(pid: int) -> int | None:
    """Return the process id of the worker that started a process, if known."""
    prefix = f"{WORKER_VARIABLE}=".encode()
    with contextlib.suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(prefix):
                return int(entry.removeprefix(prefix)) or None
    return None


def _written(worker: int) -> str:
    return f"{worker:0{_DIGITS}d}"
