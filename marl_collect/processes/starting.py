"""Starts the workers of a pool: first all processes, then sends their jobs."""

import contextlib
import errno
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import cloudpickle

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


@final
@dataclass(frozen=True)
class Starter:
    """Starts workers that run ``main``; see `WorkerPool` for the attributes."""

    main: Main
    start_method: StartMethod
    preload: tuple[str, ...]
    start_timeout: float | None
    num_threads: int
    name: str

    def pickle_job(self, worker: int, argument: object) -> bytes:
        """Pickle ``main`` and a worker's argument.

        Raises:
            TypeError: it cannot be pickled.
        """
        try:
            job: bytes = cloudpickle.dumps((self.main, argument), protocol=5)
        except Exception as error:
            raise TypeError(
                f"the argument of worker {worker} cannot be sent to its process: "
                f"{error}. Pass functions that build environments and policies in the "
                f"worker, and their arguments; found {argument!r}."
            ) from error
        return job

    def start(
        self, jobs: Sequence[bytes], status_board: StatusBoard, first: int = 0
    ) -> list[WorkerHandle]:
        """Start a worker per job, in parallel, and return when all of them run.

        They have not unpickled their jobs by then: errors in that arrive as the first
        message.

        Args:
            jobs: what `pickle_job` returned for each.
            status_board: the pool's status board.
            first: index of the first of these workers in the pool.

        Raises:
            OSError: processes cannot be started; none is left.
            RuntimeError: the fork server could not preload a module.
        """
        deadline = time.monotonic() + (self.start_timeout or _LONG_SECONDS)
        handles: list[WorkerHandle] = []
        try:
            for worker in range(first, first + len(jobs)):
                line = status_board.lines[worker]
                started = launch(self.start_method, self.preload, deadline)
                handles.append(WorkerHandle(worker, line, *started))
            for handle, job in zip(handles, jobs, strict=True):
                self._instruct(handle, job, status_board)
            for handle in handles:
                handle.confirm(deadline)
        except BaseException as error:
            self._abandon(handles)
            number = error.errno if isinstance(error, OSError) else None
            if number in _CAUSES:
                raise OSError(
                    number,
                    f"cannot start {len(jobs)} worker(s): {_CAUSES[number]}, or use "
                    "fewer workers",
                ) from error
            raise
        return handles

    def _instruct(
        self, handle: WorkerHandle, job: bytes, status_board: StatusBoard
    ) -> None:
        worker, board = handle.index, status_board.handle
        setup = WorkerSetup(worker, f"{self.name}-{worker}", board, self.num_threads)
        # It may have died already. Waiting for its first message reports that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                handle.connection.send_bytes(pickle.dumps(setup, protocol=5))
                handle.connection.send_bytes(job)
            except BlockingIOError:
                raise TimeoutError(
                    f"worker {worker} has not read its job of {len(job)} bytes within "
                    f"{SOCKET_SECONDS} s of its start: the machine may be overloaded, "
                    "or the process stopped"
                ) from None

    def _abandon(self, handles: Sequence[WorkerHandle]) -> None:
        deadline = time.monotonic() + _ABANDON_SECONDS
        for handle in handles:
            # A signal needs the pid. A process that has not started yet finds its
            # socket closed, and exits.
            with contextlib.suppress(OSError):
                handle.confirm(deadline)
                handle.kill()
                handle.join(_ABANDON_SECONDS)
            handle.close()
