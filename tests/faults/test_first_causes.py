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
from fault_tools import (
    KINDS,
    Hang,
    as_soon_as,
    be_patient,
    constant,
    faulty,
    press_ctrl_c,
)
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
from marl_collect.errors import ClosedError, WorkerError, worker_error_of
from marl_collect.parallel_env import ParallelEnv
from marl_collect.processes.context import result
from marl_collect.processes.status_board import PREEMPT

every_kind = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[], CountingEnv]


def hang() -> None:
    threading.Event().wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    wait_for_ends(monkeypatch)
    return Clock(monkeypatch)


def hanging_in_close(*args: Any, **kwargs: Any) -> Make:
    """Return a factory whose environments have a fault, and hang in ``close``."""

    def make() -> CountingEnv:
        env = CountingEnv(deaths=False, fault=Fault(*args, **kwargs))
        env.close = hang  # type: ignore[method-assign]
        return env

    return make


def broken_after(number: int) -> Make:
    """Return a factory that raises for its environment ``number`` in a process."""
    built = 0

    def make() -> CountingEnv:
        nonlocal built
        built += 1
        if built > number:
            raise CountingError("no such world")
        env = CountingEnv()
        env.close = hang  # type: ignore[method-assign]
        return env

    return make


def place_of(error: BaseException) -> tuple[int, str | None, int | None]:
    cause = worker_error_of(error)
    assert cause is not None
    return cause.worker, cause.phase, cause.environment


def stepping(collector: Any) -> None:
    while True:  # An async collector may yield any number of batches of other workers.
        collector.next()


# The failure is reported before environments are closed


@every_kind
def test_the_error_of_a_factory_is_raised_if_built_environments_hang_in_close(
    kind: Any,
) -> None:
    with pytest.raises(CountingError, match="no such world") as excinfo:
        kind(broken_after(2), num_workers=1, envs_per_worker=4, frames_per_batch=40)
    assert place_of(excinfo.value) == (0, "create", 2)


def test_the_error_of_a_factory_of_parallel_env_is_raised_if_others_hang() -> None:
    with pytest.raises(CountingError, match="no such world") as excinfo:
        ParallelEnv(4, broken_after(2), num_processes=1)
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


@every_kind
@pytest.mark.parametrize("phase", ["create", "reset", "step"])
def test_errors_name_the_environment_as_the_user_counts_it(
    kind: Any, phase: Any
) -> None:
    def second_of_two() -> Make:
        built = 0

        def make() -> CountingEnv:
            nonlocal built
            built += 1
            broken = Fault("raise", phase) if built == 2 else None
            return CountingEnv(deaths=False, fault=broken)

        return make

    def collect() -> None:
        factories = [CountingEnv, second_of_two()]
        collector = kind(factories, envs_per_worker=2, frames_per_batch=40)
        while True:  # The other worker may be first in an asynchronous collector.
            collector.next()

    with pytest.raises(CountingError, match=f"fault in {phase}") as excinfo:
        collect()
    assert place_of(excinfo.value) == (1, phase, 3)
    cause = worker_error_of(excinfo.value)
    assert cause is not None
    assert "counting.py" in cause.remote_traceback
    assert not any("in this process" in note for note in notes_of(excinfo.value))


@pytest.mark.parametrize("phase", ["create", "reset", "step"])
def test_errors_of_parallel_env_name_the_environment(phase: Any) -> None:
    factories: list[Make] = [CountingEnv] * 4
    factories[3] = lambda: CountingEnv(deaths=False, fault=Fault("raise", phase))
    with pytest.raises(CountingError, match=f"fault in {phase}") as excinfo:
        ParallelEnv(4, factories, num_processes=2).rollout(5)
    assert place_of(excinfo.value) == (1, phase, 3)


