"""Our collectors: ``options["kind"]`` is sync, async, parallel or single.

Further options: ``frames_per_batch``; ``prefetch``; ``environments``, of a ParallelEnv
or over all workers; ``processes`` and ``groups`` of a ParallelEnv; ``environment``,
keywords of the workload; ``each``, whether they get their worker's number, and are
counted by steps if ``async``.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from harness.served import System
from harness.windows import Answer, Measure
from workloads.adapters import our_factory
from workloads.policies import policy

from marl_collect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    ParallelEnv,
    SerialEnv,
)
from ours.batches import measure_batches


def build(system: System) -> Measure:
    """Start the collector and return what measures it."""
    torch.set_num_threads(1)
    ahead = 1 if system.options.get("prefetch") else 0
    collecting = collector(system)
    measure = measure_batches(iter(collecting), ahead)
    if system.options.get("each") and system.options.get("kind") == "async":
        return counting_steps(measure, collecting.steps_so_far)
    return measure


def counting_steps(measure: Measure, steps: Callable[[], int]) -> Measure:
    """Return a measure of all steps of a window, batches in the making included.

    Many workers that take as long for a batch deliver nearly at the same time: whether
    a window has one such wave more or less would decide about its rate.
    """

    def counted(seconds: float) -> Answer:
        before, begin = steps(), time.perf_counter()
        result = measure(seconds)
        frames, elapsed = steps() - before, time.perf_counter() - begin
        step_result = {"frames": frames, "seconds": elapsed, "rate": frames / elapsed}
        return result | step_result | {"rate_of_batches": result["rate"]}

    return counted


def collector(system: System, **options: Any) -> Any:
    """Build the collector that a system describes, with further options of it."""
    system_options = system.options
    kind = system_options.get("kind", "sync")
    frames = system_options.get("frames_per_batch", 1000)
    acting = policy(system.workload, system.policy, "ours")
    options = {"frames_per_batch": frames, "seed": 0} | options
    if kind == "parallel":
        environments = system_options.get("environments", system.workers)
        processes = system_options.get("processes", min(system.workers, environments))
        groups = system_options.get("groups", 1)
        make = our_factory(system.workload, system_options.get("environment", {}))
        return Collector(
            lambda: ParallelEnv(
                environments, make, num_processes=processes, groups=groups
            ),
            acting,
            **options,
        )
    if kind == "single":
        return Collector(factories(system)[0], acting, **options)
    cls = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}[kind]
    options |= {"prefetch": True} if system_options.get("prefetch") else {}
    return cls(factories(system), acting, **options)


def factories(system: System) -> list[Callable[[], Any]]:
    """Return a factory per worker."""
    keywords = dict(system.options.get("environment", {}))
    if not system.options.get("each"):
        make = our_factory(system.workload, keywords)
        share = system.shares(system.workers)
        return [make if share == 1 else lambda: SerialEnv(share, make)] * system.workers
    return [
        our_factory(system.workload, keywords | {"worker": worker})
        for worker in range(system.workers)
    ]
