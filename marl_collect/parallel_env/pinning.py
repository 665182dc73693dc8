"""Pins each worker to a processor if there are exactly as many of both."""

import os
from contextlib import suppress

from marl_collect.parallel_env.cpus import is_rationed


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
