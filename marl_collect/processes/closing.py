"""Ending the processes of a pool: ask, SIGTERM, SIGKILL, within a time limit."""

import contextlib
import os
import pickle
import select
import socket
import time
from collections.abc import Sequence
from typing import Final

from marl_collect.errors import Failure, WorkerError
from marl_collect.processes.status_board import STOP, StatusBoard
from marl_collect.processes.worker_process import WorkerProcess, limit_blocking

# Share of the time limit that is reserved for SIGTERM.
_SIGNAL_SHARE: Final = 0.2
_KILL_SECONDS: Final = 3.0


def end_workers(
    processes: Sequence[WorkerProcess],
    status_board: StatusBoard,
    timeout: float,
    last_message: bytes | None,
) -> tuple[WorkerError, ...]:
    """End processes and close our file descriptors.

    Messages that they still send are read, so that no worker blocks on a full socket.

    Args:
        processes: all workers of a pool, in order. They may have ended already.
        status_board: the pool's status board.
        timeout: seconds until SIGKILL.
        last_message: pickled message to send first, if any.

    Returns:
        The failures that workers reported meanwhile.
    """
    deadline = time.monotonic() + timeout
    failures: list[WorkerError] = []
    try:
        if timeout > 0:
            for line in status_board.lines:
                line.cells[STOP] = 1
            for process in processes:
                _ask(process, last_message)
            _drain(processes, deadline - _SIGNAL_SHARE * timeout, failures)
            for process in processes:
                process.terminate()
            _drain(processes, deadline, failures)
    finally:
        # Runs even after a second Ctrl-C, so that no process is left behind.
        for process in processes:
            process.kill()
        deadline = time.monotonic() + _KILL_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.close()
    return tuple(failures)


def _ask(process: WorkerProcess, last_message: bytes | None) -> None:
    """Close the socket to a worker for writing, without blocking."""
    connection = process.connection
    # The socket may be full, or its other end closed.
    with contextlib.suppress(OSError):
        if last_message is not None:
            os.set_blocking(connection.fileno(), False)
            connection.send_bytes(last_message)
    with contextlib.suppress(OSError):
        os.set_blocking(connection.fileno(), True)
        limit_blocking(connection, 1)
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.shutdown(socket.SHUT_WR)


def _drain(
    processes: Sequence[WorkerProcess], deadline: float, failures: list[WorkerError]
) -> None:
    """Read what workers send until all have ended or the deadline has passed."""
    talking = set(range(len(processes)))
    while True:
        poller = select.poll()
        sources: dict[int, int] = {}
        for worker, process in enumerate(processes):
            if worker in talking:
                sources[process.connection.fileno()] = worker
                poller.register(process.connection.fileno(), select.POLLIN)
            if process.exitcode is None:
                poller.register(process.sentinel, select.POLLIN)
        running = any(process.exitcode is None for process in processes)
        left = deadline - time.monotonic()
        if running and left <= 0:
            return  # Even if more can be read: a worker may never stop sending.
        ready = poller.poll(left * 1000 if running else 0)
        if not ready:
            return
        for fd, _ in ready:
            if fd in sources:
                worker = sources[fd]
                if not _read_one(processes[worker], worker, failures):
                    talking.discard(worker)


def _read_one(process: WorkerProcess, worker: int, failures: list[WorkerError]) -> bool:
    """Read one message; return whether more may come."""
    try:
        message = pickle.loads(process.connection.recv_bytes())
    except (EOFError, OSError):
        return False
    except Exception:  # noqa: BLE001 - the message is not needed
        return True
    if isinstance(message, Failure):
        failures.append(message.to_worker_error(worker))
    return True
