"""The first failure is the one that is reported, with its place, and soon."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fault_tools import KINDS, Hang, as_soon_as, faulty
from support.clocks import LIMIT, Clock, ClosingClock, hangs, hangs_in_c, wait_for_ends
from support.internals import pool_of, source_of, workers_of
from support.processes import SOON, gone, suspend, wait_until, wait_until_gone
from workloads.counting import CountingEnv, CountingError, Fault

from marl_collect.collectors import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    messages,
)
from marl_collect.errors import ClosedError, worker_error_of
from marl_collect.models import make_policy
from marl_collect.parallel_env import ParallelEnv
from marl_collect.processes.context import result
from marl_collect.processes.status_board import PREEMPT

every_kind = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[], CountingEnv]


def hanging_in_close(*args: Any, **kwargs: Any) -> Make:
    """Return a factory whose environments have a fault, and hang in ``close``."""

    def make() -> CountingEnv:
        env = CountingEnv(deaths=False, fault=Fault(*args, **kwargs))
        env.close = Fault("hang").strike  # type: ignore[method-assign]
        return env

    return make


def place_of(error: BaseException) -> tuple[int, str | None, int | None]:
    cause = worker_error_of(error)
    assert cause is not None
    return cause.worker, cause.phase, cause.environment


def stepping(collector: Any) -> None:
    while True:  # An async collector may yield any number of batches of other workers.
        collector.next()


def step_four(kind: Any, factories: Any, processes: int) -> None:
    if kind is ParallelEnv:
        ParallelEnv(4, factories, num_processes=processes).rollout(5)
    else:
        stepping(kind(factories, num_workers=processes, frames_per_batch=40))


# The failure is reported before environments are closed


@pytest.mark.parametrize("kind", [*KINDS, ParallelEnv])
def test_the_error_of_a_factory_is_raised_if_built_environments_hang_in_close(
    kind: Any,
) -> None:
    hangs, fails = hanging_in_close("sleep"), faulty("raise", "create")
    with pytest.raises(CountingError, match="fault in create") as excinfo:
        step_four(kind, [hangs, hangs, fails, hangs], processes=1)
    assert place_of(excinfo.value) == (0, "create", 2)


@every_kind
def test_an_environment_is_closed_before_its_failed_worker_is_replaced(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_ends(monkeypatch)
    first, closed = tmp_path / "first", tmp_path / "closed"

    def make() -> CountingEnv:
        if first.exists():
            return CountingEnv(deaths=False)
        first.touch()
        env = CountingEnv(deaths=False, fault=Fault("raise", at=3))

        def close() -> None:
            threading.Event().wait(0.3)
            closed.touch()

        env.close = close  # type: ignore[method-assign]
        return env

    with kind(
        make, num_workers=1, frames_per_batch=20, on_worker_failure="restart"
    ) as collector:
        collector.next()
        assert collector.stats()["restarts"] == 1
    assert closed.exists()


def test_the_earliest_of_several_failures_is_raised(tmp_path: Path) -> None:
    """Both are there when the trainer looks; the later one comes from worker 0."""
    reported = tmp_path / "reported"

    def fail_later() -> None:
        while not reported.exists():
            threading.Event().wait(0.005)
        raise CountingError("later")

    def later() -> CountingEnv:
        return CountingEnv(fault=Fault(fail_later, "reset"))

    def earlier() -> CountingEnv:
        env = CountingEnv(fault=Fault("raise", "reset"))
        # Its worker reports the failure and then closes it.
        env.close = reported.touch  # type: ignore[method-assign]
        return env

    collector = MultiSyncCollector([later, earlier], frames_per_batch=20)
    source = source_of(collector)
    source._start_teams(random=False, ahead=0)
    handles = pool_of(collector)._handles
    wait_until(lambda: all(handle.is_ready for handle in handles))
    with pytest.raises(CountingError, match="fault in reset"):
        source._receive()
    collector.shutdown()


# One numbering of environments


@pytest.mark.parametrize("kind", [*KINDS, ParallelEnv])
@pytest.mark.parametrize("phase", ["create", "reset", "step"])
def test_errors_name_the_environment_as_the_user_counts_it(
    kind: Any, phase: Any
) -> None:
    factories: list[Make] = [CountingEnv] * 4
    factories[3] = lambda: CountingEnv(deaths=False, fault=Fault("raise", phase))
    with pytest.raises(CountingError, match=f"fault in {phase}") as excinfo:
        step_four(kind, factories, processes=2)
    assert place_of(excinfo.value) == (1, phase, 3)
    cause = worker_error_of(excinfo.value)
    assert cause is not None
    assert "counting.py" in cause.remote_traceback
    assert not any(
        "in this process" in n for n in getattr(excinfo.value, "__notes__", [])
    )


def test_a_long_replay_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the limit passes after each step, so several limits in all."""
    wait_for_ends(monkeypatch)
    clock = Clock(monkeypatch)
    fast = partial(CountingEnv, deaths=False, min_length=50, max_length=60)
    slow = partial(fast, fault=Fault("sleep", seconds=0.1, repeat=True))
    with MultiSyncCollector(fast, frames_per_batch=10, seed=1) as collector:
        collector.next()
        state = collector.state_dict()
    with MultiSyncCollector(slow, frames_per_batch=10, seed=1, timeout=LIMIT) as other:
        clock.runs_when = lambda: not clock.quiet
        other.load_state_dict(state)
        assert other.frames == 10
        assert clock.passed > 2 * LIMIT


