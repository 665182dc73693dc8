"""The fork server: a single-threaded process that preloads modules and forks workers.

    trainer  --- control socket --->  server  -- fork -->  worker
             <-- status socket of each worker --'            |
             <================ command socket ===============>

It runs in a fresh interpreter with one thread, because forking is only safe without
other threads. A worker starts in milliseconds, with torch imported and its pages
shared. The server notices the trainer's end when the control socket closes, and through
a process descriptor of the trainer, since a fork of the trainer may keep the socket
open. It then kills the workers and exits. If the server itself is killed, the kernel
kills the workers (``PR_SET_PDEATHSIG``).

Each worker gets its own control socket, so that pools created in a worker are forked
here too. When such a worker ends, the workers that it requested are killed. The worker
also reports which modules of this package it had to import
(``launcher.share_imports``), and the server imports them before its next fork.
"""

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from marl_collect.processes import import_guard, launcher, orphans, survival
from marl_collect.processes.bootstrap import run_worker
from marl_collect.processes.packets import (
    BROKEN,
    ENDED,
    IMPORT,
    PACKET_BYTES,
    READY,
    REFUSED,
    STARTED,
    encode,
)

_MAX_FDS: Final = 4
_SWEEP_MS: Final = 50
_LAST_SECONDS: Final = 2.0


