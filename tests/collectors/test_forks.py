"""Batches in a forked process are not changed by the parent."""

import multiprocessing  # noqa: TID251 - forks by users are tested
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection  # noqa: TID251
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector

pytestmark = [
    pytest.mark.forks,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    # Python 3.12 warns of forks in processes with threads, and torch starts threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

MODES = [
    (Collector, {}),
    (MultiSyncCollector, {}),
    (MultiSyncCollector, {"prefetch": True}),
    (MultiAsyncCollector, {}),
]
every_mode = pytest.mark.parametrize(("kind", "options"), MODES)
KEY = ("next", "prey", "observation")


@contextmanager
def forked(act: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run ``act`` with one end of a pipe in a fork of this process; yield the other."""
    parent_end, child_end = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            act(child_end)
        os._exit(0)
    child_end.close()
    try:
        yield parent_end
    finally:
        parent_end.close()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def received(connection: Connection) -> Any:
    assert connection.poll(60), "the forked process does not answer"
    return connection.recv()


def mappings() -> int:
    """Number of our shared memory segments that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:marl_collect")


@every_mode
def test_the_batch_of_a_fork_is_not_overwritten(
    kind: Any, options: dict[str, Any]
) -> None:
    with kind([CountingEnv] * 2, None, frames_per_batch=20, **options) as collector:
        batches = [collector.next()]
        expected = batches[0][KEY].tolist()

        def read(connection: Connection) -> None:
            connection.recv()
            connection.send(batches[0][KEY].tolist())

        with forked(read) as child:
            batches.clear()
            with forked(lambda connection: None):
                pass  # It inherits other batches.
            for _ in range(8):
                collector.next()
            child.send("now")
            assert received(child) == expected


@every_mode
def test_memory_and_slots_stay_bounded_over_many_forks(
    kind: Any, options: dict[str, Any]
) -> None:
    with kind([CountingEnv] * 2, None, frames_per_batch=20, **options) as collector:
        for _ in range(4):
            collector.next()
        slots, mapped = collector.stats()["slots"], mappings()
        for _ in range(12):
            batch = collector.next()
            with forked(lambda connection: None):
                del batch
        assert collector.stats()["slots"] == slots
        assert mappings() <= mapped


def test_a_worker_that_is_replaced_after_a_fork_attaches_its_memory() -> None:
    options: Any = {"frames_per_batch": 20, "seed": 1, "on_worker_failure": "restart"}
    with MultiSyncCollector([CountingEnv] * 2, prefetch=True, **options) as collector:
        for _ in range(4):
            collector.next()
        batch = collector.next()
        with forked(lambda connection: None):
            del batch
        for _ in range(3):
            os.kill(collector.worker_pids[0], signal.SIGKILL)
            before = collector.stats()["restarts"]
            for _ in range(3):
                root = collector.next()["collector", "traj_ids"]
                assert (root >> 32 == torch.tensor([[0], [1]])).all()
            assert collector.stats()["restarts"] == before + 1


def test_a_collector_in_a_fork_does_not_write_to_the_parents_batches() -> None:
    def options(seed: int) -> dict[str, Any]:
        return {"frames_per_batch": 20, "seed": seed}

    with Collector(CountingEnv, **options(1)) as collector:
        collector.next()

        def collect(connection: Connection) -> None:
            connection.recv()
            collector.set_seed(99)
            for _ in range(4):
                collector.next()
            connection.send("done")

        with forked(collect) as child:
            batch = collector.next()
            expected = batch.clone()
            child.send("now")
            assert received(child) == "done"
            assert (batch == expected).all()