# Ctrl-C


@every_kind
def test_a_stopped_worker_does_not_delay_a_shutdown(kind: Any) -> None:
    collector = kind([CountingEnv] * 2, frames_per_batch=40)
    pids = collector.worker_pids
    suspend(pids[1])
    begin = time.monotonic()
    collector.shutdown(1000)
    assert time.monotonic() - begin < SOON
    wait_until_gone(pids)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_collector_interrupted_within_a_batch_has_no_state() -> None:
    collector = Collector(faulty(interrupt, at=14), frames_per_batch=10)
    collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    with pytest.raises(ClosedError, match="within a batch"):
        collector.state_dict()
    with pytest.raises(ClosedError, match="Ctrl-C"):
        collector.next()


def test_async_shutdown_does_not_repeat_ctrl_c() -> None:
    collector = Collector(CountingEnv, frames_per_batch=10, postproc=interrupt)
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    collector.async_shutdown()


# Restarts


def test_steps_so_far_never_falls() -> None:
    options: Any = {"frames_per_batch": 20, "on_worker_failure": "restart"}
    with MultiSyncCollector(CountingEnv, **options) as collector:
        for _ in range(3):
            collector.next()
        before = collector.steps_so_far()
        (pid,) = collector.worker_pids
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])
        collector.next()
        assert collector.steps_so_far() >= before + 20
        state = collector.state_dict()
    with MultiSyncCollector(CountingEnv, **options) as resumed:
        for _ in range(2):
            resumed.load_state_dict(state)
            assert resumed.steps_so_far() >= resumed.frames == 80


