"""What a step of ParallelEnv costs the trainer, with one environment per process.

Processor time of the trainer per process and step, and how long a step takes at the
median and at the 99th percentile. ``workers`` processes step the free environment.
Beside it stands what as many processes cost that only wake, in the same window.
"""

import statistics
import time
from collections.abc import Callable

from harness.served import System
from harness.windows import Answer, Measure
from limits.posting import Posting
from workloads.adapters import our_factory

from marl_collect.parallel_env.batch import ParallelBatch
from marl_collect.parallel_env.options import ParallelOptions

_TURNS = 4


def build(system: System) -> Measure:
    """Return a measure with microseconds."""
    count = system.workers
    bare = Posting(count)  # Forked first, from a process without threads.
    options = ParallelOptions(num_processes=count)
    batch = ParallelBatch.start([our_factory("free")] * count, options)
    batch.bind(batch.allocate())
    batch.reset(range(count), range(count))

    def measure(seconds: float) -> Answer:
        cpu = alone_cpu = 0.0
        times: list[float] = []
        alone_seconds: list[float] = []
        for _ in range(_TURNS):
            cpu += _steps(batch.step, seconds / 2 / _TURNS, times)
            alone_cpu += _steps(bare.step, seconds / 2 / _TURNS, alone_seconds)
        times.sort()
        steps = len(times)
        return {
            "parent_us": cpu * 1e6 / steps / count,
            "step_p50_us": times[steps // 2] * 1e6,
            "step_p99_us": times[int(steps * 0.99)] * 1e6,
            "wake_ups_alone_us": alone_cpu * 1e6 / len(alone_seconds) / count,
            "wake_ups_alone_p50_us": statistics.median(alone_seconds) * 1e6,
        }

    return measure


def _steps(step: Callable[[], None], seconds: float, times: list[float]) -> float:
    """Step for so long, note each step's time, and return processor seconds."""
    cpu, begin = time.process_time(), time.perf_counter()
    end = begin
    while end - begin < seconds:
        step()
        before, end = end, time.perf_counter()
        times.append(end - before)
    return time.process_time() - cpu
