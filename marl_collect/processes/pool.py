"""A pool of worker processes: start, exchange messages, notice deaths, close.

    def main(worker: WorkerContext, argument: object) -> None:
        while True:
            message = worker.receive()          # EOFError ends us when closed
            worker.line.enter(Phase.STEP)
            ...
            worker.line.enter(Phase.IDLE)
            worker.send(reply)

    with WorkerPool(main, [argument_0, argument_1]) as pool:
        pool.broadcast(message)
        worker, reply = pool.receive()

Every wait ends with data, with the death of a worker, or with the discovery
that one hangs. Data comes before death: what a worker sent is delivered before
its end is reported.
"""

import contextlib
import errno
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, final

import cloudpickle

from marl_collect.errors import (
    ClosedError,
    Failure,
    WorkerError,
    describe_exit,
    raise_failure,
)
from marl_collect.processes import cleanup
from marl_collect.processes.board import Board, Progress
from marl_collect.processes.bootstrap import Setup
from marl_collect.processes.closing import end_workers
from marl_collect.processes.context import WorkerContext
from marl_collect.processes.hang import HangWatch
from marl_collect.processes.launcher import (
    StartMethod,
    check_start_method,
    default_start_method,
)
from marl_collect.processes.worker_process import WorkerProcess

Main = Callable[[WorkerContext, Any], None]

_NOTHING: Final = object()


