"""Pools close quickly, within a time limit, and leave nothing behind."""

import os
import signal
import threading
import time
from typing import Any

import pytest
from pool_tools import be_up, exit_codes, hang, hold, obey, wait_for_phase
from support.clocks import ClosingClock
from support.processes import SOON, suspend
from support.scripts import run_python

from marl_collect.errors import ClosedError
from marl_collect.processes import Phase, WorkerPool
from marl_collect.processes.launcher import StartMethod

# Workers get what is defined here by value: importing this file would import pytest.


def test_close_is_quick_and_leaves_no_process(any_pool: WorkerPool) -> None:
    be_up(any_pool)
    start = time.monotonic()
    assert any_pool.close(timeout=20 * SOON) == ()
    assert time.monotonic() - start < SOON
    assert exit_codes(any_pool) == (0, 0, 0)
    assert any_pool.close() == ()
    with pytest.raises(ClosedError):
        any_pool.send(0, "x")
    with pytest.raises(ClosedError):
        any_pool.receive()


def closes_after_the_end_of(
    worker: int, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the time for SIGTERM pass at once, and that for SIGKILL after an end."""
    clock = ClosingClock(
        monkeypatch,
        lambda: clock.leaps == 0 or pool._handles[worker].exitcode is not None,
    )


def test_close_ends_workers_that_do_not_listen(
    any_pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore_everything(worker: Any, argument: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.line.enter(Phase.CREATE)
        hold()

    be_up(any_pool)
    any_pool.send(0, ignore_everything)
    any_pool.send(1, hang)
    wait_for_phase(any_pool, 0, Phase.CREATE)
    wait_for_phase(any_pool, 1, Phase.STEP)
    suspend(any_pool.pids[2])
    closes_after_the_end_of(1, any_pool, monkeypatch)
    start = time.monotonic()
    any_pool.close(timeout=1000.0)
    assert time.monotonic() - start < SOON
    assert exit_codes(any_pool) == (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL)


def test_close_reads_what_workers_still_send_and_returns_their_failures(
    start_method: StartMethod,
) -> None:
    def main(worker: Any, argument: Any) -> None:
        try:
            worker.receive()
        finally:
            worker.line.enter(Phase.CLOSE, environment=1)
            worker.send(b"x" * 5_000_000)  # More than a socket holds.
            raise LookupError("while closing")

    with WorkerPool(main, [0, 1], start_method=start_method) as pool:
        errors = pool.close(timeout=20 * SOON)
    assert sorted(error.worker for error in errors) == [0, 1]
    text = "failed in close of environment 1: LookupError: while closing"
    assert all(text in str(error) for error in errors)


def test_close_has_a_time_limit_if_a_worker_never_stops_sending(
    start_method: StartMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(worker: Any, argument: Any) -> None:
        while True:
            worker.send(argument)

    with WorkerPool(main, [0], start_method=start_method) as pool:
        pool.receive()
        closes_after_the_end_of(0, pool, monkeypatch)
        start = time.monotonic()
        pool.close(timeout=1000.0)
        assert time.monotonic() - start < SOON
    assert exit_codes(pool) == (-signal.SIGTERM,)


def test_close_from_another_thread_wakes_a_receiving_thread(pool: WorkerPool) -> None:
    be_up(pool)
    timer = threading.Timer(0.3, pool.close, (20 * SOON,))
    timer.start()
    with pytest.raises(ClosedError):
        pool.receive()
    timer.join()
    assert exit_codes(pool) == (0, 0, 0)


def test_a_forgotten_pool_ends_its_workers(start_method: StartMethod) -> None:
    pool = WorkerPool(obey, [0], start_method=start_method)
    pidfd = os.pidfd_open(pool.pids[0])
    del pool
    os.set_blocking(pidfd, False)
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, 0)
    os.close(pidfd)


CYCLES = """
import os, sys
from marl_collect.processes import WorkerPool

start_method, cycles = sys.argv[1], int(sys.argv[2])

def answer(worker, argument):
    while True:
        worker.send(worker.receive())

def cycle():
    with WorkerPool(answer, [0, 1], start_method=start_method) as pool:
        pool.broadcast("ping")
        pool.receive()

def count():
    children = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            children += len(file.read().split())
    return len(os.listdir("/proc/self/fd")), children

cycle()
before = count()
for _ in range(cycles):
    cycle()
print(before == count(), before, count())
"""


@pytest.mark.parametrize(("start_method", "cycles"), [("forkserver", 50), ("spawn", 5)])
def test_fifty_cycles_leave_no_file_and_no_process(
    start_method: StartMethod, cycles: int
) -> None:
    process = run_python("-c", CYCLES, start_method, str(cycles), interpreter=True)
    assert process.stdout.startswith("True"), process.stdout + process.stderr


def test_close_does_not_wait_for_a_fork_server_that_is_stopped() -> None:
    """The server reports the ends of workers, so without it none seems to end."""
    pool = WorkerPool(obey, [0, 1], start_method="forkserver")
    pool.send(0, lambda worker, argument: os.getppid())
    _, server = pool.receive()
    suspend(server)
    begin = time.monotonic()
    assert pool.close(timeout=20 * SOON) == ()
    assert time.monotonic() - begin < SOON
    assert exit_codes(pool) == (0, 0)
    with WorkerPool(obey, [0], start_method="forkserver") as another:
        another.send(0, lambda worker, argument: os.getppid())
        assert another.receive()[1] == server


# Registered first, so it runs after the hooks of the package.
AT_EXIT = """\
import atexit
import threading

began, exiting = threading.Event(), threading.Event()

def last():
    exiting.set()
    thread.join()

atexit.register(last)

from marl_collect.processes import WorkerPool, pool, starting

def listen(worker, argument):
    worker.receive()

def late(function):
    def wrapper(*args, **kwargs):
        began.set()
        exiting.wait()
        return function(*args, **kwargs)
    return wrapper

def waiting(function):
    def wrapper(*args, **kwargs):
        began.set()
        return function(*args, **kwargs)
    return wrapper

def early(function):
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        began.set()
        exiting.wait()
        return result
    return wrapper

WHERE

def run():
    WorkerPool(listen, [0, 1], start_method=METHOD).receive()
    print("survived")

thread = threading.Thread(target=run, daemon=True)
thread.start()
began.wait()
"""
PLACES = {
    "before the first start": "starting.launch = late(starting.launch)",
    "after the first start": "starting.launch = early(starting.launch)",
    "after all starts": "pool.start_workers = early(pool.start_workers)",
    "before it is used": "WorkerPool.receive = late(WorkerPool.receive)",
    "while it waits": "WorkerPool.receive = waiting(WorkerPool.receive)",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_daemon_that_starts_workers_ends_with_the_program_in_silence(
    place: str, start_method: StartMethod
) -> None:
    code = AT_EXIT.replace("WHERE", PLACES[place]).replace("METHOD", repr(start_method))
    done = run_python("-c", code, interpreter=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
