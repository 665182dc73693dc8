"""A processor for each worker, where there are just as many of both."""

import os

from marl_collect.parallel_env.cpus import is_rationed


def pin(worker: int, workers: int) -> bool:
    """Keep this thread to one processor if there is one for each worker.

    A trainer that looks whether workers are done seems as busy to the scheduler as they
    are. It then may leave one processor to the trainer and have two workers share
    another, for as long as this goes on. What the thread starts later stays there too.

    Not where a worker's threads were told to run elsewhere, where a control group
    rations processor time (then the processors are others' too), nor on systems without
    affinities.

    Args:
        worker: index.
        workers: how many there are.

    Returns:
        Whether it is pinned.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) != workers or workers == 1 or is_rationed():
        return False
    os.sched_setaffinity(0, {allowed[worker]})
    return True
