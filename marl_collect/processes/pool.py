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

Every wait ends with data, with the death of a worker, or with a hang timeout. Data
comes first: messages that a worker sent are delivered before its end is reported. If
several workers have failed, the earliest failure is raised.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, Self, final

from marl_collect.errors import ClosedError, WorkerError, refuse_in_forks
from marl_collect.processes import cleanup, import_guard, linux, standard_streams
from marl_collect.processes.closing import (
    CLOSE_SECONDS,
    ERROR_CLOSE_SECONDS,
    ask_to_end,
    await_end,
    kill,
)
from marl_collect.processes.hang import HangWatch
from marl_collect.processes.launcher import StartMethod
from marl_collect.processes.starting import Main, pickle_job, start_workers
from marl_collect.processes.status_board import (
    PREEMPT,
    STEPS,
    WEIGHTS_READ,
    Phase,
    StatusBoard,
)
from marl_collect.processes.worker_handle import (
    ABSENT,
    WorkerHandle,
    pack,
    resident_bytes,
    write_each,
)

_WAKE_SECONDS: Final = 2.0
"""How long closing waits for a thread that reads, once all workers have ended."""


@final
class WorkerPool:
    """Workers that run ``main(context, argument)``, each with its own argument.

    One thread at a time may receive. Any thread may send or close.

    Args:
        main: runs in each worker. ``receive`` re-raises its exceptions with their own
            type.
        arguments: one per worker; sent with cloudpickle, so lambdas and classes
            of the user's script may be among them. Pass factories, not built
            environments.
        start_method: "forkserver" or "spawn"; None for "forkserver".
        preload: modules that the fork server imports before it forks. They must
            not start threads. Ignored in forked workers.
        timeout: seconds that a busy worker may go without progress on the
            status board; None for no limit, unless a signal stops the worker.
        start_timeout: the same while workers start and build environments; None for no
            limit.
        num_threads: value of thread variables such as ``OMP_NUM_THREADS`` in the
            workers. Preloaded libraries have read them as 1.
        name: of the processes in ``ps`` and ``top``.

    Raises:
        ValueError: there are no arguments.
        TypeError: ``main`` or an argument cannot be pickled. Nothing was started.
        OSError: processes cannot be started, for example for lack of open files.
        RuntimeError: the fork server could not preload a module, or a worker that
            is still importing starts workers (``import_guard``).
    """

    closed = True  # Or being closed; until there is something to close.

    def __init__(
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
        import_guard.refuse_during_import("a pool of workers")
        if not arguments:
            raise ValueError("arguments is empty; expected one argument per worker")
        self._main = main
        self._start = partial(
            start_workers,
            start_method=start_method or "forkserver",
            preload=tuple(preload),
            start_timeout=start_timeout,
            num_threads=num_threads,
            name=name,
        )
        jobs = [pickle_job(main, i, a) for i, a in enumerate(arguments)]
        self._timeout = timeout
        self._owner = os.getpid()
        # A signal handler may close while its thread receives.
        self._reading = threading.RLock()
        self._closing = threading.Lock()  # Acquired once, never released.
        self._closer: int | None = None  # The thread that closes.
        self._all_ended = threading.Event()
        self._next = 0
        standard_streams.occupy()  # Before the status board takes their descriptors.
        self.status_board: Final = StatusBoard.create(len(jobs))
        try:
            self._handles = self._start(jobs, self.status_board)
        except BaseException as error:
            self.status_board.close()
            if isinstance(error, Exception) and cleanup.ends_with_the_process():
                raise SystemExit from None  # The servers were ended before.
            raise
        handles = self._handles  # Not self: a cycle would keep what the pool releases.
        self._watch = HangWatch(
            self.status_board,
            start_timeout,
            lambda worker: linux.is_stopped(handles[worker].pid),
        )
        self.closed = False
        cleanup.register(self)
        if cleanup.ends_with_the_process():
            self.close(0.0)  # Others were closed before this one was registered.
            raise SystemExit

    # Messages

    def send(self, worker: int, message: object) -> None:
        """Send a message to a worker. ``receive`` reports if it has died.

        While a large message is sent, a busy worker is waited for. One that hangs is
        killed, and ``receive`` reports that.
        """
        self.send_each({worker: message})

    def broadcast(self, message: object, workers: Iterable[int] | None = None) -> None:
        """Send the same message to some workers, by default to all; see ``send``."""
        chosen = range(len(self)) if workers is None else workers
        self.send_each(dict.fromkeys(chosen, message))

    def send_each(self, messages: Mapping[int, object]) -> None:
        """Send messages to workers, all at the same time; see ``send``.

        Raises:
            TypeError: a message cannot be pickled. None was sent.
        """
        data = {worker: pack(message) for worker, message in messages.items()}
        self.check_open()
        for worker in data:
            self._handles[worker].sent += 1
        write_each(
            [(self._handles[worker], data[worker]) for worker in sorted(data)],
            self._watch.pause(self._timeout),
            self._still_read,
        )

    def _still_read(self, handles: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        """Return those that may still read a message; one that hangs is killed."""
        if self.closed:
            return []
        sent = {handle.index: handle.sent for handle in handles}
        hung = self._watch.find(sent, self._timeout)
        if hung is not None:
            self._give_up(*hung)
        return [
            handle
            for handle in handles
            if handle.exitcode is None
            and math.isinf(handle.failed_at)
            and handle.line.phase is not Phase.CLOSE
        ]

    def receive(self, workers: Iterable[int] | None = None) -> tuple[int, Any]:
        """Wait for the next message of some workers; return its sender and the message.

        Workers that are ready at the same time are served round-robin.

        Args:
            workers: indices of the workers to wait for, by default all.

        Returns:
            The worker's index and its message.

        Raises:
            Exception: what a worker's ``main`` raised, from a ``WorkerError``.
            WorkerError: a worker died and left nothing to read, or hung.
            ClosedError: the pool is closed, or another thread is closing it.
        """
        with self._reading:
            self.check_open()
            handles = self._chosen(workers)
            if not handles:
                raise ValueError(
                    "workers is empty; expected at least one worker to receive from"
                )
            handles.sort(key=lambda handle: (handle.index < self._next, handle.index))
            while True:
                # First, because other workers may always have data to read.
                self._check_hang(handles)
                for handle in self._wait(handles, self._watch.pause(self._timeout)):
                    message = self._read(handles, handle, handle.next_message)
                    if message is not ABSENT:
                        self._next = handle.index + 1
                        return handle.index, message
                self.check_open()

    def check(self, workers: Iterable[int] | None = None) -> None:
        """Check once, without blocking, that workers are alive and not hung.

        For callers that wait for workers by other means, such as flags in shared
        memory. Messages remain available to ``receive``.

        Raises:
            Exception: as ``receive`` does.
        """
        with self._reading:
            self.check_open()
            handles = self._chosen(workers)
            for handle in handles:
                self._read(handles, handle, handle.read_ahead)
            self._check_hang(handles)

    def _read(
        self,
        handles: Sequence[WorkerHandle],
        handle: WorkerHandle,
        read: Callable[[], Any],
    ) -> Any:
        """Read from one of ``handles``; raise what failed first in any of them."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        try:
            raise self._first_of(handles, handle, failure)
        finally:
            del failure  # It refers to this frame.

    def _first_of(
        self, handles: Sequence[WorkerHandle], failed: WorkerHandle, error: Exception
    ) -> Exception:
        """Return the failure that came first, if other workers have failed too.

        Args:
            handles: the workers to look at.
            failed: the one that was noticed first.
            error: what it raised.

        Raises:
            ClosedError: a signal handler has closed the pool meanwhile.
        """
        if not failed.has_failed:
            self.check_open()
        first = failed.failed_at
        for handle in handles:
            if handle is not failed and handle.is_ready:
                try:
                    handle.read_ahead()
                except Exception as other:  # noqa: BLE001 - compared with the first
                    if handle.failed_at < first:
                        first = handle.failed_at
                        error = other.with_traceback(None)  # It refers to this frame.
        return error

    def poll(self, workers: Iterable[int] | None = None, wait: float = 0.0) -> bool:
        """Return whether ``receive`` would return or raise without blocking.

        Args:
            workers: indices of the workers to look at, by default all.
            wait: seconds to wait for a message or an end.
        """
        self.check_open()
        return bool(self._wait(self._chosen(workers), wait))

    def _wait(
        self, handles: Sequence[WorkerHandle], seconds: float
    ) -> list[WorkerHandle]:
        """Wait until some workers are ready; return these, in the same order."""
        poller = select.poll()
        owners: dict[int, WorkerHandle] = {}
        ready: set[int] = set()
        for handle in handles:
            if handle.has_read_ahead:
                ready.add(handle.index)
            for fd in handle.fds:
                poller.register(fd, select.POLLIN)
                owners[fd] = handle
        readable = poller.poll(0 if ready else seconds * 1000)
        ready.update(owners[fd].index for fd, _ in readable)
        return [handle for handle in handles if handle.index in ready]

    def _check_hang(self, handles: Sequence[WorkerHandle]) -> None:
        sent = {handle.index: handle.sent for handle in handles}
        hung = self._watch.find(sent, self._timeout)
        if hung is not None and not self._handles[hung[0]].is_ready:
            raise self._give_up(*hung)

    def _give_up(self, worker: int, seconds: float) -> WorkerError:
        """Kill a worker that hangs, and return the error to raise."""
        handle = self._handles[worker]
        if linux.is_stopped(handle.pid):
            detail = "a signal, such as SIGSTOP, had stopped it; it was killed"
        else:
            detail = (
                "it made no progress and was killed; its Python stack is on stderr. "
                "Increase timeout= (start_timeout= for the start) if it needs longer"
            )
        return handle.give_up(f"hung {seconds:g} s", detail)

    # State

    def restart(self, worker: int, argument: object) -> None:
        """Replace a worker by a new process; the old one is killed.

        Messages of the old process that were not received are dropped.

        Args:
            worker: index of the worker.
            argument: for its ``main``.

        Raises:
            TypeError: the argument cannot be pickled.
            OSError: the new process cannot be started. The old one is dead.
        """
        self.check_open()
        job = pickle_job(self._main, worker, argument)
        with self._reading:
            old = self._handles[worker]
            if old.has_failed:  # It closes its environments.
                old.join(ERROR_CLOSE_SECONDS)
            old.kill()
            old.join(5.0)
            old.line.clear()
            self._watch.restart(worker)
            self._handles[worker : worker + 1] = self._start(
                [job], self.status_board, worker
            )
            old.close()

    def preempt(self, worker: int, *, preempted: bool) -> None:
        """Let the rollouts of a worker end early, or no longer."""
        self.status_board.lines[worker].cells[PREEMPT] = preempted

    def resident_bytes(self, worker: int) -> int:
        """Return a worker's resident memory; 0 if it has ended."""
        return resident_bytes(self._handles[worker].pid)

    def steps(self, worker: int) -> int:
        """Return the steps of rollouts by a worker and those that it replaces."""
        return self.status_board.lines[worker].cells[STEPS]

    def weights_read(self, worker: int) -> int:
        """Return the number of the last order whose weights a worker has copied."""
        return self.status_board.lines[worker].cells[WEIGHTS_READ]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return tuple(handle.pid for handle in self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def _chosen(self, workers: Iterable[int] | None) -> list[WorkerHandle]:
        if workers is None:
            return list(self._handles)
        return [self._handles[worker] for worker in workers]

    @property
    def foreign(self) -> bool:
        """Whether this process is a fork of the one that started the workers."""
        return self._owner != os.getpid()

    def check_open(self) -> None:
        """Raise an error if the workers cannot be used.

        Raises:
            RuntimeError: in a fork of the process that started the workers.
            ClosedError: the pool is closed.
            SystemExit: in a daemon thread, if the pool was closed because this process
                exits. The thread ends silently.
        """
        refuse_in_forks(self._owner, "pool of workers")
        if self.closed:
            if cleanup.ends_with_the_process():
                raise SystemExit
            raise ClosedError("the pool of workers is closed")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a WorkerPool cannot be copied or pickled: its workers belong to the "
            "process that started them. Create a new pool"
        )

    # Closing

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[WorkerError, ...]:
        """End all workers; may be called twice, and from any thread.

        Workers are first asked to end: the ``STOP`` cell of their lines is set, and
        their sockets are closed for writing, so that ``WorkerContext.receive`` raises
        EOFError. SIGTERM and SIGKILL follow.

        A signal handler may call it too: a ``receive`` that it interrupts raises
        ``ClosedError``.

        Args:
            timeout: seconds until SIGKILL.

        Returns:
            Errors that workers raised while they closed, and crashes and hangs.
        """
        if self.foreign:
            return ()
        if not self._closing.acquire(blocking=False):
            # A signal handler that interrupts us must not wait for us.
            if self._closer != threading.get_ident():
                self._all_ended.wait(timeout)
            return ()
        self._closer, self.closed = threading.get_ident(), True
        deadline = time.monotonic() + timeout
        handles = self._handles
        locked = False
        try:
            if timeout > 0:
                ask_to_end(handles)
                # A thread that waits in receive() checks once a second.
                locked = self._reading.acquire(timeout=timeout)
                if locked:
                    return await_end(handles, deadline)
            return ()
        finally:
            # Runs even after a second Ctrl-C, so that no process is left behind.
            kill(handles)
            # The end of its workers wakes a thread that still reads.
            locked = locked or self._reading.acquire(timeout=_WAKE_SECONDS)
            for handle in handles:
                handle.close()
            if locked:
                self._reading.release()
            self.status_board.close()
            self._all_ended.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            with contextlib.suppress(Exception):
                self.close(timeout=2.0)
