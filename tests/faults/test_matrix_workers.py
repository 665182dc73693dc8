"""Rows of the fault matrix about failing workers: every collector reports them."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fault_tools import KINDS, faulty, meeting
from support.clocks import (
    LIMIT,
    Clock,
    ClosingClock,
    LeapingClock,
    hangs_in_c,
    wait_for_ends,
)
from support.processes import SOON, gone
from workloads.counting import CountingEnv, flood

from marl_collect.errors import WorkerError
from marl_collect.parallel_env import ParallelEnv
from marl_collect.parallel_env.batch import ParallelBatch

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    wait_for_ends(monkeypatch)
    return Clock(monkeypatch)


def play(collector: Any, batches: int) -> None:
    for _ in range(batches):
        collector.next()


@pytest.mark.torchrl_defect("D21")
@every_kind
def test_a_factory_that_hangs_has_its_own_limit(
    kind: Any, clock: Clock, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    clock.runs_when = lambda: hung.exists() and clock.quiet == {1}
    factories = [CountingEnv, faulty(hangs_in_c(hung), "create")]
    with pytest.raises(WorkerError, match=r"Worker 1 .*hung 100 s in create"):
        kind(factories, frames_per_batch=9, timeout=9 * LIMIT, start_timeout=LIMIT)


def test_parallel_env_whose_environment_hangs_in_close_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParallelBatch.close, "__defaults__", (1000.0,))
    files = [tmp_path / "0", tmp_path / "1"]
    ClosingClock(monkeypatch, lambda: all(file.exists() for file in files))
    factories = [faulty(hangs_in_c(file), "close") for file in files]
    env = ParallelEnv(2, factories, num_processes=2)
    engine: Any = env.engine()
    pids = engine.pids
    begin = time.monotonic()
    with pytest.warns(RuntimeWarning, match="hung in close") as record:
        env.close()
    assert len(record) == 2
    assert time.monotonic() - begin < SOON
    assert all(map(gone, pids))


@pytest.mark.parametrize("kind", [*KINDS, ParallelEnv])
def test_much_output_on_stdout_blocks_no_process(
    kind: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    flooding = faulty(flood)
    if kind is ParallelEnv:
        with ParallelEnv(2, flooding, num_processes=2) as env:
            env.rollout(5)
    else:
        with kind([flooding] * 2, frames_per_batch=20) as collector:
            play(collector, 2)
    assert len(capfd.readouterr().out) >= 2**20


@every_kind
def test_a_slow_learner_is_not_a_hang(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeapingClock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    with kind([CountingEnv] * 2, frames_per_batch=8, timeout=SOON) as collector:
        for _ in range(5):
            play(collector, 2)
            clock.leap(10 * SOON)


@every_kind
def test_a_slow_environment_that_makes_progress_is_not_a_hang(
    kind: Any, clock: Clock
) -> None:
    """Whenever it has made progress, a quarter of the limit passes."""
    slow = faulty("sleep", seconds=0.1, repeat=True)
    with kind([slow], frames_per_batch=30, timeout=LIMIT) as collector:
        clock.runs_when = lambda: not clock.quiet
        assert collector.next().numel() == 30
        assert clock.now > 2 * LIMIT


@pytest.mark.parametrize("kind", [*KINDS, ParallelEnv])
def test_environments_of_workers_are_built_at_the_same_time(
    kind: Any, tmp_path: Path
) -> None:
    """Each factory waits for all others."""
    factories = meeting(tmp_path, 3)
    if kind is ParallelEnv:
        ParallelEnv(3, factories, num_processes=3, start_timeout=SOON).close()
        return
    with kind(factories, frames_per_batch=9, start_timeout=SOON) as collector:
        assert collector.next() is not None


@every_kind
def test_all_workers_collect_at_the_same_time(kind: Any, tmp_path: Path) -> None:
    """Each worker waits in its first step for all others."""

    def meet() -> None:
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 3:
            threading.Event().wait(0.01)

    factory = faulty(meet)
    with kind(factory, num_workers=3, frames_per_batch=9, timeout=SOON) as collector:
        for _ in range(3):
            assert collector.next() is not None
