"""Messages, errors and deaths, with real processes that are really killed."""

import ctypes
import gc
import os
import signal
import sys
import threading
import time

import cloudpickle
import pytest
from pool_tools import be_up, obey

from marl_collect.errors import ClosedError, WorkerError
from marl_collect.processes import Phase, WorkerContext, WorkerPool, worker_process
from marl_collect.processes.board import PHASE, STEPS

# Workers get what is defined here by value: importing this file would import pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 20.0  # Seconds; far above what any of this takes on a busy machine.


def hold(seconds: float = 1000.0) -> None:
    """Sleep in C and keep the interpreter lock: no Python thread can run."""
    ctypes.PyDLL(None).sleep(int(seconds))


def wait_for_phase(pool: WorkerPool, worker: int, phase: Phase) -> None:
    deadline = time.monotonic() + SOON
    while pool.progress(worker).phase is not phase:
        assert time.monotonic() < deadline, pool.progress(worker)
        assert not pool.poll([worker], wait=0.005), pool.receive([worker])


def hang(worker: WorkerContext, argument: object) -> None:
    worker.line.enter(Phase.STEP, environment=7)
    hold()


def test_each_worker_has_its_own_index_argument_and_process(any_pool):
    any_pool.broadcast(lambda worker, argument: (worker.index, argument, os.getpid()))
    replies = dict(any_pool.receive() for _ in range(3))
    assert replies == {i: (i, "abc"[i], any_pool.pids[i]) for i in range(3)}
    assert len({os.getpid(), *any_pool.pids}) == 4


def test_large_messages_pass_both_ways(pool):
    data = os.urandom(5_000_000)
    pool.send(1, lambda worker, argument: data)
    assert pool.receive() == (1, data)


def test_only_the_chosen_workers_are_waited_for(pool):
    pool.broadcast(lambda worker, argument: argument)
    assert pool.receive([2]) == (2, "c")
    assert pool.receive([1]) == (1, "b")
    assert pool.receive() == (0, "a")
    assert not pool.poll()


def test_workers_that_are_ready_take_turns(pool):
    def send_many(worker, argument):
        for _ in range(20):
            worker.send(argument)

    pool.broadcast(send_many)
    deadline = time.monotonic() + SOON
    while not all(pool.poll([i]) for i in range(3)):
        assert time.monotonic() < deadline
    order = [pool.receive()[0] for _ in range(9)]
    assert order == [0, 1, 2] * 3


def test_an_exception_is_raised_as_its_own_type_from_a_worker_error(any_pool):
    def fail(worker, argument):
        worker.line.enter(Phase.RESET, environment=5)
        raise LookupError("no such level")

    any_pool.send(1, fail)
    with pytest.raises(LookupError, match="no such level") as caught:
        any_pool.receive()
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.worker, cause.phase, cause.environment) == (1, "reset", 5)
    assert cause.pid == any_pool.pids[1]
    assert "in fail" in cause.remote_traceback
    with pytest.raises(LookupError):  # It is not forgotten.
        any_pool.receive([1])
    any_pool.send(0, lambda worker, argument: "fine")
    assert any_pool.receive([0]) == (0, "fine")


def test_an_exception_that_cannot_travel_is_a_worker_error(pool):
    def fail(worker, argument):
        raise ValueError(threading.Lock())

    pool.send(0, fail)
    with pytest.raises(WorkerError, match=r"Worker 0 .* failed: ValueError.*lock"):
        pool.receive()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, StopIteration])
def test_an_exception_with_a_meaning_of_its_own_is_a_worker_error(pool, kind):
    def fail(worker, argument):
        raise kind(3)

    pool.send(0, fail)
    with pytest.raises(WorkerError, match=f"{kind.__name__}: 3"):
        pool.receive()


