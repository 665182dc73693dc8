"""What a step of ParallelEnv costs the trainer, with one environment per process.

Processor time of the trainer per process and step, and how long a step takes at the
median and at the 99th percentile. ``workers`` processes step the free environment.
"""

import time

from harness.served import System
from harness.windows import Answer, Measure
from workloads.adapters import our_factory

from marl_collect.parallel_env.batch import ParallelBatch
from marl_collect.parallel_env.options import ParallelOptions


def build(system: System) -> Measure:
    """Return a measure with microseconds."""
    count = system.workers
    options = ParallelOptions(num_processes=count)
    batch = ParallelBatch([our_factory("free")] * count, options)
    batch.bind(batch.allocate())
    batch.reset(range(count), range(count))

    def measure(seconds: float) -> Answer:
        times: list[float] = []
        cpu, begin = time.process_time(), time.perf_counter()
        now = begin
        while now - begin < seconds:
            batch.step()
            before, now = now, time.perf_counter()
            times.append(now - before)
        cpu = time.process_time() - cpu
        times.sort()
        steps = len(times)
        return {
            "parent_us": cpu * 1e6 / steps / count,
            "step_p50_us": times[steps // 2] * 1e6,
            "step_p99_us": times[int(steps * 0.99)] * 1e6,
        }

    return measure
