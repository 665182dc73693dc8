"""Rows of the fault matrix about workers: their failures, Ctrl-C, what they get."""

import os
import signal
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_tools import KINDS, Hang, as_soon_as, faulty, meeting, press_ctrl_c
from support.clocks import (
    LIMIT,
    Clock,
    ClosingClock,
    beside,
    hangs_in_c,
    wait_for_ends,
    waits,
)
from support.processes import SOON, gone, wait_until, wait_until_gone
from support.scripts import start_python
from tensordict import TensorDictBase
from workloads.counting import CountingEnv, Fault, flood

from marl_collect.collectors import Collector
from marl_collect.errors import ClosedError, WorkerError
from marl_collect.evaluation.evaluator import Evaluator
from marl_collect.parallel_env import ParallelEnv
from marl_collect.parallel_env.batch import ParallelBatch

every_kind = pytest.mark.parametrize("kind", KINDS)
any_kind = pytest.mark.parametrize("kind", [Collector, *KINDS])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    wait_for_ends(monkeypatch)
    return Clock(monkeypatch)


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
            collector.next()
            collector.next()
    assert len(capfd.readouterr().out) >= 2**20


@pytest.mark.parametrize("kind", [*KINDS, ParallelEnv])
def test_environments_of_workers_are_built_at_the_same_time(
    kind: Any, tmp_path: Path
) -> None:
    """Each factory waits for all others."""
    factories = [faulty(meeting(tmp_path, 3), "create")] * 3
    if kind is ParallelEnv:
        ParallelEnv(3, factories, num_processes=3, start_timeout=SOON).close()
        return
    with kind(factories, frames_per_batch=9, start_timeout=SOON) as collector:
        assert collector.next() is not None


@every_kind
def test_all_workers_collect_at_the_same_time(kind: Any, tmp_path: Path) -> None:
    """Each worker waits in its first step for all others."""
    factory = faulty(meeting(tmp_path, 3))
    with kind(factory, num_workers=3, frames_per_batch=9, timeout=SOON) as collector:
        for _ in range(3):
            assert collector.next() is not None


# Row 7: Ctrl-C, which terminals send to all processes


HEAD = """
from marl_collect import MultiAsyncCollector, MultiSyncCollector, ParallelEnv
from workloads.counting import CountingEnv, Fault

def hanging(phase):
    return lambda: CountingEnv(fault=Fault("hang", phase))

def tell(pids):
    print(*pids, flush=True)
"""
MOMENTS = {
    "async, in a batch": """
        collector = MultiAsyncCollector([CountingEnv] * 2, frames_per_batch=1000)
        tell(collector.worker_pids)
        for _ in collector:
            pass
    """,
    "sync, in the shutdown": """
        collector = MultiSyncCollector([hanging("close")] * 2, frames_per_batch=10)
        collector.next()
        tell(collector.worker_pids)
        collector.shutdown(timeout=60)
    """,
    "ParallelEnv, in a step": """
        env = ParallelEnv(2, hanging("step"), num_processes=2)
        tell(env.engine().pids)
        env.rollout(3)
    """,
}


@pytest.mark.parametrize("body", MOMENTS.values(), ids=MOMENTS.keys())
def test_ctrl_c_gives_one_traceback_and_ends_all_processes(
    body: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    with start_python(script) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=SOON)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert errors.count("Traceback") == 1, errors
    assert "KeyboardInterrupt" in errors
    assert len(pids) == 2
    wait_until_gone(pids)


def hanging_in_its_second_reset(hang: Hang) -> Callable[[], CountingEnv]:
    return lambda: CountingEnv(fault=Fault(hang, "reset", at=1), max_length=1000)


