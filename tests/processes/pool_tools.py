"""What workers of a test's pool run, and how to wait until they do."""

import sys

import cloudpickle

from marl_collect.processes import WorkerContext, WorkerPool

# Workers get what is defined here by value: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def obey(worker: WorkerContext, argument: object) -> None:
    """Call what arrives, and send back what it returns."""
    while True:
        worker.send(worker.receive()(worker, argument))


def be_up(pool: WorkerPool) -> None:
    pool.broadcast(lambda worker, argument: None)
    for _ in range(len(pool)):
        pool.receive()
