"""What a frame costs a worker beside the environment: 3 agents, 31 floats, random.

The environment is the one that costs nothing; its own time, measured in the same
window, is taken off. Both are the processor time of one thread. So is the time of a
plain loop over the same adapter that copies each frame into memory of its own, and does
nothing else: that much costs anybody who keeps the data.
"""

import statistics
import time
from typing import Any

import torch
from harness.served import System
from harness.windows import Answer, Measure
from limits.drawing import draw_actions
from limits.loops import N_ACTIONS, OurLoop
from limits.stored import StoringLoop
from ours.collectors import collector
from workloads.adapters import our_factory
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
    adapted = our_factory("free")()
    storing = StoringLoop(
        OurLoop(adapted, draw_actions("free")),
        adapted.description.observed(),
        _FRAMES,
    )
    storing.reset(0)

    def stored() -> None:
        for frame in range(_FRAMES):
            storing.step(frame % N_ACTIONS)
        storing.rewind()

    def alone() -> None:
        for _ in range(_FRAMES):
            env.step(nothing)

    def collect() -> None:
        collecting.next()

    collect()

    def measure(seconds: float) -> Answer:
        calls = {"alone": alone, "stored": stored, "all": collect}
        times: dict[str, list[float]] = {name: [] for name in calls}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name, call in calls.items():
                for _ in range(_ROUNDS):
                    begin = time.thread_time()
                    call()
                    seconds_spent = time.thread_time() - begin
                    times[name].append(seconds_spent * 1e6 / _FRAMES)
        alone_us, stored_us, all_us = map(statistics.median, times.values())
        return {
            "env_us": alone_us,
            "frame_us": all_us,
            "framework_us": all_us - alone_us,
            "storing_loop_us": stored_us - alone_us,
        }

    return measure