def notes_of(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@every_kind
def test_a_hang_in_a_reset_names_the_environment(
    kind: Any, clock: Clock, tmp_path: Path
) -> None:
    hung = tmp_path / "hung"
    clock.runs_when = hung.exists
    stuck = Fault(hangs(hung), "reset")
    factories: list[Make] = [CountingEnv, lambda: CountingEnv(fault=stuck)]
    with pytest.raises(WorkerError, match="reset of environment 1") as excinfo:
        kind(factories, num_workers=1, frames_per_batch=40, timeout=LIMIT).next()
    assert place_of(excinfo.value) == (0, "reset", 1)


# Hangs in commands


@every_kind
def test_a_hang_in_a_replay_is_noticed(kind: Any, clock: Clock, tmp_path: Path) -> None:
    hung = tmp_path / "hung"
    clock.runs_when = hung.exists

    def make() -> CountingEnv:
        return CountingEnv(deaths=False, min_length=50, max_length=60)

    def hanging() -> CountingEnv:
        env = make()
        env._fault = Fault(hangs(hung), "step", at=5)
        return env

    with kind(make, num_workers=1, frames_per_batch=10, seed=1) as collector:
        collector.next()
        state = collector.state_dict()
    other = kind(hanging, num_workers=1, frames_per_batch=10, seed=1, timeout=LIMIT)
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="hung 100 s in a command"):
        other.load_state_dict(state)
    assert time.monotonic() - begin < SOON / 2
    with pytest.raises(WorkerError):
        other.next()


def test_a_long_replay_is_no_hang(clock: Clock) -> None:
    """A quarter of the limit passes after each step, so several limits in all."""

    def make() -> CountingEnv:
        return CountingEnv(deaths=False, min_length=50, max_length=60)

    def slow() -> CountingEnv:
        env = make()
        env._fault = Fault("sleep", "step", seconds=0.1, repeat=True)
        return env

    with MultiSyncCollector(make, frames_per_batch=10, seed=1) as collector:
        collector.next()
        state = collector.state_dict()
    with MultiSyncCollector(slow, frames_per_batch=10, seed=1, timeout=LIMIT) as other:
        clock.runs_when = lambda: not clock.quiet
        other.load_state_dict(state)
        assert other.frames == 10
        assert clock.now > 2 * LIMIT


def test_a_hang_in_an_attribute_of_parallel_env_is_noticed(
    clock: Clock, tmp_path: Path
) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    clock.runs_when = lambda: all(file.exists() for file in files)

    def pondering(file: Path) -> Make:
        def make() -> CountingEnv:
            env = CountingEnv()
            env.ponder = hangs(file)  # type: ignore[attr-defined]
            return env

        return make

    factories = [pondering(file) for file in files]
    env = ParallelEnv(2, factories, num_processes=2, timeout=LIMIT)
    with pytest.raises(WorkerError, match="hung 100 s in a command"):
        env.call("ponder")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


# Ctrl-C


@every_kind
@pytest.mark.usefixtures("patient")
def test_ctrl_c_with_a_stopped_worker_takes_seconds(kind: Any, tmp_path: Path) -> None:
    hang = Hang(tmp_path)
    collector = kind([faulty(hang, at=3)] * 2, frames_per_batch=40)
    pids = collector.worker_pids

    def stop_and_interrupt() -> None:
        suspend(pids[1])
        press_ctrl_c()

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        as_soon_as(lambda: hang.count == 2, stop_and_interrupt)
        collector.next()
    wait_until_gone(pids)


@pytest.mark.usefixtures("patient")
def test_ctrl_c_with_a_stopped_process_of_parallel_env_takes_seconds(
    tmp_path: Path,
) -> None:
    hang = Hang(tmp_path)
    env = ParallelEnv(2, faulty(hang, at=0), num_processes=2)
    engine: Any = env.engine()
    pids = engine.pids
    with pytest.raises(KeyboardInterrupt), env:  # noqa: PT012
        root = env.rand_action(env.reset())
        suspend(pids[1])
        as_soon_as(lambda: hang.count == 1, press_ctrl_c)
        env.step(root)
    wait_until_gone(pids)


@every_kind
def test_a_stopped_worker_does_not_delay_a_shutdown(kind: Any) -> None:
    collector = kind([CountingEnv] * 2, frames_per_batch=40)
    pids = collector.worker_pids
    suspend(pids[1])
    begin = time.monotonic()
    collector.shutdown(1000)
    assert time.monotonic() - begin < SOON
    wait_until_gone(pids)


