"""Until ``kill -9`` of a worker is an exception, and until everything has ended."""

import os
import signal
import time

import torch
from harness.served import System
from harness.windows import Answer, Measure
from ours.collectors import collector

from marl_collect import WorkerError


def build(system: System) -> Measure:
    """Return a measure with seconds."""
    torch.set_num_threads(1)
    collecting = System("", system.workload, "random", workers=system.workers)

    def measure(seconds: float) -> Answer:
        del seconds
        broken_collector = collector(collecting)
        broken_collector.next()
        begin = time.perf_counter()
        os.kill(broken_collector.worker_pids[0], signal.SIGKILL)
        try:
            while True:
                broken_collector.next()
        except WorkerError:
            noticed = time.perf_counter() - begin
        closed_collector = collector(collecting)
        closed_collector.next()
        begin = time.perf_counter()
        closed_collector.shutdown()
        return {
            "notice_kill_seconds": noticed,
            "shutdown_seconds": time.perf_counter() - begin,
        }

    return measure
