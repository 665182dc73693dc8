"""Main functions of workers in tests, and how to wait for them."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
from support.processes import SOON, wait_until

from marl_collect.processes import Phase, WorkerContext, WorkerPool

# Workers get what is defined here by value: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def obey(worker: WorkerContext, argument: Any) -> None:
    """Call each function that arrives, and send back its result."""
    while True:
        worker.send(worker.receive()(worker, argument))


def be_up(pool: WorkerPool) -> None:
    """Wait until all workers run and wait for a message."""
    pool.broadcast(lambda worker, argument: None)
    for _ in range(len(pool)):
        pool.receive()
    lines = pool.status_board.lines
    wait_until(lambda: all(line.phase is Phase.IDLE for line in lines))


def exit_codes(pool: WorkerPool) -> tuple[int | None, ...]:
    return tuple(handle.exitcode for handle in pool._handles)


def await_message(
    pool: WorkerPool, workers: Iterable[int] | None = None, seconds: float = SOON
) -> bool:
    """Wait for a message or an end; return whether ``receive`` would not block."""
    return bool(pool._wait(pool._chosen(workers), seconds))


def receive_within(pool: WorkerPool, timeout: float) -> tuple[int, Any]:
    """Receive with another time limit than the pool's."""
    before, pool._timeout = pool._timeout, timeout
    try:
        return pool.receive()
    finally:
        pool._timeout = before


def hold(begin: Callable[[], None] = lambda: None, seconds: float = 1000.0) -> None:
    """Call a function, then sleep in C and keep the interpreter lock.

    No Python thread can run then.
    """
    begin()
    ctypes.PyDLL(None).sleep(int(seconds))


def wait_for_phase(pool: WorkerPool, worker: int, phase: Phase) -> None:
    def is_there() -> bool:
        assert not await_message(pool, [worker], 0), pool.receive([worker])
        return pool.status_board.lines[worker].phase is phase

    wait_until(is_there, f"worker {worker} does not reach {phase}")


def open_paths() -> int:
    """Count the open files and memory of this process.

    Other tests may have left threads that open sockets and pipes, which do not count.
    """
    paths = 0
    for fd in os.listdir("/proc/self/fd"):
        # The descriptor of the listing is closed by now.
        with contextlib.suppress(FileNotFoundError):
            paths += os.readlink(f"/proc/self/fd/{fd}").startswith("/")
    return paths


def hang(worker: WorkerContext, argument: object) -> None:
    hold(lambda: worker.line.enter(Phase.STEP, environment=7))
