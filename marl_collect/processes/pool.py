"""A pool of worker processes: start, exchange messages, notice deaths, close.

    def main(worker: WorkerContext, argument: object) -> None:
        while True:
            message = worker.receive()          # EOFError ends us when closed
            worker.line.enter(Phase.STEP)
            ...
            worker.send(reply)

    with WorkerPool(main, [argument_0, argument_1]) as pool:
        pool.broadcast(message)
        worker, reply = pool.receive()

Every wait ends with data, with the death of a worker, or with the discovery
that one hangs. Data comes before death: what a worker sent is delivered before
its end is reported.
"""

import contextlib
import os
import select
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Self, final

import cloudpickle

from marl_collect.errors import ClosedError, WorkerError
from marl_collect.processes import cleanup, import_guard, standard_streams
from marl_collect.processes.closing import end_workers
from marl_collect.processes.hang import HangWatch
from marl_collect.processes.launcher import check_start_method
from marl_collect.processes.starting import Main, Starter
from marl_collect.processes.status_board import StatusBoard, WorkerProgress
from marl_collect.processes.worker_handle import ABSENT, Absent, WorkerHandle


@final
class WorkerPool:
    """Workers that run ``main(context, argument)``, each with its own argument.

    One thread at a time receives; any thread may send or close.

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
            status board; None for no limit.
        start_timeout: the same while workers start and create; None for no limit.
        num_threads: for the thread variables (``OMP_NUM_THREADS`` and such) in
            the workers. Libraries that were preloaded have read them as 1.
        name: of the processes in ``ps`` and ``top``.

    Raises:
        ValueError: unknown start method, no arguments, or a time limit that is
            not positive.
        TypeError: main or an argument cannot be pickled; nothing was started.
        OSError: processes cannot be started, for instance for lack of files.
        RuntimeError: the fork server could not preload a module, or a worker that
            is still importing starts workers, see `import_guard`.
    """

    _closed = True  # Until there is something to close.

    def __init__(
        self,
        main: Main,
        arguments: Sequence[object],
        *,
        start_method: str | None = None,
        preload: Sequence[str] = (),
        timeout: float | None = 300.0,
        start_timeout: float | None = 120.0,
        num_threads: int = 1,
        name: str = "marl-worker",
    ) -> None:
        import_guard.refuse_during_import("a pool of workers")
        method = check_start_method(start_method)
        if not arguments:
            raise ValueError("arguments is empty, expected one per worker")
        for option, seconds in {
            "timeout": timeout,
            "start_timeout": start_timeout,
        }.items():
            if seconds is not None and not seconds > 0:
                raise ValueError(
                    f"{option} must be a positive number of seconds, or None for no "
                    f"limit, not {seconds!r}"
                )
        self._starter = Starter(
            main, method, tuple(preload), start_timeout, num_threads, name
        )
        jobs = [self._starter.pickle_job(i, a) for i, a in enumerate(arguments)]
        self._timeout = timeout
        self._owner = os.getpid()
        self._reading = threading.Lock()
        self._closing = threading.Lock()  # Taken once, and never given back.
        self._all_ended = threading.Event()
        self._next = 0
        standard_streams.occupy()  # Before the status board takes their numbers.
        self.status_board: Final = StatusBoard.create(len(jobs))
        with contextlib.ExitStack() as undo:
            undo.callback(self.status_board.close)
            processes = self._starter.start(jobs, self.status_board.handle)
            self._handles = [
                WorkerHandle(worker, process, self.status_board.lines[worker])
                for worker, process in enumerate(processes)
            ]
            self._give_back = undo.pop_all()
        self._watch = HangWatch(self.status_board, start_timeout)
        self._closed = False
        cleanup.register(self)

    # Messages

    def send(self, worker: int, message: object) -> None:
        """Send a message to a worker; `receive` tells if it has died meanwhile.

        Raises:
            WorkerError: the message is large, and the worker has not read for a
                minute.
        """
        self.broadcast(message, [worker])

    def broadcast(self, message: object, workers: Iterable[int] | None = None) -> None:
        """Send the same message to some workers, by default to all; see `send`."""
        self.check_open()
        data = cloudpickle.dumps(message, protocol=5)
        for handle in self._chosen(workers):
            handle.sent += 1
            handle.write(data)

    def receive(
        self,
        workers: Iterable[int] | None = None,
        *,
        timeout: float | Absent | None = ABSENT,
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
        limit = self._timeout if timeout is ABSENT else timeout
        with self._reading:
            self.check_open()
            handles = self._chosen(workers)
            if not handles:
                raise ValueError("workers is empty, so no message can come")
            handles.sort(key=lambda handle: (handle.index < self._next, handle.index))
            while True:
                # First, as the others may always have something to read.
                self._check_hang(handles, limit)
                for handle in self._wait(handles, self._watch.pause(limit)):
                    message = handle.take()
                    if message is not ABSENT:
                        self._next = handle.index + 1
                        return handle.index, message
                self.check_open()

    def check(self, workers: Iterable[int] | None = None) -> None:
        """Look once, without waiting, whether some workers are well.

        For a caller that waits for its workers elsewhere, such as on flags in
        shared memory. Messages stay for `receive`.

        Raises:
            Exception: as `receive` does.
        """
        with self._reading:
            self.check_open()
            handles = self._chosen(workers)
            for handle in handles:
                handle.read_ahead()
            self._check_hang(handles, self._timeout)

    def poll(self, workers: Iterable[int] | None = None, wait: float = 0.0) -> bool:
        """Return whether `receive` would find news at once.

        Args:
            workers: indices of the workers to look at, by default all.
            wait: seconds to wait for that.
        """
        self.check_open()
        return bool(self._wait(self._chosen(workers), wait))

    def fds(self, workers: Iterable[int] | None = None) -> list[int]:
        """Return what to wait on elsewhere: readable means that there is news."""
        return [fd for handle in self._chosen(workers) for fd in handle.fds]

    def _wait(
        self, handles: Sequence[WorkerHandle], seconds: float
    ) -> list[WorkerHandle]:
        """Wait until some handles have news, and return these, in the same order."""
        poller = select.poll()
        owners: dict[int, WorkerHandle] = {}
        news: set[int] = set()
        for handle in handles:
            if handle.has_read_ahead:
                news.add(handle.index)
            for fd in handle.fds:
                poller.register(fd, select.POLLIN)
                owners[fd] = handle
        readable = poller.poll(0 if news else seconds * 1000)
        news.update(owners[fd].index for fd, _ in readable)
        return [handle for handle in handles if handle.index in news]

    def _check_hang(
        self, handles: Sequence[WorkerHandle], timeout: float | None
    ) -> None:
        sent = {handle.index: handle.sent for handle in handles}
        found = self._watch.find(sent, timeout)
        if found is None:
            return
        worker, seconds = found
        if not self._handles[worker].is_ready:
            raise self._handles[worker].give_up(
                f"hung {seconds:g} s",
                "it made no progress and was killed; its Python stack is on stderr. "
                "Raise timeout= (start_timeout= for the start) if it may take longer",
            )

    # State

    def restart(self, worker: int, argument: object) -> None:
        """Start a new process in a worker's place; the old one is killed.

        Messages of the old process that were not received are dropped.

        Args:
            worker: index of the worker.
            argument: for its ``main``.

        Raises:
            TypeError, OSError: as when the pool is made; the old one is dead then.
        """
        self.check_open()
        job = self._starter.pickle_job(worker, argument)
        with self._reading:
            old = self._handles[worker]
            old.process.kill()
            old.process.join(5.0)
            old.line.clear()
            self._watch.restart(worker)
            (process,) = self._starter.start([job], self.status_board.handle, worker)
            self._handles[worker] = WorkerHandle(worker, process, old.line)
            old.process.close()

    def progress(self, worker: int) -> WorkerProgress:
        """Return what a worker's line on the status board says now."""
        return self.status_board.lines[worker].read()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return tuple(handle.process.pid for handle in self._handles)

    @property
    def exitcodes(self) -> tuple[int | None, ...]:
        """Exit code of each worker; ``-N`` for signal ``N``; None while it runs."""
        return tuple(handle.process.exitcode for handle in self._handles)

    @property
    def closed(self) -> bool:
        """Whether the pool is closed, or being closed."""
        return self._closed

    def __len__(self) -> int:
        return len(self._handles)

    def _chosen(self, workers: Iterable[int] | None) -> list[WorkerHandle]:
        if workers is None:
            return list(self._handles)
        return [self._handles[worker] for worker in workers]

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the one whose workers these are."""
        return self._owner != os.getpid()

    def check_open(self) -> None:
        """Raise an error where the workers cannot be used.

        Raises:
            RuntimeError: in a fork of the process whose workers these are.
            ClosedError: the pool is closed.
            SystemExit: this process is exiting, and closed the pool: a daemon thread
                ends without a word, as others are ended then.
        """
        if self.foreign:
            raise RuntimeError(
                f"process {os.getpid()} is a fork of {self._owner}, whose workers "
                "these are: two processes must not talk to them. Build what uses them "
                "in the process that shall use it"
            )
        if self._closed:
            if cleanup.ends_with_the_process(threading.current_thread()):
                raise SystemExit
            raise ClosedError("the pool of workers is closed")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a WorkerPool cannot be copied or pickled: its workers belong to the "
            "process that started them. Make another one"
        )

    # Closing

    def close(
        self, timeout: float = 10.0, *, message: object = ABSENT
    ) -> tuple[WorkerError, ...]:
        """End all workers; may be called twice, and from any thread.

        They are asked first: the ``STOP`` cell of their lines is set, ``message``
        is sent, and their sockets are closed for writing, so that
        `WorkerContext.receive` raises EOFError. Then come SIGTERM and SIGKILL.

        Args:
            timeout: seconds until SIGKILL.
            message: what to send to each worker first.

        Returns:
            What went wrong in workers while they closed.
        """
        if self.foreign:
            return ()
        if not self._closing.acquire(blocking=False):
            self._all_ended.wait(timeout)
            return ()
        self._closed = True
        farewell = None
        if message is not ABSENT:
            farewell = cloudpickle.dumps(message, protocol=5)
        # Whoever waits in receive() looks up once a second.
        locked = self._reading.acquire(timeout=max(timeout, 2.0))
        try:
            processes = [handle.process for handle in self._handles]
            return end_workers(processes, self.status_board, timeout, farewell)
        finally:
            if locked:
                self._reading.release()
            self._give_back.close()
            self._all_ended.set()

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
