"""Messages and errors of workers, in real processes."""

import threading
from typing import Any

import pytest
from pool_tools import await_message, obey
from support.processes import SOON, wait_until

from marl_collect.errors import WorkerError
from marl_collect.processes import WorkerPool
from marl_collect.processes.launcher import StartMethod
from marl_collect.processes.status_board import STEPS

# Workers get what is defined here by value: importing this file would import pytest.


def test_only_the_chosen_workers_are_waited_for(pool: WorkerPool) -> None:
    pool.broadcast(lambda worker, argument: argument)
    assert pool.receive([2]) == (2, "c")
    assert pool.receive([1]) == (1, "b")
    assert pool.receive() == (0, "a")
    assert not pool.poll()
    pool.send(1, lambda worker, argument: argument)
    assert pool.poll(wait=SOON)
    assert not pool.poll([0, 2])
    assert pool.receive() == (1, "b")
    assert not await_message(pool, seconds=0)


def test_workers_that_are_ready_take_turns(pool: WorkerPool) -> None:
    def send_many(worker: Any, argument: Any) -> None:
        for _ in range(20):
            worker.send(argument)
        worker.line.cells[STEPS] = 1

    pool.broadcast(send_many)
    wait_until(lambda: all(pool.steps(i) for i in range(3)))
    order = [pool.receive()[0] for _ in range(9)]
    assert order == [0, 1, 2] * 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, StopIteration])
def test_an_exception_with_a_special_meaning_is_a_worker_error(
    pool: WorkerPool, kind: type[BaseException]
) -> None:
    def fail(worker: Any, argument: Any) -> None:
        raise kind(3)

    pool.send(0, fail)
    with pytest.raises(WorkerError, match=f"{kind.__name__}: 3"):
        pool.receive()


def test_a_message_that_cannot_be_pickled_fails_in_the_worker(pool: WorkerPool) -> None:
    pool.send(0, lambda worker, argument: threading.Lock())
    with pytest.raises(TypeError, match="lock") as excinfo:
        pool.receive()
    assert isinstance(excinfo.value.__cause__, WorkerError)


def test_messages_from_many_threads_stay_whole(pool: WorkerPool) -> None:
    def send(i: int) -> None:
        payload = bytes([i]) * 300_000
        for _ in range(10):
            pool.send(0, lambda worker, argument: payload == bytes([i]) * 300_000)

    threads = [threading.Thread(target=send, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    assert [pool.receive() for _ in range(60)] == [(0, True)] * 60
    for thread in threads:
        thread.join()


def test_what_cannot_be_started_or_received_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="workers is empty"):
        pool.receive([])
    with pytest.raises(ValueError, match="arguments is empty"):
        WorkerPool(obey, [])
    with pytest.raises(TypeError, match="worker 1 cannot be sent.*lock"):
        WorkerPool(obey, [0, threading.Lock()])


def test_a_main_that_cannot_be_unpickled_fails_with_its_traceback(
    start_method: StartMethod,
) -> None:
    class Vicious:
        def __reduce__(self) -> Any:
            return int, ("not a number",)

    with (
        WorkerPool(obey, [Vicious()], start_method=start_method) as pool,
        pytest.raises(ValueError, match="not a number") as excinfo,
    ):
        pool.receive()
    assert isinstance(excinfo.value.__cause__, WorkerError)
    assert excinfo.value.__cause__.phase == "start"
