"""Starting processes: by a fork server, or as fresh interpreters.

This process has one fork server per tuple of preloaded modules, started when
the first worker is asked for and ended when the process exits. A worker that
was forked asks the server that it came from. Nothing here imports the user's
script; what a worker runs reaches it through its command socket.
"""

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Final, Literal, cast, get_args

from marl_collect.processes import standard_streams
from marl_collect.processes.bootstrap import thread_environment
from marl_collect.processes.children import Child, ForkedChild, SpawnedChild
from marl_collect.processes.orphans import room_for_mark
from marl_collect.processes.packets import (
    BROKEN,
    FORK,
    IMPORT,
    PACKET_BYTES,
    READY,
)

StartMethod = Literal["forkserver", "spawn"]

_EXIT_SECONDS: Final = 3.0
_STREAMED_BYTES: Final = 1 << 16
_OWN: Final = f"{__name__.partition('.')[0]}."


def check_start_method(start_method: str | None) -> StartMethod:
    """Return a start method that exists.

    Args:
        start_method: a `StartMethod`; None for "forkserver" where it exists
            (Linux), otherwise "spawn".

    Raises:
        ValueError: for any other name; says why there is no "fork".
    """
    if start_method == "fork":
        raise ValueError(
            "start_method='fork' is not offered: a forked copy of a process that has "
            "threads (torch, CUDA, numpy) can deadlock. Use 'forkserver', which is as "
            "fast: it forks from a process without threads."
        )
    if start_method is None:
        return "forkserver" if hasattr(os, "pidfd_open") else "spawn"
    for known in get_args(StartMethod):
        if start_method == known:
            return cast(StartMethod, known)
    raise ValueError(
        f"start_method must be one of {list(get_args(StartMethod))}, "
        f"not {start_method!r}"
    )


def launch(
    start_method: StartMethod, preload: Sequence[str], deadline: float
) -> tuple[Child, Connection]:
    """Start a process that waits for a `WorkerSetup` on its command socket.

    Returns without waiting for it, so that several start at the same time; see
    `Child.confirm`.

    Args:
        start_method: "forkserver" or "spawn".
        preload: modules that the fork server has imported. Ignored in a forked
            worker, whose processes come from the server that it came from.
        deadline: when to give up, on the clock of ``time.monotonic``.

    Returns:
        The process, and our end of its command socket; both are the caller's.
    """
    standard_streams.occupy()
    ours, theirs = socket.socketpair()
    try:
        if start_method == "spawn":
            child: Child = _spawn(theirs)
        else:
            child = _fork(_state.server(tuple(preload), deadline), theirs)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return child, Connection(ours.detach())


def prepare_server(preload: Sequence[str], deadline: float) -> None:
    """Start the fork server for these modules, before a worker is asked for.

    Raises:
        TimeoutError: if it was not ready by ``deadline``, on ``time.monotonic``.
        RuntimeError: if a module could not be imported.
    """
    standard_streams.occupy()
    _state.server(tuple(preload), deadline)


def adopt_control(fd: int) -> None:
    """In a forked worker: ask for processes through this socket from now on."""
    _state.inherited = socket.socket(fileno=fd)
    _state.inherited_modules = frozenset(sys.modules)


def share_imports() -> None:
    """In a forked worker: let those that are forked after it find its imports done.

    Only modules of this package, with all that they import in turn: a user's may change
    between two workers, or do more than define things. And only where this process
    still has one thread, so that importing them starts none.
    """
    server = _state.inherited
    if server is None or len(os.listdir("/proc/self/task")) > 1:
        return
    names = [
        name
        for name in [*sys.modules]  # In the order in which they were imported.
        if name.startswith(_OWN) and name not in _state.inherited_modules
    ]
    if names:
        with contextlib.suppress(OSError):  # It hears it from another, or has gone.
            server.send(IMPORT + " ".join(names).encode(), socket.MSG_DONTWAIT)


def _fork(control: socket.socket, command: socket.socket) -> ForkedChild:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.ExitStack() as stack:
            outputs = [standard_streams.output(fd, stack) for fd in (1, 2)]
            stack.enter_context(theirs)
            fds = [command.fileno(), theirs.fileno(), *outputs]
            socket.send_fds(control, [FORK], fds)
    except BaseException:
        ours.close()
        raise
    return ForkedChild(ours)


def _spawn(command: socket.socket) -> SpawnedChild:
    # The kernel ties a child to the *thread* that started it.
    kernel = threading.current_thread() is threading.main_thread()
    code = (
        "from marl_collect.processes.spawned import main; "
        f"main({command.fileno()}, {os.getpid()}, tied_by_kernel={kernel})"
    )
    if hasattr(os, "pidfd_open"):
        popen = _start_interpreter(code, [command.fileno()])
        try:
            return SpawnedChild(popen, os.pidfd_open(popen.pid))
        except OSError:
            popen.kill()
            popen.wait()
            raise
    # It holds the write end as long as it lives, and never writes.
    sentinel, held = os.pipe()
    try:
        popen = _start_interpreter(code, [command.fileno(), held])
    except BaseException:
        os.close(sentinel)
        raise
    finally:
        os.close(held)
    return SpawnedChild(popen, sentinel)