@every_kind
def test_ctrl_c_during_a_command_to_workers_ends_them(
    kind: Any, tmp_path: Path
) -> None:
    """Otherwise the reply would be taken for the reply to the next command."""
    hang = Hang(tmp_path)
    limits: Any = {"frames_per_batch": 4, "max_frames_per_traj": 1000}
    collector = kind([hanging_in_its_second_reset(hang)] * 2, **limits)
    collector.next()
    pids = collector.worker_pids
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        as_soon_as(lambda: hang.count == 2, press_ctrl_c)
        collector.reset()
    wait_until_gone(pids)
    for use in (
        *(collector.next, collector.reset, collector.state_dict),
        collector.update_policy_weights_,
        lambda: collector.load_state_dict({}),
    ):
        with pytest.raises(ClosedError, match="Ctrl-C"):
            use()
    assert "closed" in repr(collector)


def test_ctrl_c_in_an_evaluation_ends_the_evaluator(tmp_path: Path) -> None:
    hang = Hang(tmp_path)
    evaluator = Evaluator(None, [hanging_in_its_second_reset(hang)] * 2, num_workers=2)
    pids = evaluator.worker_pids
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        as_soon_as(lambda: hang.count == 2, press_ctrl_c)
        evaluator.evaluate(100)
    wait_until_gone(pids)
    with pytest.raises(ClosedError):
        evaluator.evaluate(1)


# Inputs and outputs of collectors


one_hunter_short = partial(CountingEnv, n_hunters=1)


def no_prey(td: TensorDictBase) -> TensorDictBase:
    return td.set(("hunter", "action"), torch.zeros(td.shape[0], 2, dtype=torch.int64))


def wrong_prey(td: TensorDictBase) -> TensorDictBase:
    return no_prey(td).set(("prey", "action"), torch.zeros(td.shape[0], 3, 5))


@any_kind
@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (no_prey, KeyError, "prey/action"),
        (wrong_prey, ValueError, r"prey/action has shape \[3, 5\] .* expects \[3, 2\]"),
    ],
    ids=["missing", "shape"],
)
def test_missing_entries_of_a_policy_are_reported_at_the_start(
    kind: Any, policy: Any, error: type[Exception], words: str
) -> None:
    """Row 15."""
    with pytest.raises(error, match=words):
        kind([CountingEnv], policy, frames_per_batch=8)


@every_kind
def test_different_environments_of_workers_are_reported_at_the_start(kind: Any) -> None:
    """Row 18."""
    with pytest.raises(ValueError, match=r"worker 1.*worker 0"):
        kind([CountingEnv, one_hunter_short], frames_per_batch=8)


def test_a_factory_that_cannot_be_pickled_is_refused_before_any_process_starts(
    tmp_path: Path,
) -> None:
    """Row 21, for ParallelEnv."""
    with (tmp_path / "open").open("w") as file:
        factory = lambda: CountingEnv(n_prey=file.fileno())  # noqa: E731
        with pytest.raises(TypeError, match="to its process: .* variable 'file' of"):
            ParallelEnv(2, factory, num_processes=2).reset()


@pytest.mark.filterwarnings("ignore:More than .* batches are held")
@any_kind
def test_a_loop_can_be_left_and_continued_and_ends_once(kind: Any) -> None:
    """Row 29: two iterators share the batches, and the loop ends once."""
    collector = kind([CountingEnv] * 2, frames_per_batch=10, total_frames=80)
    frames = 0
    for batch in collector:
        frames += batch.numel()
        break
    first, second = iter(collector), iter(collector)
    frames += next(first).numel() + next(second).numel() + collector.next().numel()
    frames += sum(batch.numel() for batch in first)
    assert frames == 80
    assert list(second) == []
    assert collector.next() is None


def test_the_start_of_processes_has_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 34, for ParallelEnv: building may take longer than ``timeout``."""
    clock = Clock(monkeypatch)
    started_file, finish = tmp_path / "started", tmp_path / "finish"

    def build_slowly() -> None:
        wait_until(started_file.exists)
        clock.pass_slowly(5 * LIMIT)
        finish.touch()

    slow = faulty(waits(started_file, finish), "create")
    with beside(build_slowly):
        env = ParallelEnv(
            2, slow, num_processes=2, timeout=LIMIT, start_timeout=100 * LIMIT
        )
    with env:
        env.rollout(2)
