"""Groups of environments of a ``ParallelEnv``, with policies of several sizes.

With two groups the policy acts for one while the other steps. It needs a processor of
its own then, so it is also measured with one process less.
"""

import time
from contextlib import ExitStack
from functools import partial

from harness.turns import Alternative

from cases.case import Case, collecting
from marl_collect.collectors import Collector
from marl_collect.envs import PettingZooEnv
from marl_collect.models.policy import make_policy
from marl_collect.parallel_env import ParallelEnv
from marl_collect.parallel_env.cpus import effective_cpus

ENVS = 16
FRAMES = 25
"""Frames of each environment in a batch."""
ROWS = (
    ("mpe/simple_spread_v3", 64),
    ("mpe/simple_spread_v3", 1024),
    ("sisl/multiwalker_v9", 64),
    ("sisl/multiwalker_v9", 2048),
)
"""Tasks, and units of both layers of the policy."""


def cases() -> list[Case]:
    """Return a row per task and policy."""
    return [
        Case(
            f"{task}, {units} units",
            partial(_build, task, units),
            "frame",
            clock=time.perf_counter,
        )
        for task, units in ROWS
    ]


def _build(task: str, units: int, stack: ExitStack) -> dict[str, Alternative]:
    make = partial(PettingZooEnv, task)
    policy = make_policy(make, num_cells=[units, units])
    cpus = effective_cpus()
    alternatives: dict[str, Alternative] = {}
    for groups in (1, 2):
        for spared, name in ((0, "all processors"), (1, "all but one")):
            build = partial(
                ParallelEnv,
                ENVS,
                make,
                num_processes=max(1, min(cpus, ENVS) - spared),
                groups=groups,
            )
            collector = Collector(build, policy, frames_per_batch=ENVS * FRAMES, seed=0)
            stack.callback(collector.shutdown)
            alternatives[f"{name}, groups={groups}"] = collecting(collector)
    return alternatives