def test_a_reply_to_a_call_that_raised_answers_no_other_call(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    waits: Any = Fault(lambda: wait_until(go_on.exists), "reset", 1)
    faults = waits, Fault("raise", "reset", 1)
    envs = [partial(CountingEnv, fault=fault) for fault in faults]
    with MultiSyncCollector(envs, frames_per_batch=2) as collector:
        collector.next()
        with pytest.raises(CountingError):
            collector.reset()  # Worker 0 has not replied yet.
        go_on.touch()
        ask = "attribute", "env", "is_closed"
        (reply,) = workers_of(collector).call(*ask, workers=[0])
        assert result(reply, 0) == [False]
        with pytest.raises(CountingError):
            collector.next()


def test_a_replacement_in_a_preempted_batch_is_preempted_too(tmp_path: Path) -> None:
    """Worker 1 dies after worker 0 is done, so its replacement must stop early."""
    marker, hung = tmp_path / "died", tmp_path / "hung"

    def slow() -> CountingEnv:
        if marker.exists():
            return CountingEnv(fault=Fault("sleep", at=1, seconds=0.2, repeat=True))
        marker.touch()
        return CountingEnv(fault=Fault(hangs(hung), at=1))

    with MultiSyncCollector(
        [CountingEnv, slow],
        frames_per_batch=400,
        preemptive_threshold=0.5,
        on_worker_failure="restart",
    ) as collector:
        kill = partial(os.kill, collector.worker_pids[1], signal.SIGKILL)
        pool = pool_of(collector)
        line = pool.status_board.lines[1]
        as_soon_as(lambda: hung.exists() and line.cells[PREEMPT] == 1, kill)
        batch = collector.next()
        assert collector.stats()["restarts"] == 1
    assert int(batch["collector", "mask"][1].sum()) < 100


# Closing


@every_kind
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("raise", "close"), "fault in close"),
        (Fault("kill", "close", signal=signal.SIGABRT), "SIGABRT"),
        (Fault("exit", "close"), "exit code 3"),
        (None, "hung"),
    ],
    ids=["raise", "abort", "exit", "hang in C"],
)
def test_an_error_a_crash_or_a_hang_in_close_is_a_warning(
    kind: Any,
    fault: Fault | None,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing = tmp_path / "closing"
    hang = hangs_in_c(closing)

    def strike() -> None:
        if fault is None:
            hang()
        closing.touch()
        fault.strike()

    collector = kind([CountingEnv, faulty(strike, "close")], frames_per_batch=20)
    collector.next()
    pids = collector.worker_pids
    handles = pool_of(collector)._handles
    others = handles[: 1 if text == "hung" else 2]
    ClosingClock(
        monkeypatch,
        lambda: closing.exists() and all(h.exitcode is not None for h in others),
    )
    with pytest.warns(RuntimeWarning, match=f"Worker 1 .*{text}") as record:
        collector.shutdown(1000)
    assert len(record) == 1
    assert all(map(gone, pids))


@every_kind
@pytest.mark.filterwarnings("error")
def test_a_warning_about_close_does_not_replace_the_error(kind: Any) -> None:
    factories = [hanging_in_close("raise", at=3), faulty("exit", "close")]
    collector = kind(factories, frames_per_batch=40)
    with pytest.raises(CountingError):
        stepping(collector)


@every_kind
def test_shutdown_in_a_signal_handler_waits_for_workers_only(kind: Any) -> None:
    """It once waited for the lock that the interrupted call of its thread holds."""
    slow = faulty("sleep", seconds=0.01, repeat=True)
    collector = kind([slow] * 2, frames_per_batch=1000)
    pids = collector.worker_pids
    before = signal.signal(signal.SIGUSR1, lambda *_: collector.shutdown(1000))
    try:
        interrupt = partial(os.kill, os.getpid(), signal.SIGUSR1)
        as_soon_as(lambda: collector.steps_so_far() > 0, interrupt)
        with pytest.raises(ClosedError):
            stepping(collector)
    finally:
        signal.signal(signal.SIGUSR1, before)
    wait_until_gone(pids)


def test_a_signal_handler_may_shut_down_what_is_being_shut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = Hang(tmp_path)
    collector = MultiSyncCollector([faulty(hang, "close")] * 2, frames_per_batch=40)
    pool = pool_of(collector)
    handled = threading.Event()

    def close(*_: object) -> None:
        pool.close(1000)
        handled.set()

    ClosingClock(monkeypatch, handled.is_set)
    before = signal.signal(signal.SIGUSR1, close)
    try:
        interrupt = partial(os.kill, os.getpid(), signal.SIGUSR1)
        as_soon_as(lambda: hang.count == 2, interrupt)
        with pytest.warns(RuntimeWarning, match="hung in close"):
            collector.shutdown(1000)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_update_during_shutdown_in_another_thread_is_a_closed_error() -> None:
    policy = make_policy(CountingEnv, num_cells=(4,))
    collector = MultiAsyncCollector(CountingEnv, policy, frames_per_batch=10)
    collector.next()
    workers = workers_of(collector)
    workers.close(2.0)  # As another thread does, between two lines of an update.
    with pytest.raises(ClosedError):
        workers.collect([0], messages.Collect(0))
