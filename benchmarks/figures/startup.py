"""More workers of a program that has some: until they are ready, and their memory.

``workers`` further ones are started, measured and ended in every window. Their private
memory is compared with what the environment takes by itself, see ``env_memory.py``.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import processes
from harness.served import System
from harness.windows import Answer, Measure
from ours.collectors import collector

_ENV_MEMORY = Path(__file__).resolve().parents[1] / "env_memory.py"
_DEADLINE = 120.0
_PRIVATE = ("Private_Clean", "Private_Dirty")


def build(system: System) -> Measure:
    """Return a measure with seconds and MB."""
    torch.set_num_threads(1)
    preload = tuple(system.options.get("preload", ()))
    environment_mb = _environment_mb(system.workload, preload)
    first = System("", system.workload, "mlp", workers=2)
    idle_collector = collector(first, preload=preload, frames_per_batch=200)
    idle_collector.next()
    larger = System("", system.workload, "mlp", workers=system.workers)

    def measure(seconds: float) -> Answer:
        del seconds
        begin = time.perf_counter()
        new_collector: Any = collector(larger, preload=preload, frames_per_batch=1600)
        ready = time.perf_counter() - begin
        new_collector.next()
        delivered = time.perf_counter() - begin
        sizes = [
            processes.memory_mb([pid], *_PRIVATE) for pid in new_collector.worker_pids
        ]
        begin = time.perf_counter()
        new_collector.shutdown()
        shutdown_seconds = time.perf_counter() - begin
        idle_collector.next()  # Those that were there first have not been disturbed.
        return {
            "ready_seconds": ready,
            "first_batch_seconds": delivered,
            "private_mb": statistics.median(sizes),
            "environment_mb": environment_mb,
            "beyond_mb": statistics.median(sizes) - environment_mb,
            "shutdown_seconds": shutdown_seconds,
        }

    return measure


def _environment_mb(workload: str, preload: Sequence[str]) -> float:
    """Return the private memory that an environment takes by itself, in MB."""
    process = subprocess.run(
        [sys.executable, str(_ENV_MEMORY), workload, *preload],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_DEADLINE,
    )
    return max(0.0, float(process.stdout.split()[-1]))
