"""What a frame costs a worker beside the environment: 3 agents, 31 floats, random.

The environment is the one that costs nothing; its own time, measured in the same
window, is taken off. Both are the processor time of one thread.
"""

import time
from typing import Any

import torch
from harness.served import System
from harness.windows import Answer, Measure
from ours.collectors import collector
from workloads.table import WORKLOADS

_FRAMES = 1000
_ROUNDS = 5


def build(system: System) -> Measure:
    """Return a measure with microseconds per frame."""
    torch.set_num_threads(1)
    env = WORKLOADS["free"].stock()
    env.reset()
    nothing: dict[str, Any] = {}
    collecting = collector(
        System("", "free", "random", options={"kind": "single"}),
        frames_per_batch=_FRAMES,
    )
    del system

    def alone() -> None:
        for _ in range(_FRAMES):
            env.step(nothing)

    def collect() -> None:
        collecting.next()

    collect()

    def measure(seconds: float) -> Answer:
        found: dict[str, list[float]] = {"alone": [], "all": []}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name, call in (("alone", alone), ("all", collect)):
                for _ in range(_ROUNDS):
                    begin = time.thread_time()
                    call()
                    spent = time.thread_time() - begin
                    found[name].append(spent * 1e6 / _FRAMES)
        alone_us, all_us = (sorted(v)[len(v) // 2] for v in found.values())
        return {
            "env_us": alone_us,
            "frame_us": all_us,
            "framework_us": all_us - alone_us,
        }

    return measure
