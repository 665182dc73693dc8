"""Main functions of workers in tests, and how to wait for them."""

import ctypes
import sys
import time

import cloudpickle

from marl_collect.processes import Phase, WorkerContext, WorkerPool

# Workers get what is defined here by value: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOON = 20.0  # Seconds; far above what any of this takes on a busy machine.


def obey(worker: WorkerContext, argument: object) -> None:
    """Call each function that arrives, and send back its result."""
    while True:
        worker.send(worker.receive()(worker, argument))


def be_up(pool: WorkerPool) -> None:
    pool.broadcast(lambda worker, argument: None)
    for _ in range(len(pool)):
        pool.receive()


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
