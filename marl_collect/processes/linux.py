"""What differs between kernels, containers and builds of Python, and what to do then.

Whether a system call exists is asked of the kernel, by calling it. A build of Python
lacks functions if it was compiled against old headers: conda's has no
``os.pidfd_open``, uv's had no ``os.memfd_create``. Such calls are made by number. An
old kernel refuses them with ENOSYS, and the filter of a strict container with EPERM.

| refused             | instead                                                        |
|---------------------|----------------------------------------------------------------|
| `memfd_create`      | a file without a name in /dev/shm, or in the temporary folder  |
| `pidfd_open`        | process ids; a thread that waits for a child                   |
| `pidfd_send_signal` | `kill`, after a look whether the process has ended             |

Nothing here runs while environments step.

Source:
    memfd_create(2), pidfd_open(2), pidfd_send_signal(2), proc(5), pid_namespaces(7),
    prctl(2); the kernel's asm/unistd_64.h for x86_64 and asm-generic/unistd.h for
    aarch64.
"""

import contextlib
import ctypes
import errno
import logging
import math
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NO_PIDFD: Final = -1
"""In place of a process descriptor where the kernel has none for us."""

_NUMBERS: Final = {
    "x86_64": {"memfd_create": 319, "pidfd_send_signal": 424, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_send_signal": 424, "pidfd_open": 434},
}
_REFUSALS: Final = (errno.ENOSYS, errno.EPERM, errno.EACCES)
"""EACCES: memfd_create, if the sysctl vm.memfd_noexec is 2."""

_MFD_CLOEXEC: Final = 1
_PR_GET_DUMPABLE: Final = 3
_CAP_SYS_PTRACE: Final = 1 << 19
_SHM: Final = "/dev/shm"
_LOOK_SECONDS: Final = 0.01
_LOG: Final = logging.getLogger(__name__)


# System calls


def _call(name: str, *arguments: object) -> int:
    """Make a system call by its number.

    Raises:
        OSError: what the kernel answers; ENOSYS if the number is not known here.
    """
    # A program of 32 bits has other numbers, on the same kernel.
    numbers = _NUMBERS.get(os.uname().machine, {}) if sys.maxsize > 1 << 32 else {}
    if name not in numbers:
        raise OSError(errno.ENOSYS, f"the number of {name} is not known here")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(numbers[name]), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _memfd_create(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    text = ctypes.c_char_p(name.encode())
    return _call("memfd_create", text, ctypes.c_long(_MFD_CLOEXEC))


def _pidfd_open(pid: int) -> int:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call("pidfd_open", ctypes.c_long(pid), ctypes.c_long(0))


def _pidfd_send_signal(pidfd: int, number: int) -> None:
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
        return
    long = ctypes.c_long
    _call("pidfd_send_signal", long(pidfd), long(number), None, long(0))


# Processes


def open_process(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended, or `NO_PIDFD`.

    Raises:
        OSError: there is no such process, or too many files are open.
    """
    try:
        return _pidfd_open(pid)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return NO_PIDFD


def send_signal(pid: int, pidfd: int, number: int) -> None:
    """Send a signal to a process that has not been seen to end.

    Args:
        pid: its process id, used where the kernel refuses process descriptors.
        pidfd: from `open_process`.
        number: of the signal.

    Raises:
        ProcessLookupError: it has ended.
    """
    if pidfd != NO_PIDFD:
        try:
            _pidfd_send_signal(pidfd, number)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        else:
            return
    os.kill(pid, number)


def await_process(pid: int, pidfd: int, seconds: float) -> None:
    """Wait until a process has ended that need not be our child; see `send_signal`."""
    if pidfd != NO_PIDFD:
        select.select([pidfd], [], [], seconds)
        return
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            select.select([], [], [], _LOOK_SECONDS)


def open_child(pid: int) -> int:
    """Return a descriptor that is readable once a child has ended; the caller's.

    Where the kernel refuses process descriptors, it is a socket to a thread that waits.
    A pipe that the child holds would not do: its own forks hold it too.

    Args:
        pid: process id of a child that has not been waited for.
    """
    pidfd = open_process(pid)
    if pidfd != NO_PIDFD:
        return pidfd
    ours, theirs = socket.socketpair()
    threading.Thread(
        target=_tell_end, args=(pid, theirs), name="await-child", daemon=True
    ).start()
    return ours.detach()


def _tell_end(pid: int, listener: socket.socket) -> None:
    # Somebody else has waited for it, or the kernel has, because SIGCHLD is ignored.
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with listener, contextlib.suppress(OSError):  # Nobody may be listening any more.
        # A message, because closing does not reach past the copy of a fork of us.
        listener.send(b"e", socket.MSG_NOSIGNAL)


# Shared memory


def create_memory_file(nbytes: int) -> int:
    """Create an empty file in memory without a name; return its descriptor.

    Args:
        nbytes: how large it will become.

    Raises:
        OSError: too many files are open; or ENOSPC: the kernel refuses memfd_create,
            and no folder has room. The message says what to do.
    """
    try:
        return _memfd_create("marl_collect")
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        refusal = error
    for folder in _folders():
        if _free_bytes(folder) >= nbytes:
            break
    else:
        raise OSError(
            errno.ENOSPC,
            f"the kernel refuses memfd_create ({refusal.strerror}), and neither "
            f"{_SHM} nor the temporary folder has room for a file instead. Enlarge "
            "/dev/shm (`docker run --shm-size=2g`), or allow memfd_create",
        )
    if folder != _SHM:
        _warn_once(
            f"the kernel refuses memfd_create ({refusal.strerror}), and {_SHM} has no "
            f"room: memory that processes share is files in {folder}, which is slow "
            "if that is a disk. Enlarge /dev/shm (`docker run --shm-size=2g`)"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _folders() -> Iterator[str]:
    yield _SHM
    with contextlib.suppress(FileNotFoundError):  # Not even the current one will do.
        yield tempfile.gettempdir()


def _free_bytes(folder: str) -> int:
    """Return the free bytes of a folder's file system; -1 if we cannot write to it."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return -1
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    return status.f_bavail * status.f_frsize if is_writable else -1


def is_closed_to_others() -> bool:
    """Whether the kernel keeps other processes of this user from opening our files.

    It does so if this process is not dumpable, as after ``os.setuid``.
    """
    if ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1:
        return False
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return not int(line.split()[1], 16) & _CAP_SYS_PTRACE
    return True


# /proc


def folder_of_this_process() -> str:
    """Return the folder in /proc that has this process's files, for other processes.

    /proc may number processes differently from this process: in a PID namespace that
    has not mounted its own.
    """
    return f"/proc/{os.readlink('/proc/self')}"


def folder_of(pid: int) -> Path | None:
    """Return a process's folder in /proc; None if /proc numbers processes differently.

    It would be that of an unrelated process then.
    """
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return Path(f"/proc/{pid}")
        _warn_once(
            "/proc belongs to another PID namespace: max_worker_rss has no effect, "
            "and programs that environments start may outlive their workers. Mount "
            "/proc anew, for example with `unshare --mount-proc`"
        )
    return None


def state_of(pid: int) -> tuple[str, int]:
    """Return a process's state, such as "T" if it is stopped, and its parent.

    "" and 0 where /proc does not tell, for example since it has ended.
    """
    fields = _stat_of(pid)
    return (fields[0], int(fields[1])) if fields else ("", 0)


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time of a process, of all threads; NaN where /proc tells none."""
    fields = _stat_of(pid)
    if not fields:
        return math.nan
    user, system = map(int, fields[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _stat_of(pid: int) -> list[str]:
    """Return the fields after a process's name, see proc(5); none if it has ended."""
    folder = folder_of(pid)
    with contextlib.suppress(OSError):
        if folder is not None:
            # The name, in brackets, may contain anything.
            text = (folder / "stat").read_text(errors="replace")
            return text.rpartition(") ")[2].split()
    return []


def is_stopped(pid: int) -> bool:
    """Return whether a signal, such as SIGSTOP, has stopped a process."""
    return state_of(pid)[0] == "T"


_warned: Final = set[str]()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _LOG.warning(message)