def main(control_fd: int, trainer_pidfd: int, preload: Sequence[str]) -> NoReturn:
    """Preload modules, report that, and serve until the trainer ends.

    Args:
        control_fd: our end of the trainer's control socket.
        trainer_pidfd: process descriptor of the trainer.
        preload: names of modules to import before the first fork.
    """
    _reset_signals()
    survival.set_name("marl-forkserver")
    import_guard.mark_process("The fork server")
    survival.adopt_orphans()
    mark = orphans.Mark.reserved()
    control = socket.socket(fileno=control_fd)
    try:
        survival.die_at_hangup(control_fd)  # Nothing reads it during the preload.
        _preload(preload)
        _reset_signals()  # A module may have changed them.
        survival.survive_hangup(control_fd)
    except BaseException as exception:  # noqa: BLE001 - the trainer raises it
        text = "".join(traceback.format_exception(exception))[-PACKET_BYTES // 4 :]
        with contextlib.suppress(OSError):
            control.send(BROKEN + text.encode(errors="replace"))
        os._exit(1)
    gc.collect()
    gc.freeze()  # Otherwise the first collection in a worker unshares every page.
    try:
        control.send(READY)
        _Server(control, trainer_pidfd, mark).serve()
    except BrokenPipeError:  # The trainer is gone.
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the last frame of this process
        traceback.print_exc()
    finally:
        os._exit(1)


def _reset_signals() -> None:
    survival.reset_signals()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # We end with the trainer.


def _preload(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            raise RuntimeError(
                f"preloading {name!r} started {threads - 1} thread(s), and a process "
                "with threads cannot be forked safely. Remove this module from "
                "preload=, or pass start_method='spawn'."
            )
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # Otherwise every worker prints the buffered text.
    survival.flush_c_streams()


@dataclass
class _Child:
    """A worker that has not been waited for."""

    pid: int
    pidfd: int
    status: socket.socket
    requester: socket.socket
    control: socket.socket

    def close(self) -> None:
        os.close(self.pidfd)
        self.status.close()


class _Server:
    """The loop that forks workers and reports how they ended."""

    def __init__(
        self, control: socket.socket, trainer_pidfd: int, mark: orphans.Mark
    ) -> None:
        self._pid = os.getpid()
        self._mark = mark
        self._control = control
        self._trainer = trainer_pidfd
        self._controls = {control.fileno(): control}
        self._children: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(trainer_pidfd, select.POLLIN)
        self._file_limits = _raise_file_limit()
        self._orphans = orphans.Orphans()
        self._wanted: dict[str, None] = {}  # In order.
        self._poll_ms: int | None = None  # Poll timeout until the next sweep, if any.

    def serve(self) -> None:
        """Answer requests and reap children, until the trainer ends."""
        while True:
            # An entry may be stale by now, and its number reused. So nothing below
            # blocks or relies on data being there.
            for fd in self._ready():
                if fd == self._trainer:
                    return self._kill_all()
                if fd in self._controls:
                    self._read_request(self._controls[fd])
                elif fd in self._children:
                    self._reap(fd)
                if self._control.fileno() < 0:
                    return self._kill_all()
            if self._poll_ms is not None:
                self._sweep()

    def _ready(self) -> list[int]:
        """Return readable descriptors, the trainer's control socket last.

        The trainer may send a request because a worker has answered. That worker has
        shared its imports before, and they must be read first.
        """
        ready = [fd for fd, _ in self._poll.poll(self._poll_ms)]
        return sorted(ready, key=lambda fd: fd == self._control.fileno())

    def _read_request(self, requester: socket.socket) -> None:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, fds, _, _ = socket.recv_fds(requester, PACKET_BYTES, _MAX_FDS, flags)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            self._close_control(requester)
        elif data[:1] == IMPORT:
            self._wanted |= dict.fromkeys(data[1:].decode().split())
        elif len(fds) < 2:  # Our file table was full; the trainer sees EOF.
            _close_fds(fds)
        else:
            self._import_wanted()
            self._fork(requester, fds)

    def _import_wanted(self) -> None:
        """Import the modules that workers had to import."""
        names = [name for name in self._wanted if name not in sys.modules]
        self._wanted.clear()
        for name in names:
            with contextlib.suppress(Exception):  # The worker will raise it.
                importlib.import_module(name)
        if names:
            gc.collect()
            gc.freeze()

    def _fork(self, requester: socket.socket, fds: list[int]) -> None:
        """Fork a worker with ``fds``: command, status, stdout, stderr."""
        status = socket.socket(fileno=fds[1])
        ours = theirs = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                self._become_worker(fds[0], theirs.detach(), fds[2:], status, ours)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            with contextlib.suppress(OSError):
                status.send(encode(REFUSED, error.errno or 0))
            status.close()
            if ours is not None:
                ours.close()
        else:
            child = _Child(pid, pidfd, status, requester, ours)
            self._children[pidfd] = child
            self._controls[ours.fileno()] = ours
            self._poll.register(pidfd, select.POLLIN)
            self._poll.register(ours.fileno(), select.POLLIN)
            with contextlib.suppress(OSError):
                socket.send_fds(status, [encode(STARTED, pid)], [pidfd])
        finally:
            _close_fds([fds[0], *fds[2:]])
            if theirs is not None:
                theirs.close()

    def _become_worker(
        self,
        command_fd: int,
        control_fd: int,
        output_fds: list[int],
        *sockets: socket.socket,
    ) -> NoReturn:
        try:
            survival.die_with_parent(self._pid)
            self._mark.write(os.getpid())
            for target, fd in enumerate(output_fds, start=1):
                os.dup2(fd, target)
            _close_fds(output_fds)
            for end in sockets:
                end.close()
            self._close_server_fds()
            resource.setrlimit(resource.RLIMIT_NOFILE, self._file_limits)
            launcher.adopt_control(control_fd)
            run_worker(command_fd)
        except BaseException:  # noqa: BLE001 - never return into the server's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _close_server_fds(self) -> None:
        for child in self._children.values():
            child.close()
        for control in self._controls.values():
            control.close()
        os.close(self._trainer)
        self._children.clear()
        self._controls.clear()

    def _reap(self, pidfd: int) -> None:
        child = self._children[pidfd]
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return
        self._poll.unregister(pidfd)
        del self._children[pidfd]
        if child.control.fileno() >= 0:
            self._close_control(child.control)
        with contextlib.suppress(OSError):
            child.status.send(encode(ENDED, os.waitstatus_to_exitcode(status)))
        child.close()
        self._orphans.worker_ended()
        self._sweep()

    def _sweep(self) -> None:
        """End the orphans of workers that have ended."""
        workers = {child.pid for child in self._children.values()}
        self._poll_ms = _SWEEP_MS if self._orphans.sweep(workers) else None

    def _close_control(self, control: socket.socket) -> None:
        """Kill the workers that were requested through a socket, and close it."""
        for child in self._children.values():
            if child.requester is control:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        self._poll.unregister(control.fileno())
        del self._controls[control.fileno()]
        control.close()

    def _kill_all(self) -> None:
        """Kill all descendants, then exit."""
        for child in self._children.values():
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        deadline = time.monotonic() + _LAST_SECONDS
        # We adopt the orphans of workers once these have ended.
        while self._orphans.sweep((), everything=True) and time.monotonic() < deadline:
            select.select([], [], [], _SWEEP_MS / 1000)
        os._exit(0)


def _raise_file_limit() -> tuple[int, int]:
    """Raise the limit of open files to its maximum; return the previous limits."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    return limits


def _close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
