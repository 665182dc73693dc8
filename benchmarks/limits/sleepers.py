"""Runner: processes that only sleep: what many workers on few cores could reach.

With ``options["barrier"]`` they meet after every 100 steps, as the workers of a
synchronous collector must; without, nobody waits for anybody.
"""

import multiprocessing as mp  # noqa: TID251 - without a framework is the point
import time
from collections.abc import Callable
from time import sleep  # noqa: TID251 - pausing is what is measured
from typing import Any

from harness.served import System
from harness.windows import Answer, Measure, measure_parts
from workloads.sleeping import pauses, sleep_precisely

STEPS = 100
_HOUR = 3600.0


def build(system: System) -> Measure:
    """Start the processes and return what measures them."""
    context = mp.get_context("fork")
    barrier = context.Barrier(system.workers + 1) if _meet(system) else None
    counts = context.RawArray("q", system.workers * 8)  # a cache line for each
    for worker in range(system.workers):
        arguments = (worker, system.options["cv"], barrier, counts)
        context.Process(target=_work, args=arguments, daemon=True).start()
    if barrier is None:
        return _measure_counts(counts, system.workers)

    def part() -> tuple[int, int, bool]:
        barrier.wait(_HOUR)
        barrier.wait(_HOUR)
        return system.workers * STEPS, 0, False

    return measure_parts(part)


def _meet(system: System) -> bool:
    return bool(system.options["barrier"])


def _work(worker: int, cv: float, barrier: Any, counts: Any) -> None:
    sleep_precisely()
    step = _stepper(worker, cv, counts)
    while True:
        if barrier is not None:
            barrier.wait(_HOUR)
        for _ in range(STEPS):
            step()
        if barrier is not None:
            barrier.wait(_HOUR)


def _stepper(worker: int, cv: float, counts: Any) -> Callable[[], None]:
    durations = pauses(worker, cv)
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        sleep(durations[n_steps % len(durations)])
        n_steps += 1
        counts[worker * 8] = n_steps

    return step


def _measure_counts(counts: Any, workers: int) -> Measure:
    def total() -> int:
        return sum(counts[worker * 8] for worker in range(workers))

    def measure(seconds: float) -> Answer:
        before, begin = total(), time.perf_counter()
        sleep(seconds)
        frames, elapsed = total() - before, time.perf_counter() - begin
        return {"frames": frames, "seconds": elapsed, "rate": frames / elapsed}

    return measure
