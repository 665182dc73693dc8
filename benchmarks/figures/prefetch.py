"""Collecting in one worker while a one-thread learner works.

In one window the same number of batches is collected only, learned from only, and both
at once with ``prefetch=True``. The learner takes as many gradient steps per batch as
fill the time that a batch takes to collect, so that neither hides the other.
"""

import time
from typing import Any

import torch
from harness.served import System
from harness.windows import Answer, Measure
from ours.collectors import collector
from torch import nn

_FRAMES = 500


def build(system: System) -> Measure:
    """Return a measure with seconds per batch."""
    torch.set_num_threads(1)
    one_worker = System("", system.workload, "mlp", workers=1)
    plain = collector(one_worker, frames_per_batch=_FRAMES)
    ahead = collector(one_worker, frames_per_batch=_FRAMES, prefetch=True)
    learner = Learner(plain.next())
    for _ in range(2):
        plain.next()
        ahead.next()
    batch_seconds = _seconds(plain.next)
    steps = max(1, round(batch_seconds / _seconds(learner.step)))

    def learn() -> None:
        for _ in range(steps):
            learner.step()

    def both() -> None:
        ahead.next()
        learn()

    def measure(seconds: float) -> Answer:
        count = max(3, round(seconds / 3 / batch_seconds))
        # What was collected ahead before the window does not count.
        ahead.next()
        timings = {
            name: _seconds(call, count)
            for name, call in (("collect", plain.next), ("learn", learn))
        }
        both()
        timings["both"] = _seconds(both, count)
        timings["ratio"] = timings["both"] / max(timings["collect"], timings["learn"])
        return timings | {"batches": count}

    return measure


class Learner:
    """Fits a network to the rewards of a batch, one gradient step at a time."""

    def __init__(self, batch: Any) -> None:
        """Take the batch to learn from."""
        (group,) = {key[0] for key in batch.keys(True) if key[-1] == "action"}
        self._inputs = batch[group, "observation"].clone()
        self._targets = batch["next", group, "reward"].clone()
        size = self._inputs.shape[-1]
        self._net = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 1))
        self._optimiser = torch.optim.Adam(self._net.parameters())

    def step(self) -> None:
        """Take one gradient step."""
        loss = (self._net(self._inputs) - self._targets).square().mean()
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()


def _seconds(call: Any, count: int = 3) -> float:
    call()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count
