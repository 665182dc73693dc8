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
        killed = collector(collecting)
        killed.next()
        begin = time.perf_counter()
        os.kill(killed.worker_pids[0], signal.SIGKILL)
        try:
            while True:
                killed.next()
        except WorkerError:
            noticed = time.perf_counter() - begin
        ended = collector(collecting)
        ended.next()
        begin = time.perf_counter()
        ended.shutdown()
        return {
            "notice_kill_seconds": noticed,
            "shutdown_seconds": time.perf_counter() - begin,
        }

    return measure
