"""Ending the processes of a pool: ask, SIGTERM, SIGKILL, within a time limit."""

import contextlib
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final

from marl_collect.errors import Failure, WorkerError
from marl_collect.processes import linux
from marl_collect.processes.status_board import STOP, Phase
from marl_collect.processes.worker_handle import WorkerHandle, limit_blocking

CLOSE_SECONDS: Final = 10.0
"""Seconds that workers may take to end when the user closes."""

ERROR_CLOSE_SECONDS: Final = 2.0
"""The same after an error or Ctrl-C, which the user should see soon."""

_STOPPED_SECONDS: Final = 1.0
"""After this time, workers that a signal has stopped are killed: they cannot react."""

_SIGNAL_SHARE: Final = 0.2
"""Share of the time limit that is reserved for SIGTERM."""

_KILL_SECONDS: Final = 3.0


def close_after(error: BaseException, close: Callable[[float], object]) -> None:
    """Close soon after an error, which trouble in that must not hide."""
    try:
        close(ERROR_CLOSE_SECONDS)
    except Exception as trouble:  # noqa: BLE001 - the first error is raised
        error.add_note(f"While closing: {trouble}")


def ask_to_end(handles: Sequence[WorkerHandle]) -> None:
    """Ask workers to end, without waiting and without reading from them.

    Args:
        handles: all workers of a pool. They may have ended already.
    """
    for handle in handles:
        handle.line.cells[STOP] = 1
    for handle in handles:
        _shut(handle.connection)


def await_end(
    handles: Sequence[WorkerHandle], deadline: float
) -> tuple[WorkerError, ...]:
    """Wait until workers that were asked to end have ended; then send SIGTERM.

    Messages that they still send are read, so that no worker blocks on a full socket.

    Args:
        handles: all workers of a pool.
        deadline: until when, on ``time.monotonic``. Some may still run then.

    Returns:
        What failed meanwhile: errors that workers reported, crashes and hangs in their
        close.
    """
    begin = time.monotonic()
    term = deadline - _SIGNAL_SHARE * (deadline - begin)
    failures: list[WorkerError] = []
    _drain(handles, min(term, begin + _STOPPED_SECONDS), failures)
    for handle in handles:
        if handle.exitcode is None:
            state, parent = linux.state_of(handle.pid)
            if state == "T":
                handle.kill()
            if parent != os.getpid() and linux.is_stopped(parent):
                # A fork server, which reports the ends of its workers.
                with contextlib.suppress(OSError):
                    os.kill(parent, signal.SIGCONT)
    _drain(handles, term, failures)
    reported = {failure.worker for failure in failures}
    for handle in handles:
        if handle.line.phase is Phase.CLOSE and handle.index not in reported:
            failures += _trouble_in_close(handle, deadline - begin)
        handle.child.send_signal(signal.SIGTERM)
    _drain(handles, deadline, failures)
    return tuple(failures)


def kill(handles: Sequence[WorkerHandle]) -> None:
    """Kill workers that still run, and wait for their end."""
    for handle in handles:
        handle.kill()
    deadline = time.monotonic() + _KILL_SECONDS
    for handle in handles:
        handle.join(max(0.0, deadline - time.monotonic()))


def _trouble_in_close(handle: WorkerHandle, seconds: float) -> list[WorkerError]:
    exitcode = handle.exitcode
    if exitcode is None:
        detail = f"its environments did not close in {seconds:.2g} s, so it is killed"
        return [handle.describe("hung", detail)]
    if exitcode == 0 or handle.has_failed:
        return []
    return [handle.describe("ended unexpectedly", handle.child.describe_end())]


def _shut(connection: Connection) -> None:
    """Close the socket to a worker for writing."""
    with contextlib.suppress(OSError):  # Its other end may be closed.
        limit_blocking(connection, 1)
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_WR)


def _drain(
    handles: Sequence[WorkerHandle], deadline: float, failures: list[WorkerError]
) -> None:
    """Read what workers send until all have ended or the deadline has passed."""
    talking = set(range(len(handles)))
    while True:
        poller = select.poll()
        sources: dict[int, int] = {}
        for worker, handle in enumerate(handles):
            if worker in talking:
                sources[handle.connection.fileno()] = worker
                poller.register(handle.connection.fileno(), select.POLLIN)
            if handle.exitcode is None:
                poller.register(handle.child.sentinel, select.POLLIN)
        running = any(handle.exitcode is None for handle in handles)
        left = deadline - time.monotonic()
        if running and left <= 0:
            return  # Even if more can be read: a worker may never stop sending.
        ready = poller.poll(left * 1000 if running else 0)
        if not ready:
            return
        for fd, _ in ready:
            if fd in sources:
                worker = sources[fd]
                if not _read_one(handles[worker], failures):
                    talking.discard(worker)


def _read_one(handle: WorkerHandle, failures: list[WorkerError]) -> bool:
    """Read one message; return whether more may come."""
    try:
        message = pickle.loads(handle.connection.recv_bytes())
    except (EOFError, OSError):
        return False
    except Exception:  # noqa: BLE001 - the message is not needed
        return True
    if isinstance(message, Failure):
        failures.append(message.to_worker_error(handle.index))
    return True
