"""An update of 76,000 parameters: publishing, pulling, and whether a set is ever torn.

Publishing is the collector's own ``update_policy_weights_``; pulling is what a worker
does when it is told to use a new version. Beside them stands the copy of the same
tensors alone, which is less than any way of publishing them can take. All three come
after the others have written and read vectors of their own, so that caches are as cold
as after a step of an optimiser. For tearing, all parameters of a policy are
one number, which is changed as often as possible while workers act; frames carry the
least and the greatest of them.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from harness.served import System
from harness.windows import Answer, Measure
from numpy.typing import NDArray
from tensordict.nn import TensorDictModule
from torch import nn
from workloads.adapters import our_factory

from marl_collect import MultiAsyncCollector
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.shared import WeightPublisher, WeightReader


class Constant(nn.Module):
    """A network of 76,040 parameters that shows whether all are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(31, 256), nn.Linear(256, 256), nn.Linear(256, 8)
        )

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions, and the extremes of the parameters."""
        weights = torch.cat([p.flatten() for p in self.layers.parameters()])
        extremes = torch.stack([weights.min(), weights.max()])
        leading = observation.shape[:-2]
        actions = torch.zeros(*observation.shape[:-1], 4)
        return actions, extremes.expand(*leading, 2)


def build(system: System) -> Measure:
    """Return a measure with microseconds and the number of torn sets."""
    torch.set_num_threads(1)
    module = Constant()
    policy = TensorDictModule(
        module, [("agent", "observation")], [("agent", "action"), "extremes"]
    )
    tensors = dict(policy.named_parameters())
    _fill(module, 0.0)
    collector: Any = MultiAsyncCollector(
        [our_factory("free")] * system.workers, policy, frames_per_batch=100, seed=0
    )
    batches = iter(collector)
    next(batches)
    layout = WeightLayout.plan(tensors)
    publisher = WeightPublisher(layout)
    reader = WeightReader(
        publisher.handle, torch.zeros(layout.nbytes, dtype=torch.uint8)
    )
    sources = [tensor.detach().numpy() for tensor in tensors.values()]
    copies = [[np.empty_like(source) for source in sources] for _ in range(2)]
    version = 0

    def copy(targets: Sequence[NDArray[np.float32]]) -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    def torn(count: int) -> int:
        nonlocal version
        n_torn = 0
        for _ in range(count):
            version += 1
            _fill(module, float(version))
            collector.update_policy_weights_()
            extremes = next(batches)["extremes"]
            n_torn += int((extremes[..., 0] != extremes[..., 1]).sum())
        return n_torn

    def measure(seconds: float) -> Answer:
        n_torn, n_checked = torn(20), 20
        published, pulled, copy_seconds = [], [], []
        end = time.perf_counter() + seconds
        turns = itertools.cycle(range(len(copies)))
        while time.perf_counter() < end:
            published.append(_seconds(collector.update_policy_weights_))
            publisher.write(0, list(tensors.values()), [0])
            pulled.append(_seconds(partial(reader.pull, 0, [0])))
            copy_seconds.append(_seconds(partial(copy, copies[next(turns)])))
            publisher.write(1, list(tensors.values()), [0])
            reader.pull(1, [0])
        return {
            "publish_us": statistics.median(published) * 1e6,
            "pull_us": statistics.median(pulled) * 1e6,
            "copy_alone_us": statistics.median(copy_seconds) * 1e6,
            "torn": n_torn,
            "checked_batches": n_checked,
        }

    return measure


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
