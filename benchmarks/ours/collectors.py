"""Our collectors: ``options["kind"]`` is sync or parallel.

Further options: ``frames_per_batch``; ``prefetch``; ``environments``, of a ParallelEnv
or over all workers; ``processes`` and ``groups`` of a ParallelEnv; ``environment``,
keywords of the workload.
"""

from typing import Any

import torch
from harness.served import System
from harness.windows import Measure
from workloads.adapters import our_factory
from workloads.policies import policy

from marl_collect import Collector, MultiSyncCollector, ParallelEnv, SerialEnv
from ours.batches import measure_batches


def build(system: System) -> Measure:
    """Start the collector and return what measures it."""
    torch.set_num_threads(1)
    prefetch = bool(system.options.get("prefetch"))
    return measure_batches(iter(_collector(system, prefetch=prefetch)), int(prefetch))


def _collector(system: System, *, prefetch: bool) -> Any:
    options = system.options
    make = our_factory(system.workload, options.get("environment", {}))
    acting = policy(system.workload, system.policy)
    frames = options.get("frames_per_batch", 1000)
    if options.get("kind", "sync") == "sync":
        share = system.shares(system.workers)
        factory = make if share == 1 else lambda: SerialEnv(share, make)
        return MultiSyncCollector(
            [factory] * system.workers,
            acting,
            frames_per_batch=frames,
            prefetch=prefetch,
            seed=0,
        )
    environments = options.get("environments", system.workers)
    processes = options.get("processes", min(system.workers, environments))
    groups = options.get("groups", 1)
    return Collector(
        lambda: ParallelEnv(environments, make, num_processes=processes, groups=groups),
        acting,
        frames_per_batch=frames,
        seed=0,
    )
