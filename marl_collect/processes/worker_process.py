"""One worker process and the socket to it."""

import contextlib
import os
import resource
import signal
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, final

from marl_collect.processes.children import Child, wait_end
from marl_collect.processes.launcher import StartMethod, launch

# How long one read or write of a socket may block when the other process is
# stopped in the middle of a message; a whole message may take longer.
SOCKET_SECONDS: Final = 60


@final
class WorkerProcess:
    """A started process: its socket, its exit code, and how to end it.

    Attributes:
        connection: our end of the command socket.
    """

    def __init__(self, child: Child, connection: Connection) -> None:
        self._child = child
        self.connection: Final = connection
        limit_blocking(connection, SOCKET_SECONDS)

    @classmethod
    def start(
        cls, start_method: StartMethod, preload: Sequence[str], deadline: float
    ) -> "WorkerProcess":
        """Start a process without waiting for it; call ``confirm`` next."""
        return cls(*launch(start_method, preload, deadline))

    def confirm(self, deadline: float) -> None:
        """Wait until the process is known to run; see ``Child.confirm``."""
        self._child.confirm(deadline)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._child.sentinel

    @property
    def exitcode(self) -> int | None:
        """Exit code; ``-N`` if signal ``N`` ended it; None while it runs."""
        return self._child.poll()

    def describe_end(self) -> str:
        """Describe in words how it ended."""
        return self._child.describe_end()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._child.send_signal(signal.SIGKILL)

    def abort(self) -> None:
        """Send SIGABRT: the process prints its Python stack to stderr and dies."""
        # A core dump would take longer than we wait.
        with contextlib.suppress(AttributeError, OSError):  # Linux only.
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_CORE)
            resource.prlimit(self.pid, resource.RLIMIT_CORE, (0, hard))
        self._child.send_signal(signal.SIGABRT)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; return whether it has.

        Args:
            timeout: seconds; None for no limit.
        """
        return wait_end(self._child, timeout)

    def close(self) -> None:
        """Close our file descriptors; does not end the process."""
        self.connection.close()
        self._child.close()


def limit_blocking(connection: Connection, seconds: int) -> None:
    """Limit how long reads and writes block; they then raise BlockingIOError."""
    copy = socket.socket(fileno=os.dup(connection.fileno()))
    with copy:
        value = struct.pack("@ll", seconds, 0)
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it ended or it is unknown."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
