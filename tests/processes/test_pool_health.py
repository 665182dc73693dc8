"""Deaths, hangs and restarts of workers, which are really killed and stopped."""

import gc
import os
import pickle
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection  # noqa: TID251 - what it uses
from typing import Any

import pytest
from pool_tools import (
    await_message,
    be_up,
    exit_codes,
    hang,
    hold,
    obey,
    receive_within,
)
from support.clocks import LIMIT, Clock, beside, wait_for_ends
from support.processes import SOON, suspend

from marl_collect.errors import WorkerError
from marl_collect.processes import Phase, WorkerContext, WorkerPool, worker_handle
from marl_collect.processes.launcher import StartMethod
from marl_collect.processes.status_board import MESSAGES_READ, STEPS, StatusBoard
from marl_collect.processes.worker_handle import WorkerHandle


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    wait_for_ends(monkeypatch)
    return Clock(monkeypatch)


# Workers get what is defined here by value: importing this file would import pytest.


class Batch:
    """What a caller of the pool holds while it waits."""


def fail(worker: Any, argument: Any) -> None:
    raise ValueError("one of two")


@pytest.mark.parametrize("fault", [lambda *_: os._exit(3), fail], ids=["exit", "raise"])
def test_errors_of_workers_that_fail_together_keep_no_frame(
    any_pool: WorkerPool, fault: Callable[..., object]
) -> None:
    """Frames of callers hold batches, which are to be free when they are dropped."""

    def wait_for_failure() -> "weakref.ref[Batch]":
        batch = Batch()
        try:
            any_pool.receive()
        except (WorkerError, ValueError) as error:
            for handled in (error, error.__cause__):  # As before a replacement.
                if handled is not None:
                    handled.__traceback__ = None
        return weakref.ref(batch)

    be_up(any_pool)
    for worker in (0, 1):
        any_pool.send(worker, fault)
    for worker in (0, 1):
        assert any_pool.poll([worker], SOON)
    gc.disable()
    try:
        assert wait_for_failure()() is None
    finally:
        gc.enable()


def test_a_main_function_that_returns_early_is_reported(
    start_method: StartMethod,
) -> None:
    with (
        WorkerPool(
            lambda worker, argument: None, [0], start_method=start_method
        ) as pool,
        pytest.raises(WorkerError, match="ended unexpectedly in close: exit code 0"),
    ):
        pool.receive()


def promise_much(worker: WorkerContext, then: Callable[[], None]) -> None:
    os.write(worker.connection.fileno(), (1000).to_bytes(4, "big") + b"a few")
    then()


def test_a_message_cut_short_by_death_is_a_death() -> None:
    with (
        WorkerPool(promise_much, [lambda: os._exit(3)]) as pool,
        pytest.raises(WorkerError, match="Worker 0 .* exit code 3"),
    ):
        pool.receive()


def test_a_worker_that_stops_in_the_middle_of_a_message_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_handle, "SOCKET_SECONDS", 1)
    with WorkerPool(promise_much, [hold]) as pool:
        with pytest.raises(WorkerError, match="stopped in the middle of a message"):
            pool.receive()
        assert exit_codes(pool)[0] is not None


def test_a_busy_worker_is_waited_for_until_it_reads_a_large_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(worker: Any, argument: Any) -> str:
        worker.line.enter(Phase.STEP)
        threading.Event().wait(2.5)
        return "done"

    monkeypatch.setattr(worker_handle, "SOCKET_SECONDS", 1)
    large = bytes(5_000_000)
    with WorkerPool(obey, [0]) as pool:
        be_up(pool)
        pool.send(0, work)
        pool.send(0, lambda worker, argument: len(large))
        assert [pool.receive()[1] for _ in range(2)] == ["done", len(large)]


@pytest.mark.parametrize("each", [False, True], ids=["broadcast", "send_each"])
def test_workers_that_hang_while_a_large_message_is_sent_are_given_up_after_one_wait(
    clock: Clock, each: bool
) -> None:
    with WorkerPool(obey, [0, 1, 2], timeout=LIMIT) as pool:
        be_up(pool)
        for pid in pool.pids[:2]:
            suspend(pid)
        # Worker 2 does not wait for the others.
        clock.runs_when = lambda: (
            pool._handles[2].is_ready and len(clock.quiet) > 0 and clock.quiet <= {0, 1}
        )
        large = bytes(5_000_000)

        def size(worker: Any, argument: Any) -> int:
            return len(large)

        if each:
            pool.send_each(dict.fromkeys(range(3), size))
        else:
            pool.broadcast(size)
        assert clock.passed < 2 * LIMIT
        for worker in range(2):
            for _ in range(2):  # It is not forgotten.
                with pytest.raises(WorkerError, match="hung 100 s"):
                    pool.receive([worker])
            assert exit_codes(pool)[worker] is not None
        assert pool.receive([2]) == (2, len(large))


