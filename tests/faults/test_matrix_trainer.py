"""Rows of the fault matrix about the trainer: exit, fork, threads, lost references."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import KINDS, Hang, as_soon_as, faulty
from support.processes import SOON, wait_until_gone
from support.scripts import run_python
from workloads.counting import CountingEnv

from marl_collect.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect.errors import ClosedError
from marl_collect.models import make_policy
from marl_collect.parallel_env import ParallelEnv
from marl_collect.processes import cleanup

every_kind = pytest.mark.parametrize("kind", KINDS)

HEAD = """
import os, resource, signal, sys, threading, time
from marl_collect import Collector, MultiAsyncCollector, MultiSyncCollector
from marl_collect import ParallelEnv
from workloads.counting import CountingEnv, Fault, stuck

class Buffer:
    def extend(self, data):
        pass

def tell(collector):
    print(*collector.worker_pids, flush=True)
    return collector
"""


def run(
    tmp_path: Path, body: str, *, interpreter: bool = False
) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    return run_python(script, interpreter=interpreter)


STEPPED = """
env = ParallelEnv(2, CountingEnv, num_processes=2)
batch = env.engine()
print(*batch.pids, flush=True)
batch.bind(batch.allocate())
batch.reset([0, 1], [0, 1])
batch.step()
"""
ENDS = {
    "ParallelEnv": (STEPPED, 0),
    "ParallelEnv, with an exit code": (STEPPED + "raise SystemExit(7)", 7),
    "ParallelEnv, with sigterm": (
        STEPPED + "os.kill(os.getpid(), signal.SIGTERM)",
        -signal.SIGTERM,
    ),
    "async": (
        "tell(MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=20)).next()",
        0,
    ),
    "prefetch": (
        """
        tell(MultiSyncCollector(CountingEnv, frames_per_batch=9, prefetch=True)).next()
        """,
        0,
    ),
    "in the background": (
        """
        c = tell(MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=20,
                                     replay_buffer=Buffer()))
        c.start()
        while not c.frames:
            time.sleep(0.01)
        """,
        0,
    ),
    "in the background, with a worker stuck": (
        """
        bad = lambda: CountingEnv(fault=Fault(stuck, "step"))
        c = tell(MultiSyncCollector([bad, CountingEnv], frames_per_batch=20,
                                    replay_buffer=Buffer()))
        c.start()
        """,
        0,
    ),
    "after weights were published": (
        """
        from marl_collect.models import make_policy
        policy = make_policy(CountingEnv, num_cells=(4,))
        for kind in (MultiAsyncCollector, MultiSyncCollector):
            c = tell(kind([CountingEnv] * 2, policy, frames_per_batch=20))
            c.next()
            c.update_policy_weights_()
            c.next()
            held = c if kind is MultiAsyncCollector else held
        """,
        0,
    ),
}


@pytest.mark.torchrl_defect("D5", "D5b")
@pytest.mark.parametrize(("body", "code"), ENDS.values(), ids=ENDS.keys())
def test_workers_end_with_the_trainer(tmp_path: Path, body: str, code: int) -> None:
    # One of them as a user starts it.
    process = run(tmp_path, body, interpreter=body == ENDS["async"][0])
    assert process.returncode == code, process.stderr
    pids = [int(pid) for pid in process.stdout.split()]
    assert pids
    wait_until_gone(pids)
    if code in (0, 7):
        assert process.stderr == ""


def test_an_environment_that_cannot_be_closed_is_not_closed_again_at_the_exit(
    tmp_path: Path,
) -> None:
    body = """
    class Env(CountingEnv):
        def close(self):
            print("close")
            raise OSError("busy")

    collector = Collector(Env, frames_per_batch=20)
    try:
        collector.shutdown()
    except OSError as error:
        print(error)
    """
    process = run(tmp_path, body)
    assert process.stdout.split() == ["close", "busy"]
    assert process.stderr == ""


def test_a_small_limit_on_open_files_is_named_and_no_process_is_left(
    tmp_path: Path,
) -> None:
    body = """
    c = MultiSyncCollector([CountingEnv] * 2, frames_per_batch=20)
    c.next()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = len(os.listdir("/proc/self/fd"))
    for attempt in range(2):
        try:
            MultiSyncCollector([CountingEnv] * 40, frames_per_batch=40)
        except OSError as error:
            print(error)
    assert len(os.listdir("/proc/self/fd")) == files
    held = []
    try:
        for batch in c:
            held.append(batch)
    except OSError as error:
        print(error)
    assert len(held) > 3
    c.shutdown()
    """
    process = run(tmp_path, body)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 3
    assert all("too many open files" in line for line in lines), lines
    assert all("ulimit -n" in line for line in lines), lines


@every_kind
def test_too_little_memory_is_an_error_at_the_start(kind: Any) -> None:
    with pytest.raises(MemoryError) as excinfo:
        kind(CountingEnv, frames_per_batch=4_000_000_000)
    text = str(excinfo.value)
    assert "needs" in text
    assert "is free" in text
    assert "compact_obs=True" in text


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("use", ["reset", "step", "attribute", "close", "forget"])
def test_a_fork_of_the_trainer_does_not_affect_its_parallel_env(use: str) -> None:
    with ParallelEnv(2, CountingEnv) as env, ParallelEnv(2, CountingEnv) as twin:
        for parallel_env in (env, twin):
            parallel_env.set_seed(3)
            state = parallel_env.rand_action(parallel_env.reset())
        message = in_a_fork(lambda: uses(env)[use](state))
        if use not in ("close", "forget"):
            assert "is a fork of" in message
        for parallel_env in (env, twin):
            parallel_env.set_seed(4)
        assert (env.reset() == twin.reset()).all()
        torch.manual_seed(0)
        rollout = env.rollout(5)
        torch.manual_seed(0)
        assert (rollout == twin.rollout(5)).all()


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@every_kind
def test_a_fork_of_the_trainer_does_not_write_to_a_collectors_memory(kind: Any) -> None:
    policy = make_policy(CountingEnv, num_cells=(4,))
    with kind([CountingEnv], policy, frames_per_batch=10, total_frames=50) as collector:
        batch = collector.next()
        before = batch.clone()
        for use in (collector.next, collector.update_policy_weights_, collector.reset):
            assert "is a fork of" in in_a_fork(use)
        in_a_fork(collector.shutdown)
        assert (batch == before).all()
        del batch
        assert collector.policy_version == 0
        assert sum(later.numel() for later in collector) == 40


def uses(env: ParallelEnv) -> dict[str, Any]:
    return {
        "reset": lambda state: env.reset(),
        "step": env.step,
        "attribute": lambda state: env.state,
        "close": lambda state: env.close(),
        "forget": lambda state: sys.exit(),
    }


def in_a_fork(use: Callable[[], object]) -> str:
    """Call a function in a fork of this process; return the error that it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            use()
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            try:
                cleanup.close_all()  # As at the exit of the interpreter.
            finally:  # Earlier tests may have left what cannot be closed.
                os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading) as file:
        return file.read()


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_collector_works_inside_the_worker_of_a_dataloader() -> None:
    from torch.utils.data import DataLoader, IterableDataset

    class Frames(IterableDataset[Any]):
        def __iter__(self) -> Any:
            with MultiSyncCollector(
                CountingEnv, frames_per_batch=8, total_frames=24
            ) as collector:
                for batch in collector:
                    yield batch["hunter", "observation"].clone()

    with MultiSyncCollector([CountingEnv] * 2, frames_per_batch=20) as own_collector:
        own_collector.next()
        # Named, because importing TorchRL makes spawned workers the default.
        loader = DataLoader(
            Frames(), batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        shapes = [tuple(observation.shape) for observation in loader]
        assert shapes == [(1, 8, 2, 5)] * 3
        own_collector.next()


@every_kind
def test_shutdown_from_another_thread_wakes_waiting_threads(
    kind: Any, tmp_path: Path
) -> None:
    hang = Hang(tmp_path)
    collector = kind([faulty(hang)], frames_per_batch=20, timeout=None)
    pids = collector.worker_pids
    with pytest.raises(ClosedError):  # noqa: PT012
        shut_down = partial(collector.shutdown, timeout=1.0)
        thread = as_soon_as(lambda: hang.count == 1, shut_down)
        collector.next()
    thread.join(SOON)
    wait_until_gone(pids)
    with pytest.raises(ClosedError, match="was shut down"):
        collector.next()


def test_several_collectors_work_at_once_and_in_threads() -> None:
    """Each gives the same data as alone."""
    limits: Any = {"frames_per_batch": 20, "total_frames": 60, "seed": 5}

    def collect(kind: Any) -> list[Any]:
        return [batch.clone() for batch in kind([CountingEnv], **limits)]

    expected = collect(Collector)
    with ThreadPoolExecutor() as threads:
        kinds = MultiSyncCollector, MultiAsyncCollector, MultiSyncCollector
        for batches in threads.map(collect, kinds, timeout=SOON):
            assert len(batches) == 3
            pairs = zip(batches, expected, strict=True)
            assert all((batch == other).all() for batch, other in pairs)
