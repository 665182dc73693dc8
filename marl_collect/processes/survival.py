"""Signal handling, process names, and termination with the parent process."""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import select
import signal
import threading

from marl_collect.processes import linux

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def reset_signals() -> None:
    """Ignore SIGINT, and restore the defaults of SIGTERM and SIGCHLD.

    A terminal sends SIGINT to every process in the foreground; the trainer handles it.
    Workers stay in the trainer's process group, so that Ctrl-Z and a closing terminal
    reach them too.

    SIGCHLD may be ignored because the trainer or its parent ignores it. The kernel then
    does not report how a child ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def enable_fault_dumps() -> None:
    """Print the Python stack to stderr when a signal such as SIGSEGV kills us."""
    try:
        faulthandler.enable(file=2)
    except (OSError, RuntimeError, ValueError):  # There is no stderr.
        faulthandler.disable()


def set_name(name: str) -> None:
    """Set the name in ``ps -o comm`` and ``top``; truncated to 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Works even if the process is stuck in C++ and holds the interpreter lock. The thread
    that started it must live as long as the parent.

    Args:
        parent: process id of the parent, to detect that it has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def wake_at_parents_end() -> None:
    """Have the kernel continue this process if it is stopped when its parent ends.

    A stopped process cannot notice the end. The thread that started this process may
    end earlier: a process that runs ignores the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def die_at_hangup(fd: int) -> None:
    """Let SIGIO kill this process when the other end of a socket is closed.

    Data on the socket would kill the process too, so nothing may be written meanwhile.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    # An end that was closed before sends no signal.
    poller = select.poll()
    poller.register(fd, select.POLLHUP)
    if poller.poll(0):
        os._exit(1)


def survive_hangup(fd: int) -> None:
    """Undo ``die_at_hangup``."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_ASYNC)


def adopt_orphans() -> None:
    """Become the parent of our descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def watch_parent(parent: int) -> None:
    """Start a thread that kills this process when ``parent`` has ended."""
    threading.Thread(
        target=_kill_after, args=(parent,), name="watch-parent", daemon=True
    ).start()


def _kill_after(parent: int) -> None:
    with contextlib.suppress(OSError):  # It has ended; the loop below notices.
        pidfd = linux.open_process(parent)
        if pidfd != linux.NO_PIDFD:
            if os.getppid() == parent:
                select.select([pidfd], [], [])
            os.close(pidfd)
    tick = threading.Event()
    while os.getppid() == parent:
        tick.wait(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def flush_c_streams() -> None:
    """Flush the output of C and C++ libraries, which ``os._exit`` would drop."""
    ctypes.CDLL(None).fflush(None)


def _prctl(option: int, argument: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(ctypes.c_int(option), argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
