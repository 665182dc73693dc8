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
    own = _environment_mb(system.workload, preload)
    first = System("", system.workload, "mlp", workers=2)
    held = collector(first, preload=preload, frames_per_batch=200)
    held.next()
    more = System("", system.workload, "mlp", workers=system.workers)

    def measure(seconds: float) -> Answer:
        del seconds
        begin = time.perf_counter()
        started: Any = collector(more, preload=preload, frames_per_batch=1600)
        ready = time.perf_counter() - begin
        started.next()
        delivered = time.perf_counter() - begin
        sizes = [processes.memory_mb([pid], *_PRIVATE) for pid in started.worker_pids]
        begin = time.perf_counter()
        started.shutdown()
        ended = time.perf_counter() - begin
        held.next()  # Those that were there first have not been disturbed.
        return {
            "ready_seconds": ready,
            "first_batch_seconds": delivered,
            "private_mb": statistics.median(sizes),
            "environment_mb": own,
            "beyond_mb": statistics.median(sizes) - own,
            "shutdown_seconds": ended,
        }

    return measure


def _environment_mb(workload: str, preload: Sequence[str]) -> float:
    """Return the private memory that an environment takes by itself, in MB."""
    found = subprocess.run(
        [sys.executable, str(_ENV_MEMORY), workload, *preload],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_DEADLINE,
    )
    return max(0.0, float(found.stdout.split()[-1]))