def _start_interpreter(
    code: str, fds: Sequence[int], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with our ``sys.path`` and one thread per library.

    It starts with SIGINT blocked, as Ctrl-C in its first moments would print a
    traceback; `survival.reset_signals` ignores it and lifts the block.
    """
    path = [str(entry) for entry in sys.path]
    warnings = [f"-W{option}" for option in sys.warnoptions]
    optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with contextlib.ExitStack() as stack:
            return subprocess.Popen(
                [
                    sys.executable,
                    *optimize,
                    *warnings,
                    "-c",
                    f"import sys; sys.path[:] = {path!r}; {code}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=standard_streams.output(1, stack),
                stderr=standard_streams.output(2, stack),
                pass_fds=fds,
                env={
                    **os.environ,
                    **thread_environment(1),
                    **_streaming(),
                    **(variables or {}),
                },
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _streaming() -> dict[str, str]:
    """Return the variable that lets glibc write large copies past the caches.

    What a worker copies in one piece of this size is an observation, which another
    process reads, much later. Through the caches, memory would be read before it is
    written, and what the environment works with would be driven out. glibc does so
    from about half of the last cache on, and reads its limit only when a process
    starts. Other C libraries and processors ignore it; what the user has set wins.
    The worker's own environment has none of it (`bootstrap.WorkerSetup`).
    """
    own = f"glibc.cpu.x86_non_temporal_threshold={_STREAMED_BYTES:#x}"
    given = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{own}:{given}" if given else own}


class _ForkServer:
    """The trainer's end of one fork server."""

    def __init__(self, preload: tuple[str, ...], deadline: float) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError(
                "start_method='forkserver' needs Linux 5.3 or newer; "
                "use start_method='spawn'"
            )
        self._preload = preload
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        with theirs:
            pidfd = os.pidfd_open(os.getpid())
            try:
                self._popen = _start_interpreter(
                    "from marl_collect.processes.forkserver import main; "
                    f"main({theirs.fileno()}, {pidfd}, {preload!r})",
                    [theirs.fileno(), pidfd],
                    room_for_mark(),
                )
            finally:
                os.close(pidfd)
        try:
            self._await_ready(deadline)
        except BaseException:
            self._popen.kill()
            self.end()
            raise

    def _await_ready(self, deadline: float) -> None:
        poller = select.poll()
        poller.register(self.control.fileno(), select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(
                f"the fork server did not finish importing {list(self._preload)} in "
                "time; raise start_timeout="
            )
        try:
            packet = self.control.recv(PACKET_BYTES)
        except ConnectionResetError:
            packet = b""
        if packet[:1] == BROKEN:
            raise RuntimeError(
                f"the fork server could not preload {list(self._preload)}:\n\n"
                + packet[1:].decode(errors="replace")
            )
        if packet != READY:
            raise RuntimeError(
                "the fork server ended while it started, with exit code "
                f"{self._popen.wait(_EXIT_SECONDS)}; its stderr says more"
            )

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        """End the server and so all of its workers."""
        with contextlib.suppress(OSError):
            # Unlike close() this also reaches past copies in forked processes.
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        try:
            self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(_EXIT_SECONDS)

    def abandon(self) -> None:
        """In a forked copy of the trainer: let go of what is the trainer's."""
        self.control.close()
        self._popen.returncode = 0  # Not our child, so nothing to warn about.


class _State:
    """The servers of this process."""

    def __init__(self) -> None:
        self.inherited: socket.socket | None = None
        self.inherited_modules: frozenset[str] = frozenset()
        self._servers: dict[tuple[str, ...], _ForkServer] = {}
        self._lock = threading.Lock()

    def server(self, preload: tuple[str, ...], deadline: float) -> socket.socket:
        """Return the control socket of a server that runs."""
        if self.inherited is not None:
            return self.inherited
        with self._lock:
            server = self._servers.get(preload)
            if server is not None and not server.alive:
                server.end()
                server = None
            if server is None:
                server = self._servers[preload] = _ForkServer(preload, deadline)
            return server.control

    def end(self) -> None:
        with self._lock:
            servers, self._servers = list(self._servers.values()), {}
            for server in servers:
                server.end()

    def abandon(self) -> None:
        for server in self._servers.values():
            server.abandon()
        if self.inherited is not None:
            self.inherited.close()
        self.__init__()  # type: ignore[misc]


_state: Final = _State()
atexit.register(_state.end)
os.register_at_fork(after_in_child=_state.abandon)
