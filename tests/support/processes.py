"""Waits for what other processes do."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

SOON = 60.0
"""Seconds; far more than any wait takes on a busy machine. Only a defect reaches it."""

PATIENCE = 250
"""Seconds for what takes Ray ten on an idle machine. Only a defect reaches it."""


def gone(pid: int) -> bool:
    """Return whether a process has ended; it may still be in the process table."""
    return _state(pid) in (None, "Z")


def suspend(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until it has stopped.

    Until then it goes on, and may end of another signal.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state(pid) == "T", f"process {pid} goes on")


def wait_until(
    condition: Callable[[], bool],
    problem: str = "it did not happen",
    seconds: float = SOON,
) -> None:
    """Wait for a condition; fail with ``problem`` after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, problem
        Event().wait(0.005)


def _state(pid: int) -> str | None:
    """Return the letter of the kernel for a process, or None if there is no such."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[0]


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until processes have ended."""
    for pid in pids:
        wait_until(partial(gone, pid), f"process {pid} is left")


def left(session: int = -1, mark: str = "") -> set[int]:
    """Return the processes of a session, and those with a variable, that go on.

    Args:
        session: process id of its leader.
        mark: a variable of the environment with its value, ``NAME=VALUE``.
    """
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        # One that has ended, or is somebody else's, cannot be read.
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_marked = bool(mark) and mark.encode() in variables
            if fields[0] != "Z" and (int(fields[3]) == session or is_marked):
                pids.add(int(folder.name))
    return pids