def test_a_message_that_cannot_be_pickled_fails_in_the_worker(pool):
    pool.send(0, lambda worker, argument: threading.Lock())
    with pytest.raises(TypeError, match="lock") as caught:
        pool.receive()
    assert isinstance(caught.value.__cause__, WorkerError)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL .often"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
        (lambda: ctypes.string_at(0), "killed by SIGSEGV"),
        (os.abort, "killed by SIGABRT"),
        (lambda: os._exit(3), "exit code 3"),
    ],
    ids=["sigkill", "sigsegv", "null", "abort", "exit"],
)
def test_a_death_is_reported_at_once_with_its_cause_and_place(any_pool, fault, text):
    def die(worker, argument):
        worker.line.enter(Phase.STEP, environment=9)
        fault()

    be_up(any_pool)
    any_pool.send(1, die)
    start = time.monotonic()
    message = (
        rf"Worker 1 \(pid {any_pool.pids[1]}\) ended unasked in step of environment 9"
    )
    with pytest.raises(WorkerError, match=rf"{message}: .*{text}"):
        any_pool.receive()
    assert time.monotonic() - start < SOON / 2


def test_a_worker_that_is_killed_from_outside_is_reported(any_pool):
    be_up(any_pool)
    any_pool.send(2, hang)
    wait_for_phase(any_pool, 2, Phase.STEP)
    os.kill(any_pool.pids[2], signal.SIGKILL)
    with pytest.raises(WorkerError, match="Worker 2 .* in step of environment 7"):
        any_pool.receive()
    assert any_pool.exitcodes == (None, None, -signal.SIGKILL)


def test_a_main_that_returns_unasked_is_reported(start_method):
    with (
        WorkerPool(lambda worker, argument: None, [0], start_method=start_method) as p,
        pytest.raises(WorkerError, match="ended unasked in close: exit code 0"),
    ):
        p.receive()


def test_what_a_worker_sent_is_delivered_before_its_death(pool):
    def send_and_die(worker, argument):
        for i in range(10):
            worker.send(i)
        os.kill(os.getpid(), signal.SIGKILL)

    expected = 10
    pool.send(0, send_and_die)
    with pytest.raises(WorkerError, match="SIGKILL"):  # noqa: PT012
        for i in range(11):
            assert pool.receive() == (0, i)
            expected -= 1
    assert expected == 0


def test_a_message_cut_short_by_death_is_a_death(pool):
    def promise_much(worker, argument):
        os.write(worker.connection.fileno(), (1000).to_bytes(4, "big") + b"a few")
        os._exit(3)

    pool.send(0, promise_much)
    with pytest.raises(WorkerError, match="Worker 0 .* exit code 3"):
        pool.receive()


def test_a_worker_that_stops_in_the_middle_of_a_message_is_given_up(monkeypatch):
    def promise_much(worker, argument):
        os.write(worker.connection.fileno(), (1000).to_bytes(4, "big") + b"a few")
        hold()

    monkeypatch.setattr(worker_process, "SOCKET_SECONDS", 1)
    with WorkerPool(obey, [0]) as pool:
        pool.send(0, promise_much)
        with pytest.raises(WorkerError, match="stopped in the middle of a message"):
            pool.receive()
        assert pool.exitcodes[0] is not None


def test_a_worker_that_reads_nothing_of_a_large_message_is_given_up(monkeypatch):
    monkeypatch.setattr(worker_process, "SOCKET_SECONDS", 1)
    with WorkerPool(obey, [0]) as pool:
        be_up(pool)
        os.kill(pool.pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerError, match="read nothing of a message"):
            pool.send(0, bytes(5_000_000))
        assert pool.exitcodes[0] is not None


