"""Starts the workers of a pool: first all processes, then sends their jobs."""

import contextlib
import errno
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from marl_collect.errors import unpicklable
from marl_collect.processes import pickling
from marl_collect.processes.bootstrap import WorkerSetup
from marl_collect.processes.context import WorkerContext
from marl_collect.processes.launcher import StartMethod, launch
from marl_collect.processes.status_board import StatusBoard
from marl_collect.processes.worker_handle import SOCKET_SECONDS, WorkerHandle

Main = Callable[[WorkerContext, Any], None]

# Replaces "no limit" where the operating system needs a number.
_LONG_SECONDS: Final = 86_400.0
_ABANDON_SECONDS: Final = 2.0

_FILES: Final = (
    "too many open files; each worker needs three in this process. Raise the limit "
    "with `ulimit -n 4096`"
)
_CAUSES: Final[dict[int | None, str]] = {
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: "too many processes. Raise the limit of this user (`ulimit -u`) or "
    "that of the container (pids.max)",
    errno.ENOMEM: "too little memory for another process. Free some memory",
}


def pickle_job(main: Main, worker: int, argument: object) -> bytes:
    """Pickle ``main`` and a worker's argument.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        job = pickling.dumps((main, argument))
    except Exception as error:
        raise TypeError(
            f"the argument of worker {worker} cannot be sent to its process: "
            f"{error}, in {unpicklable(argument, pickling.dumps)}. Pass functions "
            "that build environments and policies in the worker, and their arguments."
        ) from error
    return job


def start_workers(
    jobs: Sequence[bytes],
    status_board: StatusBoard,
    first: int = 0,
    *,
    start_method: StartMethod,
    preload: tuple[str, ...],
    start_timeout: float | None,
    num_threads: int,
    name: str,
) -> list[WorkerHandle]:
    """Start a worker per job, in parallel, and return when all of them run.

    They have not unpickled their jobs by then: errors in that arrive as the first
    message.

    Args:
        jobs: what `pickle_job` returned for each.
        status_board: the pool's status board.
        first: index of the first of these workers in the pool.
        start_method: as for `WorkerPool`, as the following.
        preload: modules that the fork server imports.
        start_timeout: seconds.
        num_threads: value of the thread variables.
        name: of the processes.

    Raises:
        OSError: processes cannot be started; none is left.
        RuntimeError: the fork server could not preload a module.
    """
    deadline = time.monotonic() + (start_timeout or _LONG_SECONDS)
    handles: list[WorkerHandle] = []
    try:
        for worker in range(first, first + len(jobs)):
            line = status_board.lines[worker]
            started = launch(start_method, preload, deadline)
            handles.append(WorkerHandle(worker, line, *started))
        for handle, job in zip(handles, jobs, strict=True):
            worker = handle.index
            setup = WorkerSetup(
                worker, f"{name}-{worker}", status_board.handle, num_threads
            )
            _instruct(handle, setup, job)
        for handle in handles:
            handle.child.confirm(deadline)
    except BaseException as error:
        _abandon(handles)
        number = error.errno if isinstance(error, OSError) else None
        if number in _CAUSES:
            raise OSError(
                number,
                f"cannot start {len(jobs)} worker(s): {_CAUSES[number]}, or use "
                "fewer workers",
            ) from error
        raise
    return handles


def _instruct(handle: WorkerHandle, setup: WorkerSetup, job: bytes) -> None:
    # It may have died already. Waiting for its first message reports that.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        try:
            handle.connection.send_bytes(pickle.dumps(setup, protocol=5))
            handle.connection.send_bytes(job)
        except BlockingIOError:
            raise TimeoutError(
                f"worker {handle.index} has not read its job of {len(job)} bytes "
                f"within {SOCKET_SECONDS} s of its start: the machine may be "
                "overloaded, or the process stopped"
            ) from None


def _abandon(handles: Sequence[WorkerHandle]) -> None:
    deadline = time.monotonic() + _ABANDON_SECONDS
    for handle in handles:
        # A signal needs the pid. A process that has not started yet finds its
        # socket closed, and exits.
        with contextlib.suppress(OSError):
            handle.child.confirm(deadline)
            handle.kill()
            handle.join(_ABANDON_SECONDS)
        handle.close()
