"""One worker as its pool sees it: its process, its messages, and its end."""

import pickle
import select
import threading
from collections import deque
from enum import Enum
from typing import Any, Final, final

from marl_collect.errors import Failure, WorkerError, raise_failure
from marl_collect.processes.status_board import Line
from marl_collect.processes.worker_process import SOCKET_SECONDS, WorkerProcess

_EXIT_SECONDS: Final = 1.0  # From the end of a process's socket to its own.
_READ_AHEAD: Final = 1000  # Messages at a time: a worker may never stop talking.


class Absent(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
"""Stands for a message or an argument that is not there, as None may be one."""


@final
class WorkerHandle:
    """A worker's process, what it has sent, and what has become of it.

    Attributes:
        index: the worker's index in the pool.
        process: its process.
        line: its line of the status board.
        sent: messages sent to it.
    """

    def __init__(self, index: int, process: WorkerProcess, line: Line) -> None:
        self.index: Final = index
        self.process: Final = process
        self.line: Final = line
        self.sent = 0
        self._writing = threading.Lock()  # A large message is several writes.
        self._read_ahead: deque[object] = deque()
        self._fds = [process.connection.fileno(), process.sentinel]
        self._failure: Failure | None = None
        # Its arguments only: the error itself would hold whoever has caught it.
        self._error: tuple[Any, ...] | None = None

    def write(self, data: bytes) -> None:
        """Send pickled data.

        Nothing happens if the worker has died: what it said before comes first,
        and reading tells.

        Raises:
            WorkerError: it does not read; it is killed.
        """
        try:
            with self._writing:
                self.process.connection.send_bytes(data)
        except BlockingIOError:
            problem = f"read nothing of a message for {SOCKET_SECONDS} s"
            raise self.give_up(problem) from None
        except (BrokenPipeError, ConnectionResetError):
            pass

    @property
    def fds(self) -> list[int]:
        """What to wait on: readable when there is news."""
        return self._fds

    @property
    def _at_end(self) -> bool:
        """Whether its socket has nothing more to give."""
        return len(self._fds) == 1

    @property
    def has_read_ahead(self) -> bool:
        """Whether `take` has a message without looking at the socket."""
        return bool(self._read_ahead)

    @property
    def is_ready(self) -> bool:
        """Whether `take` would return a message or raise."""
        return self.has_read_ahead or any(map(_is_readable, self._fds))

    def read_ahead(self) -> None:
        """Read all there is, for `take` to return later.

        Raises:
            Exception: as `take` would, once it has returned all messages.
        """
        ended = self._has_ended()  # First: what it wrote before is there then.
        for _ in range(_READ_AHEAD):
            message = self._read()
            if message is ABSENT:
                break
            self._read_ahead.append(message)
        if not self._read_ahead and (ended or self._at_end) and self._has_ended():
            self._raise_end()

    def take(self) -> object:
        """Return the next message, or ``ABSENT``; never waits.

        Raises:
            Exception: what the worker's main function raised.
            WorkerError: it has died and left nothing to read.
        """
        if self._read_ahead:
            return self._read_ahead.popleft()
        ended = self._has_ended()  # First: what it wrote before is there then.
        message = self._read()
        if message is ABSENT and (ended or self._at_end) and self._has_ended():
            self._raise_end()
        return message

    def _read(self) -> object:
        connection = self.process.connection
        if self._at_end or not _is_readable(connection.fileno()):
            return ABSENT
        try:
            data = connection.recv_bytes()
        except BlockingIOError:
            problem = f"stopped in the middle of a message for {SOCKET_SECONDS} s"
            raise self.give_up(problem) from None
        except (EOFError, OSError):
            del self._fds[0]
            self.process.join(_EXIT_SECONDS)  # It is ending; the sentinel lags.
            return ABSENT
        try:
            message: object = pickle.loads(data)
        except Exception as error:
            raise self.describe("sent what cannot be unpickled", str(error)) from error
        if isinstance(message, Failure):
            self._failure = message
            raise_failure(message, self.index)
        return message

    def _has_ended(self) -> bool:
        return self.process.exitcode is not None

    def _raise_end(self) -> None:
        if self._error is not None:
            raise WorkerError(*self._error)
        if self._failure is not None:
            raise_failure(self._failure, self.index)
        error = self.describe("ended unasked", self.process.describe_end())
        self._error = error.args
        raise error

    def give_up(self, problem: str, detail: str = "") -> WorkerError:
        """Kill a worker that does not do its part, and return what to raise."""
        error = self.describe(problem, detail)
        self._error = error.args
        self.process.abort()  # Prints its Python stack.
        if not self.process.join(1.0):
            self.process.kill()
            self.process.join(5.0)
        return error

    def describe(self, problem: str, detail: str = "") -> WorkerError:
        """Return an error with all that is known about the worker."""
        progress = self.line.read()
        return WorkerError(
            self.index,
            problem,
            detail,
            pid=self.process.pid,
            exitcode=self.process.exitcode,
            phase=progress.phase.label,
            environment=progress.environment,
        )


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