@pytest.mark.parametrize("large", [False, True], ids=["receive", "send"])
def test_a_stopped_worker_is_given_up_where_there_is_no_limit(
    clock: Clock, *, large: bool
) -> None:
    content = bytes(5_000_000 * large)
    with WorkerPool(obey, [0], timeout=None) as pool:
        be_up(pool)
        suspend(pool.pids[0])
        clock.runs_when = lambda: clock.quiet == {0}
        pool.send(0, lambda worker, argument: len(content))
        with pytest.raises(WorkerError, match="hung 60 s .*SIGSTOP"):
            pool.receive()
        assert exit_codes(pool) == (-signal.SIGABRT,)


def runs_while_1_hangs(clock: Clock, pool: WorkerPool) -> None:
    """Let time pass while worker 1 is the only one without progress, in its step."""
    clock.runs_when = lambda: (
        clock.quiet == {1} and pool.status_board.lines[1].phase is Phase.STEP
    )


def test_a_hanging_worker_is_noticed_while_others_always_have_messages(
    pool: WorkerPool, clock: Clock
) -> None:
    def flood(worker: Any, argument: Any) -> None:
        worker.line.enter(Phase.STEP)
        for i in count():
            worker.line.cells[STEPS] = i
            worker.send(i)

    be_up(pool)
    runs_while_1_hangs(clock, pool)
    pool.send(1, hang)
    pool.send(0, flood)
    with pytest.raises(WorkerError, match="Worker 1 .* hung"):  # noqa: PT012
        while True:
            await_message(pool, [0])
            receive_within(pool, LIMIT)
    assert pool.receive([0])[0] == 0  # Nothing of the other was lost.
    pool.close(timeout=0.1)


def test_a_worker_that_hangs_in_a_command_is_noticed(
    pool: WorkerPool, clock: Clock
) -> None:
    """Also if its main function writes no phase."""
    be_up(pool)
    cells = pool.status_board.lines[0].cells
    clock.runs_when = lambda: cells[MESSAGES_READ] == 2
    pool.send(0, lambda worker, argument: threading.Event().wait())
    with pytest.raises(WorkerError, match="hung 100 s in a command"):
        receive_within(pool, LIMIT)


def test_a_stopped_worker_that_continues_in_time_is_not_a_hang(
    any_pool: WorkerPool, clock: Clock
) -> None:
    be_up(any_pool)
    pid = any_pool.pids[0]
    suspend(pid)
    any_pool.send(0, lambda worker, argument: "back")

    def go_on() -> None:
        clock.pass_slowly(0.8 * LIMIT)
        os.kill(pid, signal.SIGCONT)

    with beside(go_on):
        assert receive_within(any_pool, LIMIT) == (0, "back")


def test_check_sees_a_failure_and_a_death_and_keeps_messages(pool: WorkerPool) -> None:
    def fail(worker: Any, argument: Any) -> None:
        raise LookupError

    be_up(pool)
    pool.send(2, lambda worker, argument: "kept")
    await_message(pool, [2])
    pool.check()
    pool.send(0, fail)
    await_message(pool, [0])
    with pytest.raises(LookupError):
        pool.check()
    os.kill(pool.pids[1], signal.SIGKILL)
    await_message(pool, [1])
    with pytest.raises(WorkerError, match="Worker 1"):
        pool.check([1])
    assert pool.receive([2]) == (2, "kept")


def test_a_restart_forgets_the_old_failure_and_keeps_the_steps(
    pool: WorkerPool,
) -> None:
    def fail(worker: Any, argument: Any) -> None:
        worker.line.cells[STEPS] = 100
        raise LookupError

    pool.send(1, fail)
    with pytest.raises(LookupError):
        pool.receive()
    pool.restart(1, "new")
    pool.send(1, lambda worker, argument: argument)
    assert pool.receive() == (1, "new")
    cells = pool.status_board.lines[1].cells
    assert (cells[STEPS], cells[MESSAGES_READ]) == (100, 1)


class DyingChild:
    """Writes its last messages just before its exit code is read."""

    pid = 123
    sentinel = 0

    def __init__(self, last_words: list[object]) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())  # To a WorkerHandle.
        self._theirs = Connection(theirs.detach())
        self._last_words = last_words

    def poll(self) -> int:
        for message in self._last_words:
            self._theirs.send_bytes(pickle.dumps(message))
        self._last_words = []
        self._theirs.close()
        return -9

    def describe_end(self) -> str:
        return "as it should"


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_messages_written_between_two_checks_are_read_before_the_death(
    reads_ahead: bool,
) -> None:
    status_board = StatusBoard.create(1)
    child: Any = DyingChild(["first", "second"])
    handle = WorkerHandle(0, status_board.lines[0], child, child.connection)
    if reads_ahead:
        handle.read_ahead()
    assert [handle.next_message(), handle.next_message()] == ["first", "second"]
    for read in (handle.next_message, handle.read_ahead, handle.next_message):
        with pytest.raises(WorkerError, match="unexpectedly in start: as it should"):
            read()
    status_board.close()
