"""More workers of a program that has some: until they are ready, and their memory.

``workers`` further ones are started, measured and ended in every window. Their private
memory is compared with what the environment takes by itself, which is measured in a
fork of a process that has imported what the workers share.
"""

import importlib
import os
import statistics
import time
from typing import Any

import torch
from harness import processes
from harness.served import System
from harness.windows import Answer, Measure
from ours.collectors import collector
from workloads.adapters import our_factory

from marl_collect.description import allocate

_PRIVATE = ("Private_Clean", "Private_Dirty")


def build(system: System) -> Measure:
    """Return a measure with seconds and MB."""
    torch.set_num_threads(1)
    preload = tuple(system.options.get("preload", ()))
    for name in preload:
        importlib.import_module(name)
    own = _environment_mb(system.workload)
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


def _environment_mb(workload: str) -> float:
    """Return the private memory that an environment takes by itself, in MB."""
    make = our_factory(workload)
    make().close()  # Imports everything, as the fork server has.
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        before = processes.memory_mb([os.getpid()], *_PRIVATE)
        env = make()
        row = allocate(env.description.row())
        env.bind(row)
        env.reset_row(0)
        for _ in range(20):
            if row["done",][0]:
                env.reset_row(1)
            env.step_row()
        after = processes.memory_mb([os.getpid()], *_PRIVATE)
        os.write(sending, str(after - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(receiving, 100)
    os.close(receiving)
    os.close(sending)
    return max(0.0, float(text))