def test_sending_to_a_dead_worker_tells_through_receive(pool):
    be_up(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        pool.receive([0])
    pool.send(0, lambda worker, argument: None)
    with pytest.raises(WorkerError, match="SIGKILL"):
        pool.receive([0])


def test_a_worker_that_hangs_is_killed_though_it_is_stuck_in_c(capfd, start_method):
    message = r"Worker 1 .* hung 0.5 s in step of environment 7"
    with WorkerPool(obey, [0, 1], start_method=start_method) as pool:
        be_up(pool)
        pool.send(1, hang)
        with pytest.raises(WorkerError, match=message):
            pool.receive(timeout=0.5)
        assert pool.exitcodes[1] is not None
        with pytest.raises(WorkerError, match=message):  # It is not forgotten.
            pool.receive([1])
    assert "in hold" in capfd.readouterr().err


def test_a_hanging_worker_is_found_while_others_keep_answering(pool):
    be_up(pool)
    pool.send(1, hang)
    pool.send(0, lambda worker, argument: None)
    with pytest.raises(WorkerError, match="Worker 1 .* hung"):  # noqa: PT012
        while True:
            worker, _ = pool.receive(timeout=0.5)
            pool.send(worker, lambda worker, argument: threading.Event().wait(0.02))


def test_a_hanging_worker_is_found_though_others_always_have_something(pool):
    def flood(worker, argument):
        worker.line.enter(Phase.STEP)
        for i in range(100_000):
            worker.line.cells[STEPS] = i
            worker.send(i)

    be_up(pool)
    pool.send(1, hang)
    pool.send(0, flood)
    with pytest.raises(WorkerError, match="Worker 1 .* hung"):  # noqa: PT012
        while True:
            pool.poll([0], wait=SOON)
            pool.receive(timeout=0.3)
    assert pool.receive([0])[0] == 0  # Nothing of the other was lost.
    pool.close(timeout=0.1)


def test_progress_within_the_limit_is_no_hang(pool):
    def work_slowly(worker, argument):
        worker.line.enter(Phase.STEP)
        for step in range(8):
            worker.line.cells[STEPS] = step
            threading.Event().wait(0.2)
        return "done"

    be_up(pool)
    pool.send(0, work_slowly)
    assert pool.receive(timeout=1.0) == (0, "done")


def test_idle_workers_never_hang(pool):
    be_up(pool)
    pool.send(0, lambda worker, argument: threading.Event().wait(1.5))
    assert pool.receive(timeout=0.5) == (0, False)


def test_the_pauses_of_the_trainer_do_not_count(pool):
    def work(worker, argument):
        worker.line.enter(Phase.STEP)
        threading.Event().wait(1.0)
        return "done"

    be_up(pool)
    pool.send(0, work)
    wait_for_phase(pool, 0, Phase.STEP)
    pool.poll([1], wait=0.7)  # A learner at work.
    assert pool.receive(timeout=0.6) == (0, "done")


def test_a_stopped_worker_that_continues_in_time_just_continues(any_pool):
    be_up(any_pool)
    os.kill(any_pool.pids[0], signal.SIGSTOP)
    any_pool.send(0, lambda worker, argument: "back")
    assert not any_pool.poll(wait=0.5)
    threading.Timer(0.5, os.kill, (any_pool.pids[0], signal.SIGCONT)).start()
    assert any_pool.receive(timeout=SOON) == (0, "back")


def test_a_stopped_worker_that_does_not_read_its_message_hangs(pool):
    be_up(pool)
    os.kill(pool.pids[0], signal.SIGSTOP)
    pool.send(0, lambda worker, argument: "back")
    with pytest.raises(WorkerError, match="Worker 0 .* hung 0.4 s while idle"):
        pool.receive(timeout=0.4)


def test_check_sees_a_failure_and_a_death_and_keeps_messages(pool):
    def fail(worker, argument):
        raise LookupError

    be_up(pool)
    pool.send(2, lambda worker, argument: "kept")
    pool.poll([2], wait=SOON)
    pool.check()
    pool.send(0, fail)
    pool.poll([0], wait=SOON)
    with pytest.raises(LookupError):
        pool.check()
    os.kill(pool.pids[1], signal.SIGKILL)
    pool.poll([1], wait=SOON)
    with pytest.raises(WorkerError, match="Worker 1"):
        pool.check([1])
    assert pool.receive([2]) == (2, "kept")


def test_a_restarted_worker_takes_the_place_of_the_old_one(any_pool):
    be_up(any_pool)
    before = any_pool.pids
    any_pool.send(1, hang)
    wait_for_phase(any_pool, 1, Phase.STEP)
    any_pool.restart(1, "new")
    assert any_pool.exitcodes == (None, None, None)
    any_pool.broadcast(lambda worker, argument: argument)
    assert sorted(any_pool.receive() for _ in range(3)) == [
        (0, "a"),
        (1, "new"),
        (2, "c"),
    ]
    assert any_pool.pids[0] == before[0]
    assert any_pool.pids[1] != before[1]


def test_a_restart_forgets_the_old_failure_and_progress(pool):
    def fail(worker, argument):
        worker.line.cells[STEPS] = 100
        raise LookupError

    pool.send(1, fail)
    with pytest.raises(LookupError):
        pool.receive()
    pool.restart(1, "new")
    pool.send(1, lambda worker, argument: argument)
    assert pool.receive() == (1, "new")
    assert pool.progress(1).steps == 0


def test_close_is_quick_and_leaves_no_process(any_pool):
    be_up(any_pool)
    start = time.monotonic()
    assert any_pool.close() == ()
    assert time.monotonic() - start < 5
    assert any_pool.exitcodes == (0, 0, 0)
    assert any_pool.close() == ()
    with pytest.raises(ClosedError):
        any_pool.send(0, "x")
    with pytest.raises(ClosedError):
        any_pool.receive()


def test_close_ends_workers_that_do_not_listen(any_pool):
    def ignore_everything(worker, argument):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.line.enter(Phase.CREATE)
        hold()

    be_up(any_pool)
    any_pool.send(0, ignore_everything)
    any_pool.send(1, hang)
    wait_for_phase(any_pool, 0, Phase.CREATE)
    wait_for_phase(any_pool, 1, Phase.STEP)
    os.kill(any_pool.pids[2], signal.SIGSTOP)
    start = time.monotonic()
    any_pool.close(timeout=1.0)
    assert time.monotonic() - start < 1.0 + SOON / 2
    assert any_pool.exitcodes == (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGKILL)


def test_close_reads_what_workers_still_send_and_returns_their_failures(start_method):
    def main(worker, argument):
        try:
            worker.receive()
        finally:
            worker.line.enter(Phase.CLOSE, environment=1)
            worker.send(b"x" * 5_000_000)  # More than a socket holds.
            raise LookupError("while closing")

    with WorkerPool(main, [0], start_method=start_method) as pool:
        (error,) = pool.close()
    assert str(error).startswith("Worker 0 (pid ")
    assert "failed in close of environment 1: LookupError: while closing" in str(error)


def test_close_is_bounded_though_a_worker_never_stops_talking(start_method):
    def main(worker, argument):
        while True:
            worker.send(argument)

    with WorkerPool(main, [0], start_method=start_method) as pool:
        pool.receive()
        start = time.monotonic()
        pool.close(timeout=1.0)
        assert time.monotonic() - start < 1.0 + SOON / 2
    assert pool.exitcodes == (-signal.SIGTERM,)


def test_a_farewell_message_arrives_before_the_end(start_method):
    def main(worker, argument):
        message = worker.receive()
        assert worker.line.should_stop
        raise LookupError(message)

    with WorkerPool(main, [0], start_method=start_method) as pool:
        (error,) = pool.close(message="farewell")
    assert error.detail == "LookupError: farewell"


def test_close_from_another_thread_wakes_whoever_receives(pool):
    be_up(pool)
    timer = threading.Timer(0.3, pool.close)
    timer.start()
    with pytest.raises(ClosedError):
        pool.receive()
    timer.join()
    assert pool.exitcodes == (0, 0, 0)


def test_a_forgotten_pool_ends_its_workers(start_method):
    pool = WorkerPool(obey, [0], start_method=start_method)
    pidfd = os.pidfd_open(pool.pids[0])
    del pool
    os.set_blocking(pidfd, False)
    with pytest.raises(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, 0)
    os.close(pidfd)


def test_fifty_cycles_leave_no_file_and_no_process(start_method):
    def count() -> tuple[int, int]:
        gc.collect()  # Of what other tests have left.
        tasks = os.listdir(f"/proc/{os.getpid()}/task")
        children = 0
        for task in tasks:
            with open(f"/proc/self/task/{task}/children") as file:
                children += len(file.read().split())
        return len(os.listdir("/proc/self/fd")), children

    def cycle() -> None:
        with WorkerPool(obey, [0, 1], start_method=start_method) as pool:
            pool.broadcast(lambda worker, argument: None)
            pool.receive()

    cycle()
    before = count()
    for _ in range(50 if start_method == "forkserver" else 5):
        cycle()
    assert count() == before


def test_messages_from_many_threads_stay_whole(pool):
    def send(i: int) -> None:
        data = bytes([i]) * 300_000
        for _ in range(10):
            pool.send(0, lambda worker, argument: data == bytes([i]) * 300_000)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    assert [pool.receive() for _ in range(60)] == [(0, True)] * 60
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("start_method", ["fork", "Spawn", "thread"])
def test_an_unknown_start_method_is_refused(start_method):
    with pytest.raises(ValueError, match=f"start_method.*{start_method}"):
        WorkerPool(obey, [0], start_method=start_method)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
@pytest.mark.parametrize("option", ["timeout", "start_timeout"])
def test_a_time_limit_that_is_not_positive_is_refused(option, seconds):
    with pytest.raises(ValueError, match=f"^{option} must be a positive number"):
        WorkerPool(obey, [0], **{option: seconds})


def test_waiting_for_no_worker_is_refused(pool):
    with pytest.raises(ValueError, match="workers is empty"):
        pool.receive([])


def test_no_arguments_are_refused():
    with pytest.raises(ValueError, match="arguments is empty"):
        WorkerPool(obey, [])


def test_an_argument_that_cannot_be_pickled_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="worker 1 cannot be sent.*lock"):
        WorkerPool(obey, [0, threading.Lock()])


