"""A processor for each worker, where there are just as many of both."""

import os
from contextlib import suppress

from marl_collect.parallel_env.cpus import is_rationed


def affinity() -> frozenset[int]:
    """Return the processors that this thread may run on; none where nobody says."""
    with suppress(AttributeError, OSError):
        return frozenset(os.sched_getaffinity(0))
    return frozenset()


def pin(worker: int, workers: int, before: frozenset[int]) -> bool:
    """Keep this thread to one processor if there is one for each worker.

    A trainer that looks whether workers are done seems as busy to the scheduler as they
    are. It then may leave one processor to the trainer and have two workers share
    another, for as long as this goes on. Threads and processes that this thread starts
    from now on stay on that processor too.

    Not where a control group rations processor time: then the processors are others'
    too. Nor where the system has no affinities, or a sandbox forbids to set them.

    Args:
        worker: index.
        workers: how many there are.
        before: `affinity` before environments were built. If one of them has chosen
            other processors, that stays.

    Returns:
        Whether it is pinned.
    """
    allowed = affinity()
    if workers < 2 or len(allowed) != workers or allowed != before or is_rationed():
        return False
    with suppress(OSError):
        os.sched_setaffinity(0, {sorted(allowed)[worker]})
        return True
    return False
