"""TorchRL's collectors: ``options["kind"]`` is sync, async or parallel.

``options["keywords"]`` goes to the collector; ``frames_per_batch``, ``environments``
and ``processes`` are as for ours.
"""

from typing import Any

import torch
from harness.served import System
from harness.windows import Measure
from ours.batches import measure_batches
from workloads.adapters import torchrl_factory
from workloads.policies import policy

_WORKERS: dict[str, Any] = {"num_threads": 1, "trust_policy": True}
CANDIDATES: dict[str, dict[str, Any]] = {
    "sync, stack": {"kind": "sync", "keywords": {"cat_results": "stack"} | _WORKERS},
    "sync, cat": {"kind": "sync", "keywords": {"cat_results": -1} | _WORKERS},
    "sync, no buffers": {
        "kind": "sync",
        "keywords": {"cat_results": "stack", "use_buffers": False} | _WORKERS,
    },
    "async": {"kind": "async", "keywords": _WORKERS},
    "async, small batches": {
        "kind": "async",
        "frames_per_batch": 200,
        "keywords": _WORKERS,
    },
    "ParallelEnv": {
        "kind": "parallel",
        "frames_per_batch": 200,
        "keywords": {"trust_policy": True},
    },
}
"""The grid that its best configuration is found in."""


def build(system: System) -> Measure:
    """Start the collector and return what measures it."""
    from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
    from torchrl.envs import ParallelEnv, SerialEnv

    torch.set_num_threads(1)
    system_options = system.options
    make = torchrl_factory(system.workload)
    acting = policy(system.workload, system.policy)
    options = {
        "frames_per_batch": system_options.get("frames_per_batch", 1000),
        "total_frames": -1,
        **system_options.get("keywords", {}),
    }
    if system_options["kind"] == "parallel":
        count = system_options.get("environments", system.workers)
        processes = system_options.get("processes", count)
        share = system.shares(processes)
        env = ParallelEnv(
            processes, make if share == 1 else lambda: SerialEnv(share, make)
        )
        acting = acting or _random(env)
        collector = Collector(env, acting, no_cuda_sync=True, **options)
        return measure_batches(iter(collector))
    if acting is None:
        env = make()
        acting = _random(env)
        env.close()
    kinds = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
    collector = kinds[system_options["kind"]](
        [make] * system.workers, acting, **options
    )
    return measure_batches(iter(collector))


def _random(env: Any) -> Any:
    """Return TorchRL's own random policy: its collectors take no None."""
    from torchrl.envs.utils import RandomPolicy

    return RandomPolicy(env.full_action_spec)
