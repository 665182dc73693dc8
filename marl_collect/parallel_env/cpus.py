"""The processors that this process may use: how many, and pinning workers to them."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def effective_cpus(proc: Path = _PROC, mount: Path = _MOUNT) -> int:
    """Return the number of processors that this process may use, at least 1.

    The smaller of its affinity and the tightest quota of its control group and the
    groups around it (version 2: ``cpu.max``; version 1: ``cpu.cfs_quota_us``).
    Fractions are rounded up.

    Args:
        proc: file that names the process's control groups.
        mount: folder where they are mounted.
    """
    quotas = [math.ceil(quota) for quota in _quotas(proc, mount)]
    return max(1, min([_allowed(), *quotas]))


def is_rationed(proc: Path = _PROC, mount: Path = _MOUNT) -> bool:
    """Return whether a control group grants less than the full time of our processors.

    Args:
        proc: see ``effective_cpus``.
        mount: see ``effective_cpus``.
    """
    return any(quota < _allowed() for quota in _quotas(proc, mount))


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(proc: Path, mount: Path) -> Iterator[float]:
    lines: list[str] = []
    with suppress(OSError):
        lines = proc.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _of_version_2(mount, path)
        elif "cpu" in controllers.split(","):
            yield from _of_version_1(mount / "cpu", path)


def _of_version_2(mount: Path, path: str) -> Iterator[float]:
    for folder in _upwards(mount, path):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                yield int(quota) / int(period)


def _of_version_1(mount: Path, path: str) -> Iterator[float]:
    for folder in _upwards(mount, path):
        with suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                yield quota / int((folder / "cpu.cfs_period_us").read_text())


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents, up to the mount itself."""
    folder = mount / path.lstrip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def affinity() -> frozenset[int]:
    """Return the processors that this thread may run on; empty if unknown."""
    with suppress(AttributeError, OSError):
        return frozenset(os.sched_getaffinity(0))
    return frozenset()


def pin(worker: int, workers: int, before: frozenset[int]) -> bool:
    """Pin this thread to one processor if there is one for each worker.

    A trainer that spins looks as busy to the scheduler as its workers. The scheduler
    may then give one processor to the trainer and let two workers share another.
    Threads and processes that this thread starts later are pinned to the same
    processor.

    Nothing is pinned if a control group limits processor time, because the processors
    are then shared with other groups, or if affinities are not supported or allowed.

    Args:
        worker: index of the worker.
        workers: number of workers.
        before: ``affinity`` before environments were built. If an environment has
            changed it, its choice is kept.

    Returns:
        Whether the thread was pinned.
    """
    allowed = affinity()
    if workers < 2 or len(allowed) != workers or allowed != before or is_rationed():
        return False
    with suppress(OSError):
        os.sched_setaffinity(0, {sorted(allowed)[worker]})
        return True
    return False