def test_a_main_that_cannot_be_unpickled_fails_with_its_traceback(start_method):
    class Vicious:
        def __reduce__(self):
            return int, ("not a number",)

    with (
        WorkerPool(obey, [Vicious()], start_method=start_method) as pool,
        pytest.raises(ValueError, match="not a number") as caught,
    ):
        pool.receive()
    assert isinstance(caught.value.__cause__, WorkerError)
    assert caught.value.__cause__.phase == "start"


def test_a_slow_start_is_under_its_own_limit(start_method):
    def main(worker, argument):
        worker.line.enter(Phase.CREATE)
        threading.Event().wait(1.0)
        worker.send("up")
        worker.receive()

    with WorkerPool(main, [0], start_method=start_method, timeout=0.2) as pool:
        assert pool.receive() == (0, "up")
    with (
        WorkerPool(main, [0], start_method=start_method, start_timeout=0.6) as pool,
        pytest.raises(WorkerError, match="hung 0.6 s in"),
    ):
        pool.receive()


def test_the_progress_of_a_worker_can_be_read_at_any_time(pool):
    def step(worker, argument):
        cells = worker.line.cells
        cells[PHASE] = Phase.STEP
        cells[STEPS] = 41
        worker.receive()

    pool.send(0, step)
    deadline = time.monotonic() + SOON
    while pool.progress(0).steps != 41:
        assert time.monotonic() < deadline
    assert pool.progress(1).steps == 0
