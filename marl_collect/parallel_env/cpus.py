"""The processors that this process may use: how many, and pinning workers to them."""

import math
import os
from contextlib import suppress

from marl_collect.processes.cgroups import cpu_quotas


def effective_cpus() -> int:
    """Return the number of processors that this process may use, at least 1.

    The smaller of its affinity and the tightest quota of its control group and the
    groups around it (version 2: ``cpu.max``; version 1: ``cpu.cfs_quota_us``).
    Fractions are rounded up.
    """
    quotas = [math.ceil(quota) for quota in cpu_quotas()]
    return max(1, min([_allowed(), *quotas]))


def is_rationed() -> bool:
    """Return whether a control group has a CPU quota below our number of processors."""
    return any(quota < _allowed() for quota in cpu_quotas())


def _allowed() -> int:
    return len(affinity()) or os.cpu_count() or 1


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
