"""The pool's handle of one worker: its process, its messages, and how it ended."""

import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, Final, final

from marl_collect.errors import Failure, WorkerError, raise_failure
from marl_collect.processes import linux, pickling
from marl_collect.processes.children import Child, wait_end, wait_readable
from marl_collect.processes.status_board import Line

SOCKET_SECONDS: Final = 60
"""How long one read of a socket may block when the other process is stopped in
the middle of a message. A whole message may take longer."""

_EXIT_SECONDS: Final = 1.0  # From the end of a socket to that of its process.
_NOW: Final = 0.0  # A deadline that has passed.
_READ_AHEAD: Final = 1000  # Messages at a time.
_LONGEST: Final = 2**31 - 1  # A Connection writes longer lengths in another way.


ABSENT: Final = object()
"""Marks a missing message, since None is a valid one."""


@final
class WorkerHandle:
    """A worker's process, its unread messages, and its error if it failed.

    Attributes:
        index: the worker's index in the pool.
        line: its line of the status board.
        child: its process.
        connection: our end of its command socket.
        sent: messages sent to it.
        writing: held while a message is sent to it.
    """

    def __init__(
        self, index: int, line: Line, child: Child, connection: Connection
    ) -> None:
        """Own a process that may not run yet; ``child.confirm`` waits until it does."""
        self.index: Final = index
        self.line: Final = line
        self.connection: Final = connection
        self.child: Final = child
        limit_blocking(connection, SOCKET_SECONDS)
        self.sent = 0
        self.writing = threading.Lock()  # A large message takes several writes.
        self._read_ahead: deque[object] = deque()
        self.fds = [connection.fileno(), child.sentinel]
        """Descriptors that are readable if ``next_message`` would return or raise."""
        self._failure: Failure | None = None
        self.failed_at = math.inf
        """When it failed, died or hung, on ``time.monotonic``."""
        # Only its arguments: the error itself would keep its traceback's frames alive.
        self._error: tuple[Any, ...] | None = None

    # Process

    @property
    def pid(self) -> int:
        """Process id."""
        return self.child.pid

    @property
    def exitcode(self) -> int | None:
        """Exit code; ``-N`` if signal ``N`` ended it; None while it runs."""
        return self.child.poll()

    def kill(self) -> None:
        """Send SIGKILL."""
        self.child.send_signal(signal.SIGKILL)

    def _abort(self) -> None:
        """Send SIGABRT: the process prints its Python stack to stderr and dies."""
        with suppress(OSError):  # A core dump would take longer than we wait.
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_CORE)
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, hard))
        self.child.send_signal(signal.SIGABRT)
        self.child.send_signal(signal.SIGCONT)  # A stopped process would not die.

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; return whether it has.

        Args:
            timeout: seconds; None for no limit.
        """
        return wait_end(self.child, timeout)

    def close(self) -> None:
        """Close our file descriptors; does not end the process."""
        self.connection.close()
        self.child.close()

    # Messages

    @property
    def _at_end(self) -> bool:
        """Whether its socket is exhausted."""
        return len(self.fds) == 1

    @property
    def has_failed(self) -> bool:
        """Whether it has sent an exception of its main function."""
        return self._failure is not None

    @property
    def has_read_ahead(self) -> bool:
        """Whether ``next_message`` returns or raises without reading the socket."""
        return bool(self._read_ahead) or self.has_failed

    @property
    def is_ready(self) -> bool:
        """Whether ``next_message`` would return a message or raise."""
        return self.has_read_ahead or any(wait_readable(fd, _NOW) for fd in self.fds)

    def read_ahead(self, most: int = _READ_AHEAD) -> None:
        """Read available messages, which ``next_message`` returns later.

        Args:
            most: how many are read; a worker may never stop sending.

        Raises:
            Exception: as ``next_message``, once it has returned all messages.
        """
        if not self._read_ahead and self._failure is not None:
            # It may take long to close its environments.
            raise_failure(self._failure, self.index)
        # Checked first, so that all it wrote can be read.
        ended = self.exitcode is not None
        for _ in range(most):
            message = self._read()
            if message is ABSENT:
                break
            self._read_ahead.append(message)
        if (
            not self._read_ahead
            and (ended or self._at_end)
            and self.exitcode is not None
        ):
            self._raise_end()

    def next_message(self) -> object:
        """Return the next message, or ``ABSENT``; never blocks.

        Raises:
            Exception: what the worker's main function raised.
            WorkerError: it has died, and all its messages were read.
        """
        if not self._read_ahead:
            self.read_ahead(1)
        return self._read_ahead.popleft() if self._read_ahead else ABSENT

    def _read(self) -> object:
        if self._at_end or not wait_readable(self.connection.fileno(), _NOW):
            return ABSENT
        try:
            data = self.connection.recv_bytes()
        except BlockingIOError:
            problem = f"stopped in the middle of a message for {SOCKET_SECONDS} s"
            raise self.give_up(problem) from None
        except (EOFError, OSError):
            del self.fds[0]
            self.join(_EXIT_SECONDS)  # It is ending; the sentinel follows.
            return ABSENT
        try:
            message: object = pickle.loads(data)
        except Exception as error:
            problem = "sent a message that cannot be unpickled"
            raise self.describe(problem, str(error)) from error
        if isinstance(message, Failure):
            self._failure, self.failed_at = message, message.time
            raise_failure(message, self.index)
        return message

    def _raise_end(self) -> None:
        if self._error is None:
            self._error = self.describe(
                "ended unexpectedly", self.child.describe_end()
            ).args
            self.failed_at = time.monotonic()
        # No variable: it would keep the error, and its traceback the variable's frame.
        raise WorkerError(*self._error)

    def give_up(self, problem: str, detail: str = "") -> WorkerError:
        """Kill a worker that does not respond, and return the error to raise."""
        error = self.describe(problem, detail)
        self._error, self.failed_at = error.args, time.monotonic()
        self._abort()
        if not self.join(1.0):
            self.kill()
            self.join(5.0)
        return error

    def describe(self, problem: str, detail: str = "") -> WorkerError:
        """Return an error with the worker's index, process id, exit code and phase."""
        return WorkerError(
            self.index,
            problem,
            detail,
            pid=self.pid,
            exitcode=self.exitcode,
            phase=self.line.phase.label,
            environment=self.line.environment,
        )


