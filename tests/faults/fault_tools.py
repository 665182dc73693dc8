"""Helpers of the tests of the fault matrix."""

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.testing.counting import CountingEnv, Fault

KINDS = [MultiSyncCollector, MultiAsyncCollector]
SOON = 30.0
"""Seconds; much longer than needed, even on a busy machine."""


def faulty(*args: Any, **kwargs: Any) -> Callable[[], CountingEnv]:
    """Return a factory whose environments have this fault."""
    return lambda: CountingEnv(deaths=False, fault=Fault(*args, **kwargs))


def faulty_once(marker: Path, *args: Any, **kwargs: Any) -> Callable[[], CountingEnv]:
    """Return a factory whose first environment has this fault; others are healthy."""

    def make() -> CountingEnv:
        if marker.exists():
            return CountingEnv(deaths=False)
        marker.touch()
        return CountingEnv(deaths=False, fault=Fault(*args, **kwargs))

    return make


def gone(pid: int) -> bool:
    """Whether a process has ended; it may still be in the process table."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until(condition: Callable[[], bool], what: str = "it did not happen") -> None:
    """Wait for a condition, at most ``SOON``."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, what
        Event().wait(0.01)


def wait_until_gone(pids: Iterable[int]) -> None:
    """Wait until processes have ended."""
    for pid in pids:
        wait_until(partial(gone, pid), f"process {pid} is left")


def descriptors() -> int:
    """Count the open files of this process."""
    return len(os.listdir("/proc/self/fd"))


class Constant(nn.Module):
    """Writes its weights as actions, and the extremes of a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(3, 2))
        self.large = nn.Parameter(torch.zeros(20_000))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = observation.shape[0]
        extremes = torch.stack([self.large.min(), self.large.max()]).expand(batch, 2)
        hunters = torch.zeros(batch, 2, dtype=torch.int64)
        return self.level.expand(batch, 3, 2), hunters, extremes


def constant() -> TensorDictModule:
    """Return the policy of `Constant`."""
    return TensorDictModule(
        Constant(),
        in_keys=[("prey", "observation")],
        out_keys=[("prey", "action"), ("hunter", "action"), "extremes"],
    )


def meeting(folder: Path, count: int) -> list[Callable[[], CountingEnv]]:
    """Return factories that each wait until all of them have been called."""

    def factory(index: int) -> Callable[[], CountingEnv]:
        def make() -> CountingEnv:
            (folder / str(index)).touch()
            while len(list(folder.iterdir())) < count:
                Event().wait(0.01)
            return CountingEnv()

        return make

    return [factory(index) for index in range(count)]
