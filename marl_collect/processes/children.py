"""A started process, forked or spawned, as its requester sees it.

Both kinds have a sentinel to wait on, an exit code, and a way to send signals that
cannot reach an unrelated process that reuses the process id.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from typing import Final, final

from marl_collect.errors import describe_exit
from marl_collect.processes import linux
from marl_collect.processes.packets import (
    ENDED,
    PACKET_BYTES,
    REFUSED,
    STARTED,
    decode,
)

_ORPHAN_SECONDS: Final = 5.0


@final
class ForkedChild:
    """A process forked by the fork server, which reports its end on a socket."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self.pid = 0
        """Process id; 0 until ``confirm`` knows it."""
        self._pidfd = linux.NO_PIDFD
        self._exitcode: int | None = None
        self._orphaned = False
        self._lock = threading.RLock()  # A signal handler may close the pool.

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._status.fileno()

    def confirm(self, deadline: float) -> None:
        """Wait until the process is known to run.

        Args:
            deadline: on the clock of ``time.monotonic``.

        Raises:
            OSError: it could not be started.
        """
        if self.pid:
            return
        if not wait_readable(self._status.fileno(), deadline):
            raise TimeoutError(
                "the fork server did not answer in time: it is stopped, or the "
                "machine is overloaded. Increase start_timeout=."
            )
        data, fds, flags, _ = socket.recv_fds(
            self._status, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if data[:1] == STARTED and not flags & socket.MSG_CTRUNC:
            self.pid = decode(data)
            self._pidfd = fds[0] if fds else linux.NO_PIDFD
            return
        for fd in fds:
            os.close(fd)
        if data[:1] == REFUSED:
            number = decode(data)
            problem = os.strerror(number)
            raise OSError(number, f"the fork server could not fork: {problem}")
        raise OSError(
            "the fork server started no worker: it has ended, or a process has too "
            "many open files (see `ulimit -n`)"
        )

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; never waits."""
        with self._lock:
            if self._exitcode is None and self._status.fileno() >= 0:
                exitcode = self._read_end()
                if self._exitcode is None:
                    self._exitcode = exitcode
            return self._exitcode

    def _read_end(self) -> int | None:
        try:
            data = self._status.recv(PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:  # Reset, or closed by a signal handler.
            data = b""
        if data[:1] == ENDED:
            return decode(data)
        if self._exitcode is not None:  # A signal handler has read it.
            return self._exitcode
        # The server died without reporting. The kernel kills its children.
        self._orphaned = True
        linux.await_process(self.pid, self._pidfd, _ORPHAN_SECONDS)
        return -signal.SIGKILL

    def describe_end(self) -> str:
        """Describe in words how the process ended."""
        if self._orphaned:
            return "its fork server was killed"
        return describe_exit(self.poll())

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with self._lock:
            if not self.pid or self._status.fileno() < 0:
                return
            if self._pidfd == linux.NO_PIDFD:
                self.poll()  # Another process may have the id of one that has ended.
            if self._exitcode is None:
                # It may have ended, and its status is not read yet.
                with contextlib.suppress(ProcessLookupError):
                    linux.send_signal(self.pid, self._pidfd, number)

    def close(self) -> None:
        """Close our file descriptors; the process has ended or belongs to another."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, linux.NO_PIDFD
            if pidfd != linux.NO_PIDFD:
                os.close(pidfd)
            self._status.close()


@final
class SpawnedChild:
    """A fresh interpreter that this process started."""

    def __init__(self, popen: subprocess.Popen[bytes], sentinel: int) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.sentinel = sentinel
        """A file descriptor that is readable once the process has ended."""
        self._owner = os.getpid()

    def confirm(self, deadline: float) -> None:
        """Do nothing: it runs already."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; never waits."""
        return self._popen.poll()

    def describe_end(self) -> str:
        """Describe in words how the process ended."""
        code = self.poll()
        if code == 0 and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            return "its exit code is unknown because this process ignores SIGCHLD"
        return describe_exit(code)

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        self._popen.send_signal(number)

    def close(self) -> None:
        """Close our file descriptors; the process has ended or belongs to another."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
        if self._owner != os.getpid():
            self._popen.returncode = 0  # Not our child: suppresses the ResourceWarning.


Child = ForkedChild | SpawnedChild


def wait_end(child: Child, timeout: float | None) -> bool:
    """Wait until a process has ended; return whether it has.

    Args:
        child: a confirmed process.
        timeout: seconds; None for no limit.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while child.poll() is None:
        if not wait_readable(child.sentinel, deadline):
            return child.poll() is not None
    return True


def wait_readable(fd: int, deadline: float | None) -> bool:
    """Wait until a descriptor is readable, or at its end; return whether it is.

    Args:
        fd: the descriptor.
        deadline: on the clock of ``time.monotonic``; None for no limit.
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if deadline is None:
        return bool(poller.poll())
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