@every_kind
def test_after_ctrl_c_a_collector_says_that_it_is_closed(
    kind: Any, tmp_path: Path
) -> None:
    hang = Hang(tmp_path)
    collector = kind(faulty(hang, at=3), frames_per_batch=40)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        as_soon_as(lambda: hang.count == 1, press_ctrl_c)
        collector.next()
    for use in (
        collector.next,
        collector.reset,
        collector.state_dict,
        collector.update_policy_weights_,
        lambda: collector.load_state_dict({}),
    ):
        with pytest.raises(ClosedError, match="Ctrl-C"):
            use()
    assert "closed" in repr(collector)


def interrupted(batch: Any) -> None:
    raise KeyboardInterrupt


def test_a_collector_in_this_process_gives_its_state_after_shutdown() -> None:
    options: Any = {"frames_per_batch": 10, "seed": 3, "max_frames_per_traj": 1000}
    with Collector(CountingEnv, constant(), **options) as collector:
        collector.next()
    state = collector.state_dict()
    with Collector(CountingEnv, constant(), **options) as local_collector:
        local_collector.next()
        expected = local_collector.next()
    with Collector(CountingEnv, constant(), **options) as resumed:
        resumed.load_state_dict(state)
        assert (resumed.next() == expected).all()


def test_a_collector_interrupted_within_a_batch_has_no_state() -> None:
    calls = 0

    def make() -> CountingEnv:
        env = CountingEnv()
        step = env.step_row

        def interrupt() -> None:
            nonlocal calls
            calls += 1
            if calls == 15:
                raise KeyboardInterrupt
            step()

        env.step_row = interrupt  # type: ignore[method-assign]
        return env

    collector = Collector(make, frames_per_batch=10)
    collector.next()
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    with pytest.raises(ClosedError, match="within a batch"):
        collector.state_dict()
    with pytest.raises(ClosedError, match="Ctrl-C"):
        collector.next()


def test_async_shutdown_does_not_repeat_ctrl_c() -> None:
    collector = Collector(CountingEnv, frames_per_batch=10, postproc=interrupted)
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


class WaitingEnv(CountingEnv):  # type: ignore[misc]
    """Begins its second episode once a file exists."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.begun = 0

    def reset_row(self, seed: int) -> None:
        self.begun += 1
        if self.begun > 1:
            wait_until(self.file.exists)
        super().reset_row(seed)


def test_a_reply_to_a_call_that_raised_answers_no_other_call(tmp_path: Path) -> None:
    file = tmp_path / "go on"
    with MultiSyncCollector(
        [
            lambda: WaitingEnv(file),
            lambda: CountingEnv(fault=Fault("raise", "reset", 1)),
        ],
        frames_per_batch=2,
    ) as collector:
        collector.next()
        with pytest.raises(CountingError):
            collector.reset()  # Worker 0 has not replied yet.
        file.touch()
        (begun,) = workers_of(collector).call("attribute", "env", "begun", workers=[0])
        assert result(begun, 0) == [2]
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
    factories = [hanging_in_close("raise", at=3), lambda: CountingEnv(fault=CRASH)]
    collector = kind(factories, frames_per_batch=40)
    with pytest.raises(CountingError):
        stepping(collector)


CRASH = Fault("exit", "close")


SLOW = Fault("sleep", seconds=0.01, repeat=True)


@every_kind
def test_shutdown_in_a_signal_handler_waits_for_workers_only(kind: Any) -> None:
    """It once waited for the lock that the interrupted call of its thread holds."""
    collector = kind([lambda: CountingEnv(fault=SLOW)] * 2, frames_per_batch=1000)
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
    collector = MultiAsyncCollector(CountingEnv, constant(), frames_per_batch=10)
    collector.next()
    workers = workers_of(collector)
    workers.close(2.0)  # As another thread does, between two lines of an update.
    with pytest.raises(ClosedError):
        workers.collect([0], messages.Collect(0))