def pack(message: object) -> bytes:
    """Return a message as ``Connection.recv_bytes`` reads it."""
    data = pickling.dumps(message)
    length = struct.pack("!i", len(data))
    if len(data) > _LONGEST:
        length = struct.pack("!iQ", -1, len(data))
    return length + data


def write_each(
    messages: Sequence[tuple[WorkerHandle, bytes]],
    pause: float,
    still_read: Callable[[Sequence[WorkerHandle]], Collection[WorkerHandle]],
) -> None:
    """Send what ``pack`` returned to workers, to all at the same time.

    It is no error here that a worker has died: its earlier messages come first, and
    reading reports the death.

    Args:
        messages: in the order of the workers, so that threads do not lock each other.
        pause: seconds after which workers that read nothing are checked.
        still_read: returns those that may read later; the others are given up.
    """
    with ExitStack() as stack:
        unsent = []
        for handle, data in messages:
            stack.enter_context(handle.writing)
            unsent.append((handle, memoryview(data)))
        while unsent:
            unsent = [
                (handle, data[sent:])
                for handle, data in unsent
                if (sent := _write_some(handle, data)) < len(data)
            ]
            handles = [handle for handle, _ in unsent]
            if unsent and not _await_a_reader(handles, pause):
                readers = still_read(handles)
                unsent = [pair for pair in unsent if pair[0] in readers]


def _await_a_reader(handles: Sequence[WorkerHandle], seconds: float) -> bool:
    """Wait until a socket can be written or has ended; return whether one can."""
    poller = select.poll()
    try:
        for handle in handles:
            poller.register(handle.connection.fileno(), select.POLLOUT)
    except OSError:  # Another thread has closed it: the next write notices that.
        return True
    return bool(poller.poll(seconds * 1000))


def _write_some(handle: WorkerHandle, data: memoryview) -> int:
    """Write what the socket takes now; return how much, or all if it has ended."""
    try:
        fd = handle.connection.fileno()
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        try:
            return peer.send(data, socket.MSG_DONTWAIT)
        finally:
            peer.detach()
    except BlockingIOError:
        return 0
    except (BrokenPipeError, ConnectionResetError):
        pass
    except OSError:
        # A signal handler may have closed the pool: reading reports that.
        if not handle.connection.closed:
            raise
    return len(data)


def limit_blocking(connection: Connection, seconds: int) -> None:
    """Limit how long reads and writes block; they then raise BlockingIOError."""
    copy = socket.socket(fileno=os.dup(connection.fileno()))
    with copy:
        value = struct.pack("@ll", seconds, 0)
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it ended or it is unknown."""
    folder = linux.folder_of(pid)
    if folder is not None:
        with suppress(OSError):
            pages = int((folder / "statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
