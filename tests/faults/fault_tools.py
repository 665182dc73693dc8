"""Helpers of the tests of the fault matrix."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from support.processes import wait_until, wait_until_gone
from tensordict import TensorDict
from workloads.counting import CountingEnv, Fault

from marl_collect.collectors import MultiAsyncCollector, MultiSyncCollector
from marl_collect.collectors.collector import CollectorBase
from marl_collect.evaluation.evaluator import Evaluator
from marl_collect.parallel_env.batch import ParallelBatch
from marl_collect.parallel_env.env_processes import EnvProcesses

KINDS = [MultiSyncCollector, MultiAsyncCollector]


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


def next_from(collector: Any, worker: int) -> TensorDict:
    """Collect until a batch has frames of a worker; each has one environment.

    A worker that dies again before it has completed a batch is not replaced, and an
    async collector may deliver many batches of others meanwhile.
    """
    while True:
        batch: TensorDict = collector.next()
        if worker in batch["collector", "traj_ids"][:, 0] >> 32:
            return batch


def kill(pid: int) -> None:
    """Kill a process, and wait until it has ended."""
    os.kill(pid, signal.SIGKILL)
    wait_until_gone([pid])


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the limit of a close without an error too long for a test."""
    for close in (
        CollectorBase.shutdown,
        Evaluator.close,
        EnvProcesses.close,
        ParallelBatch.close,
    ):
        monkeypatch.setattr(close, "__defaults__", (1000.0,))


class Hang:
    """A fault that never ends; ``count`` tells how many processes hang in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> None:
        (self._folder / f"hang-{os.getpid()}").touch()
        Event().wait()

    @property
    def count(self) -> int:
        return len(list(self._folder.glob("hang-*")))


def as_soon_as(condition: Callable[[], bool], act: Callable[[], object]) -> Thread:
    """Start a thread that waits for a condition and then acts."""

    def wait_and_act() -> None:
        wait_until(condition)
        act()

    thread = Thread(target=wait_and_act)
    thread.start()
    return thread


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def meeting(folder: Path, count: int) -> Callable[[], None]:
    """Return a fault that waits until so many processes have it."""

    def meet() -> None:
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < count:
            Event().wait(0.01)

    return meet
