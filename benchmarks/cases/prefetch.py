"""Processor time of a worker that collects ahead, and of one that waits.

A worker that collects ahead must be able to return the state before its rollout, if a
checkpoint is saved meanwhile. Episodes have 1,000 frames, which is what a state holds
of them. Actions are random, so nothing else takes much time.
"""

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness.turns import Alternative

from cases.case import Case
from cases.worlds import ENDS, FreeWorlds
from marl_collect.collectors import MultiSyncCollector
from marl_collect.core.batched import BatchedEnv

SIZES = ((1, 100), (1, 1000), (64, 16), (64, 100), (4096, 16), (4096, 100))
"""Numbers of worlds and of frames of each in a batch."""
BATCHES = 8
"""Batches of a call."""


def cases() -> list[Case]:
    """Return a row per size."""
    return [
        Case(f"{k} worlds, {t} frames", partial(_build, k, t), "batch", "ms", _clock)
        for k, t in SIZES
    ]


_WORKERS: set[int] = set()


def _clock() -> float:
    """Return the processor time that all workers have used, in seconds."""
    files = (Path(f"/proc/{pid}/schedstat").read_text() for pid in _WORKERS)
    return sum(int(text.split()[0]) for text in files) * 1e-9


def _build(worlds: int, frames: int, stack: ExitStack) -> dict[str, Alternative]:
    def make() -> BatchedEnv:
        return FreeWorlds(worlds, ENDS[2], period=1000)

    alternatives: dict[str, Alternative] = {}
    for name, prefetch in (("waiting", False), ("prefetch=True", True)):
        collector: Any = MultiSyncCollector(
            [make], frames_per_batch=worlds * frames, prefetch=prefetch, seed=0
        )
        stack.callback(collector.shutdown)
        (pid,) = collector.worker_pids
        _WORKERS.add(pid)
        stack.callback(_WORKERS.discard, pid)
        for _ in range(1000 // frames):  # Until its episodes have many actions.
            collector.next()
        alternatives[name] = Alternative(partial(_collect, collector, pid))
    return alternatives


def _collect(collector: Any, pid: int) -> float:
    for _ in range(BATCHES):
        collector.next()
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()  # The batch ahead belongs to this call, too.
    return float(BATCHES)
