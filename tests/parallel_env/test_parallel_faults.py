"""Real processes that die, hang, or raise errors."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.clocks import LIMIT, Clock, beside, waits
from support.processes import suspend, wait_until
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.collectors import MultiSyncCollector
from marl_collect.errors import WorkerError
from marl_collect.parallel_env import ParallelEnv


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pids_of(env: ParallelEnv) -> tuple[int, ...]:
    engine: Any = env.engine()
    pids: tuple[int, ...] = engine.pids
    return pids


def pending(env: ParallelEnv) -> list[int]:
    engine: Any = env.engine()
    processes: list[int] = engine._processes.signals.pending(0)
    return processes


def test_a_process_killed_while_it_waits_is_noticed_by_the_next_step() -> None:
    env = ParallelEnv(3, CountingEnv, num_processes=3)
    root = env.rand_action(env.reset())
    os.kill(pids_of(env)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match="Worker 1 .* killed by SIGKILL"):
        env.step(root)
    assert env.is_closed


def test_a_process_that_was_stopped_while_idle_is_noticed(clock: Clock) -> None:
    """The status board shows no pending work, so the trainer sends a message."""
    env = ParallelEnv(2, CountingEnv, num_processes=2, timeout=LIMIT)
    root = env.rand_action(env.reset())
    suspend(pids_of(env)[0])
    clock.runs_when = lambda: pending(env) == [0]
    with pytest.raises(WorkerError, match=r"Worker 0 .* hung 100 s"):
        env.step(root)
    assert env.is_closed


def test_a_step_may_take_long_if_its_environments_make_progress(
    clock: Clock, tmp_path: Path
) -> None:
    """The step of each environment counts as progress."""
    files = [(tmp_path / f"{k} begun", tmp_path / f"{k} finish") for k in range(4)]
    faults = [Fault(waits(*pair), "step") for pair in files]
    slow = [partial(CountingEnv, fault=fault) for fault in faults]

    def pass_time() -> None:
        for started_file, finish in files:
            wait_until(started_file.exists)
            clock.pass_slowly(0.8 * LIMIT)
            finish.touch()

    with ParallelEnv(4, slow, num_processes=1, timeout=LIMIT) as env:
        root = env.rand_action(env.reset())
        with beside(pass_time):
            env.step(root)


def test_an_interrupted_step_is_finished_by_the_next_call(tmp_path: Path) -> None:
    started_file, finish = tmp_path / "begun", tmp_path / "finish"
    slow = Fault(waits(started_file, finish), "step", at=1)

    def interrupt() -> None:
        wait_until(started_file.exists)
        os.kill(os.getpid(), signal.SIGINT)

    with ParallelEnv(
        2, lambda: CountingEnv(deaths=False, fault=slow), num_processes=2
    ) as env:
        root = env.rand_action(env.reset())
        _, root = env.step_and_maybe_reset(root)
        with beside(interrupt), pytest.raises(KeyboardInterrupt):
            env.rand_step(root)
        assert not env.is_closed
        finish.touch()
        after = env.reset()
        assert (after["hunter", "observation"][..., 1] == 0).all()
        assert (
            env.rand_step(after)["next", "hunter", "observation"][..., 1] == 1
        ).all()


def test_an_error_inside_a_workers_processes_reaches_the_trainer() -> None:
    faulty = lambda: CountingEnv(fault=Fault("raise", "step", at=3))  # noqa: E731
    collector = MultiSyncCollector(
        [lambda: ParallelEnv(2, faulty)], None, frames_per_batch=40
    )
    with pytest.raises(CountingError) as excinfo:
        next(iter(collector))
    cause = excinfo.value.__cause__
    assert isinstance(cause, WorkerError)
    assert "Traceback in the worker" in cause.remote_traceback  # Of the process.
    collector.shutdown()
