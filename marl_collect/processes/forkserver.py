"""The fork server: a single-threaded process that preloads modules and forks workers.

    trainer  --- control socket --->  server  -- fork -->  worker
             <-- status socket of each worker --'            |
             <================ command socket ===============>

It runs in a fresh interpreter with one thread, because forking is only safe without
other threads. A worker starts in milliseconds, with torch imported and its pages
shared. The server notices the trainer's end when the control socket closes, and through
a process descriptor of the trainer, since a fork of the trainer may keep the socket
open. Where the kernel has no process descriptors, it looks for its parent every second
instead. It then kills the workers and exits. If the server itself is killed, the kernel
kills the workers (``PR_SET_PDEATHSIG``).

SIGCHLD tells the server that a worker has ended. Only the server waits for its workers,
so a process id belongs to a worker until then, and can be signalled.

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

from marl_collect.processes import (
    import_guard,
    launcher,
    linux,
    orphans,
    survival,
)
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
_LOOK_MS: Final = 1000
_LAST_SECONDS: Final = 2.0


def main(control_fd: int, trainer: int, preload: Sequence[str]) -> NoReturn:
    """Preload modules, report that, and serve until the trainer ends.

    Args:
        control_fd: our end of the trainer's control socket.
        trainer: process id of the trainer, our parent.
        preload: names of modules to import before the first fork.
    """
    _reset_signals()
    survival.set_name("marl-forkserver")
    import_guard.mark_process("The fork server")
    survival.adopt_orphans()
    survival.wake_at_parents_end()
    mark = orphans.address_of_mark()
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
        _Server(control, trainer, mark).serve()
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
    status: socket.socket
    requester: socket.socket
    control: socket.socket


class _Server:
    """The loop that forks workers and reports how they ended."""

    def __init__(self, control: socket.socket, trainer: int, mark: int | None) -> None:
        self._pid = os.getpid()
        self._mark = mark
        self._control = control
        self._trainer = trainer
        self._trainer_pidfd = _open_parent(trainer)
        self._wake = _wake_at_sigchld()
        self._controls = {control.fileno(): control}
        self._children: dict[int, _Child] = {}  # By process id.
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._poll.register(self._wake[0], select.POLLIN)
        if self._trainer_pidfd != linux.NO_PIDFD:
            self._poll.register(self._trainer_pidfd, select.POLLIN)
        self._file_limits = _raise_file_limit()
        self._orphans = orphans.Orphans()
        self._wanted: dict[str, None] = {}  # In order.
        self._sweeps = False  # Whether another sweep is needed soon.

    def serve(self) -> None:
        """Answer requests and reap children, until the trainer ends."""
        while True:
            # An entry may be stale by now, and its number reused. So nothing below
            # blocks or relies on data being there.
            for fd in self._ready():
                if fd in self._controls:
                    self._read_request(self._controls[fd])
                elif fd == self._wake[0].fileno():
                    self._reap_all()
                if self._control.fileno() < 0:
                    return self._kill_all()
            if os.getppid() != self._trainer:
                return self._kill_all()
            if self._sweeps:
                self._sweep()

    def _ready(self) -> list[int]:
        """Return readable descriptors, the trainer's control socket last.

        The trainer may send a request because a worker has answered. That worker has
        shared its imports before, and they must be read first.
        """
        looks = _LOOK_MS if self._trainer_pidfd == linux.NO_PIDFD else None
        ready = [fd for fd, _ in self._poll.poll(_SWEEP_MS if self._sweeps else looks)]
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
        except OSError as error:
            with contextlib.suppress(OSError):
                status.send(encode(REFUSED, error.errno or 0))
            status.close()
            if ours is not None:
                ours.close()
        else:
            self._children[pid] = _Child(pid, status, requester, ours)
            self._controls[ours.fileno()] = ours
            self._poll.register(ours.fileno(), select.POLLIN)
            _report_start(status, pid)
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
            orphans.write_mark(self._mark, os.getpid())
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
        signal.set_wakeup_fd(-1)
        for child in self._children.values():
            child.status.close()
        for end in (*self._controls.values(), *self._wake):
            end.close()
        if self._trainer_pidfd != linux.NO_PIDFD:
            os.close(self._trainer_pidfd)
        self._children.clear()
        self._controls.clear()

    def _reap_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake[0].recv(PACKET_BYTES)
        for pid in [*self._children]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._report_end(self._children.pop(pid), status)

    def _report_end(self, child: _Child, status: int) -> None:
        if child.control.fileno() >= 0:
            self._close_control(child.control)
        with contextlib.suppress(OSError):
            child.status.send(encode(ENDED, os.waitstatus_to_exitcode(status)))
        child.status.close()
        self._orphans.worker_ended()
        self._sweep()

    def _sweep(self) -> None:
        """End the orphans of workers that have ended."""
        self._sweeps = self._orphans.sweep(self._children)

    def _close_control(self, control: socket.socket) -> None:
        """Kill the workers that were requested through a socket, and close it."""
        for child in self._children.values():
            if child.requester is control:
                os.kill(child.pid, signal.SIGKILL)
        self._poll.unregister(control.fileno())
        del self._controls[control.fileno()]
        control.close()

    def _kill_all(self) -> None:
        """Kill all descendants, then exit."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _LAST_SECONDS
        # We adopt the orphans of workers once these have ended.
        while self._orphans.sweep((), everything=True) and time.monotonic() < deadline:
            select.select([], [], [], _SWEEP_MS / 1000)
        os._exit(0)


def _open_parent(trainer: int) -> int:
    try:
        return linux.open_process(trainer)
    except ProcessLookupError:  # The loop will find another parent.
        return linux.NO_PIDFD


def _wake_at_sigchld() -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets; the first is readable after a child has ended."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # A signal without a handler wakes nobody.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reader, writer


def _report_start(status: socket.socket, pid: int) -> None:
    """Tell the trainer that a worker runs, with a process descriptor if there is one.

    It is ours to open: nobody else waits for the worker, so its id is still its own.
    """
    fds = []
    with contextlib.suppress(OSError):  # Too many open files.
        pidfd = linux.open_process(pid)
        fds = [] if pidfd == linux.NO_PIDFD else [pidfd]
    with contextlib.suppress(OSError):  # The trainer has gone.
        socket.send_fds(status, [encode(STARTED, pid)], fds)
    _close_fds(fds)


def _raise_file_limit() -> tuple[int, int]:
    """Raise the limit of open files to its maximum; return the previous limits."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    return limits


def _close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