@final
class WorkerPool:
    """Workers that run ``main(context, argument)``, each with its own argument.

    Args:
        main: runs in each worker. An exception that it raises is raised by
            `receive` as its own type.
        arguments: one per worker; sent with cloudpickle, so lambdas and classes
            of the user's script may be among them. Pass factories, not built
            environments.
        start_method: "forkserver" or "spawn"; None for the best on this system.
        preload: modules that the fork server imports before it forks. They must
            not start threads. Workers that are forked from workers ignore it.
        timeout: seconds that a working worker may go without progress on the
            board; None for no limit.
        start_timeout: the same while workers start and create; None for no limit.
        num_threads: for the thread variables (``OMP_NUM_THREADS`` and such) in
            the workers. Libraries that were preloaded have read them as 1.
        name: of the processes in ``ps`` and ``top``.

    Raises:
        ValueError: unknown start method, or no arguments.
        TypeError: main or an argument cannot be pickled; nothing was started.
        OSError: processes cannot be started, for instance for lack of files.
        RuntimeError: the fork server could not preload a module.
    """

    def __init__(  # noqa: PLR0913 - all but two have defaults
        self,
        main: Main,
        arguments: Sequence[object],
        *,
        start_method: StartMethod | None = None,
        preload: Sequence[str] = (),
        timeout: float | None = 300.0,
        start_timeout: float | None = 120.0,
        num_threads: int = 1,
        name: str = "marl-worker",
    ) -> None:
        self._closed = True  # Until there is something to close.
        self._start_method: StartMethod = start_method or default_start_method()
        check_start_method(self._start_method)
        if not arguments:
            raise ValueError("arguments is empty, expected one per worker")
        self._main = main
        self._preload = tuple(preload)
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._num_threads = num_threads
        self._name = name
        jobs = [self._pickle_job(i, a) for i, a in enumerate(arguments)]
        self._owner = os.getpid()
        self._lock = threading.Lock()  # Held by whoever reads from the workers.
        self._processes: list[WorkerProcess] = []
        self._errors: dict[int, WorkerError] = {}
        self._failures: dict[int, Failure] = {}
        self._ended: set[int] = set()  # Their sockets are at the end.
        self._stash: list[deque[object]] = [deque() for _ in jobs]
        self._sent = [0] * len(jobs)
        self._next = 0
        self.board: Final = Board.create(len(jobs))
        self._watch = HangWatch(self.board, start_timeout)
        self._wake_reader, self._wake_writer = os.pipe()
        self._closed = False
        cleanup.register(self)
        try:
            self._start_all(jobs)
        except BaseException:
            self.close(timeout=0.0)
            raise

    # Starting

    def _pickle_job(self, worker: int, argument: object) -> bytes:
        try:
            data: bytes = cloudpickle.dumps((self._main, argument), protocol=5)
        except Exception as error:
            raise TypeError(
                f"the argument of worker {worker} cannot be sent to its process: "
                f"{error}. Pass functions that build environments and policies "
                f"there, and what they need to know; found {argument!r}."
            ) from error
        return data

    def _start_all(self, jobs: Sequence[bytes]) -> None:
        deadline = self._start_deadline()
        for _ in jobs:
            self._processes.append(self._start(deadline))
        for worker, job in enumerate(jobs):
            self._instruct(worker, job)
        for process in self._processes:
            process.confirm(deadline)

    def _start_deadline(self) -> float:
        return time.monotonic() + (self._start_timeout or 3600.0)

    def _start(self, deadline: float) -> WorkerProcess:
        try:
            return WorkerProcess.start(self._start_method, self._preload, deadline)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise OSError(
                error.errno,
                f"cannot start worker {len(self._processes)} of {len(self._stash)}: "
                "this process has too many open files, and each worker takes three. "
                "Raise the limit with `ulimit -n 4096`, or start fewer workers.",
            ) from error

    def _instruct(self, worker: int, job: bytes) -> None:
        setup = Setup(
            index=worker,
            name=f"{self._name}-{worker}",
            board=self.board.handle,
            num_threads=self._num_threads,
        )
        self._write(worker, pickle.dumps(setup, protocol=5))
        self._write(worker, job)

    def restart(self, worker: int, argument: object) -> None:
        """Start a new process in a worker's place; the old one is killed.

        Messages of the old process that were not received are dropped.

        Args:
            worker: index of the worker.
            argument: for its ``main``.
        """
        self._check_open()
        job = self._pickle_job(worker, argument)
        with self._lock:
            old = self._processes[worker]
            old.kill()
            old.join(5.0)
            deadline = self._start_deadline()
            process = self._start(deadline)
            old.close()
            self.board.lines[worker].clear()
            self._watch.restart(worker)
            self._processes[worker] = process
            self._errors.pop(worker, None)
            self._failures.pop(worker, None)
            self._ended.discard(worker)
            self._stash[worker].clear()
            self._sent[worker] = 0
            self._instruct(worker, job)
            process.confirm(deadline)

    # Messages

    def send(self, worker: int, message: object) -> None:
        """Send a message to a worker; `receive` tells if it has died meanwhile.

        Raises:
            WorkerError: the message is large, and the worker has not read for a
                minute.
        """
        self._check_open()
        self._sent[worker] += 1
        self._write(worker, cloudpickle.dumps(message, protocol=5))

    def broadcast(self, message: object, workers: Iterable[int] | None = None) -> None:
        """Send the same message to some workers, by default to all."""
        self._check_open()
        data = cloudpickle.dumps(message, protocol=5)
        for worker in self._chosen(workers):
            self._sent[worker] += 1
            self._write(worker, data)

    def _write(self, worker: int, data: bytes) -> None:
        try:
            self._processes[worker].connection.send_bytes(data)
        except BlockingIOError:
            raise self._give_up(worker, "does not read its messages") from None
        except (BrokenPipeError, ConnectionResetError):
            pass  # It has died: receive() first delivers what it said before.

    def receive(
        self,
        workers: Iterable[int] | None = None,
        *,
        timeout: float | None | object = _NOTHING,
    ) -> tuple[int, Any]:
        """Wait for the next message of some workers, and say whose it is.

        Workers that are ready at the same time take turns.

        Args:
            workers: indices of the workers to wait for, by default all.
            timeout: seconds without progress after which a working worker is
                killed; None for no limit; by default the pool's.

        Returns:
            The worker's index and its message.

        Raises:
            Exception: what a worker's ``main`` raised, from a `WorkerError`.
            WorkerError: a worker died and left nothing to read, or hung.
            ClosedError: the pool is closed, or another thread closes it now.
        """
        limit: Any = self._timeout if timeout is _NOTHING else timeout
        chosen = self._chosen(workers)
        with self._lock:
            while True:
                self._check_open()
                found = self._read_next(chosen, self._watch.pause(limit))
                if found is not None:
                    return found
                self._check_hang(chosen, limit)

    def check(self, workers: Iterable[int] | None = None) -> None:
        """Look once, without waiting, whether some workers are well.

        For a caller that waits for its workers elsewhere, such as on flags in
        shared memory. Messages stay for `receive`.

        Raises:
            Exception: as `receive` does.
        """
        chosen = self._chosen(workers)
        with self._lock:
            self._check_open()
            for worker in chosen:
                process = self._processes[worker]
                while (message := self._read(worker)) is not _NOTHING:
                    self._stash[worker].append(message)
                if process.exitcode is not None:
                    raise self._death(worker)
            self._check_hang(chosen, self._timeout)

    def poll(self, workers: Iterable[int] | None = None, wait: float = 0.0) -> bool:
        """Return whether `receive` would return or raise at once.

        Args:
            workers: indices of the workers to look at, by default all.
            wait: seconds to wait for that.
        """
        chosen = self._chosen(workers)
        if any(self._stash[worker] for worker in chosen):
            return True
        return bool(self._wait(chosen, wait))

    def _read_next(self, workers: Sequence[int], wait: float) -> tuple[int, Any] | None:
        """Return the first message within ``wait`` seconds, or raise a death."""
        turn = sorted(workers, key=lambda w: (w < self._next, w))
        for worker in turn:
            if self._stash[worker]:
                return self._deliver(worker, self._stash[worker].popleft())
        ready = self._wait(workers, wait)
        for worker in turn:
            process = self._processes[worker]
            if process.connection.fileno() in ready or process.sentinel in ready:
                ended = process.exitcode is not None
                message = self._read(worker)
                if message is not _NOTHING:
                    return self._deliver(worker, message)
                if ended:
                    raise self._death(worker)
        return None

    def _deliver(self, worker: int, message: object) -> tuple[int, Any]:
        self._next = worker + 1
        return worker, message

    def _wait(self, workers: Sequence[int], wait: float) -> set[int]:
        """Return which connections and sentinels are readable."""
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        for worker in workers:
            process = self._processes[worker]
            if worker not in self._ended:
                poller.register(process.connection.fileno(), select.POLLIN)
            poller.register(process.sentinel, select.POLLIN)
        return {fd for fd, _ in poller.poll(wait * 1000)}

    def _read(self, worker: int) -> object:
        """Return a message that is there, else ``_NOTHING``; raise a failure."""
        connection = self._processes[worker].connection
        if worker in self._ended or not _is_readable(connection.fileno()):
            return _NOTHING
        try:
            message = pickle.loads(connection.recv_bytes())
        except BlockingIOError:
            raise self._give_up(worker, "stopped in the middle of a message") from None
        except (EOFError, OSError):
            self._ended.add(worker)
            return _NOTHING
        if isinstance(message, Failure):
            self._failures[worker] = message
            raise_failure(message, worker)
        return message

    # What went wrong

    def _death(self, worker: int) -> WorkerError:
        """Describe the end of a worker; raise its failure if it told one."""
        if worker in self._errors:
            return self._errors[worker]
        if worker in self._failures:
            raise_failure(self._failures[worker], worker)
        exitcode = self._processes[worker].exitcode
        return self._describe(worker, "ended unasked", describe_exit(exitcode))

    def _give_up(self, worker: int, problem: str, detail: str = "") -> WorkerError:
        """Kill a worker that does not do its part, and describe that."""
        error = self._describe(worker, problem, detail)
        process = self._processes[worker]
        process.abort()  # Prints its Python stack.
        if not process.join(1.0):
            process.kill()
            process.join(5.0)
        return error

    def _check_hang(self, workers: Sequence[int], limit: float | None) -> None:
        found = self._watch.find(workers, self._sent, limit)
        if found is not None:
            worker, seconds = found
            raise self._give_up(
                worker,
                f"hung {seconds:g} s",
                "it made no progress and was killed; its Python stack is on stderr. "
                "Raise timeout= (start_timeout= for the start) if it may take longer",
            )

    def _describe(self, worker: int, problem: str, detail: str) -> WorkerError:
        process, progress = self._processes[worker], self.progress(worker)
        error = WorkerError(
            worker,
            problem,
            detail,
            pid=process.pid,
            exitcode=process.exitcode,
            phase=progress.phase.label,
            environment=progress.environment,
        )
        self._errors[worker] = error
        return error

    # State

    def _chosen(self, workers: Iterable[int] | None) -> list[int]:
        return list(range(len(self._stash)) if workers is None else workers)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool of workers is closed")

    @property
    def closed(self) -> bool:
        """Whether the pool is closed, or being closed."""
        return self._closed

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return tuple(process.pid for process in self._processes)

    @property
    def exitcodes(self) -> tuple[int | None, ...]:
        """Exit code of each worker; ``-N`` for signal ``N``; None while it runs."""
        return tuple(process.exitcode for process in self._processes)

    def progress(self, worker: int) -> Progress:
        """Return what a worker's line on the board says now."""
        return self.board.lines[worker].read()

    def fds(self, workers: Iterable[int] | None = None) -> list[int]:
        """Return what to wait on elsewhere: readable means that `poll` is true."""
        fds: list[int] = []
        for worker in self._chosen(workers):
            process = self._processes[worker]
            fds += [process.connection.fileno(), process.sentinel]
        return fds

    def __len__(self) -> int:
        return len(self._stash)

    # Closing

    def close(
        self, timeout: float = 10.0, *, message: object = _NOTHING
    ) -> tuple[WorkerError, ...]:
        """End all workers; may be called twice, and from any thread.

        They are asked first: the ``STOP`` cell of their lines is set, ``message``
        is sent, and their sockets are closed for writing, so that
        `WorkerContext.receive` raises EOFError. Then come SIGTERM and SIGKILL.

        Args:
            timeout: seconds for all of it.
            message: what to send to each worker first.

        Returns:
            What went wrong in workers while they closed.
        """
        if self._closed or self._owner != os.getpid():
            return ()
        self._closed = True
        os.write(self._wake_writer, b"!")  # Whoever waits in receive() leaves it.
        farewell = None
        if message is not _NOTHING:
            farewell = cloudpickle.dumps(message, protocol=5)
        locked = self._lock.acquire(timeout=max(timeout, 1.0))
        try:
            return end_workers(self._processes, self.board, timeout, farewell)
        finally:
            if locked:
                self._lock.release()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self.board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            with contextlib.suppress(Exception):
                self.close(timeout=2.0)


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
