"""The processes of a system, found by a mark in their environment variables.

Children inherit the mark however they are started, also through a fork server or a
session of their own, so that nobody's CPU time, memory or end is overlooked.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "MARL_BENCHMARK_SYSTEM"
_TICKS = os.sysconf("SC_CLK_TCK")


def find(mark: str) -> list[int]:
    """Return the ids of all processes that carry the mark."""
    marker = f"{VARIABLE}={mark}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time that these have used so far, in seconds."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
            fields = stat.rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def memory_mb(pids: Iterable[int]) -> float:
    """Return the sum of their proportional set sizes, in MB."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
            rows = [line.split() for line in text.splitlines()[1:]]
            total += sum(int(r[1]) for r in rows if r[0] == "Pss:")
    return total / 1000


def send(mark: str, number: signal.Signals) -> None:
    """Send a signal to all processes of the mark."""
    for pid in find(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def kill(mark: str) -> None:
    """Kill all processes of the mark, also those that are started meanwhile."""
    for _ in range(10):
        if not find(mark):
            return
        send(mark, signal.SIGKILL)
