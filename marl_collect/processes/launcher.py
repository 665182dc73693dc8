"""Starts processes, through a fork server or as fresh interpreters.

This process has one fork server per tuple of preloaded modules. It is started with the
first worker, or ahead of it, and ended when the process exits. A forked worker uses the
server that forked it. Nothing here imports the user's script: a worker receives what it
runs through its command socket.
"""

import atexit
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Final, Literal

from marl_collect.processes import linux, pickling, standard_streams
from marl_collect.processes.bootstrap import thread_environment
from marl_collect.processes.children import (
    Child,
    ForkedChild,
    SpawnedChild,
    wait_readable,
)
from marl_collect.processes.orphans import room_for_mark
from marl_collect.processes.packets import (
    BROKEN,
    FORK,
    IMPORT,
    PACKET_BYTES,
    READY,
)
from marl_collect.processes.shared_memory import readable

StartMethod = Literal["forkserver", "spawn"]

COLLECTOR_MODULES: Final = (
    "marl_collect.collectors.worker",
    "marl_collect.collectors.warm_up",
)
"""What the fork server of collectors' workers imports.

Named here, below the modules themselves, because others use the same server without
importing torch.
"""
_EXIT_SECONDS: Final = 3.0
_STREAMED_BYTES: Final = 1 << 16
_OWN: Final = f"{__name__.partition('.')[0]}."


def launch(
    start_method: StartMethod, preload: Sequence[str], deadline: float
) -> tuple[Child, Connection]:
    """Start a process that waits for a `WorkerSetup` on its command socket.

    Returns without waiting for it, so that several can start at the same time; see
    ``ForkedChild.confirm``.

    Args:
        start_method: "forkserver" or "spawn".
        preload: modules that the fork server imports first. Ignored in a forked
            worker, which uses the server that forked it.
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


def start_server(preload: Sequence[str]) -> None:
    """Start the fork server for these modules, without waiting for it.

    The server imports the modules while this process goes on. The first ``launch``
    waits for it, and raises what went wrong. Does nothing if it has been started.
    """
    standard_streams.occupy()
    _state.start(tuple(preload))


def adopt_control(fd: int) -> None:
    """In a forked worker: request processes through this socket from now on."""
    _state.inherited = socket.socket(fileno=fd)
    _state.inherited_modules = frozenset(sys.modules)


def share_imports() -> None:
    """In a forked worker: have the server import this worker's modules for later forks.

    Shares only modules of this package, with everything that they import. User modules
    may change between two workers, or have side effects. Shares nothing if this process
    has more than one thread, because the imports may have started them.
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
        with contextlib.suppress(
            OSError
        ):  # The server has ended, or its socket is full.
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
    # PR_SET_PDEATHSIG refers to the *thread* that started the child.
    kernel = threading.current_thread() is threading.main_thread()
    code = (
        "from marl_collect.processes.bootstrap import run_spawned; "
        f"run_spawned({command.fileno()}, {os.getpid()}, tied_by_kernel={kernel})"
    )
    popen = _start_interpreter(code, [command.fileno()])
    try:
        return SpawnedChild(popen, linux.open_child(popen.pid))
    except OSError:
        popen.kill()
        popen.wait()
        raise


def _start_interpreter(
    code: str, fds: Sequence[int], variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter with our ``sys.path`` and one thread per library.

    It starts with SIGINT blocked, because Ctrl-C during its startup would print a
    traceback. ``survival.reset_signals`` then ignores SIGINT and lifts the block.
    """
    if not sys.executable:
        raise RuntimeError(
            "Workers are processes of Python, but the path of Python is unknown: "
            f"sys.executable is {sys.executable!r}, as in a program that embeds "
            "Python. Set sys.executable to the path of this Python first."
        )
    # As arguments of their own: one argument is limited to 128 KiB.
    path = pickling.search_path()
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
                    f"import sys; sys.path[:] = sys.argv[1:]; del sys.argv[1:]; {code}",
                    *path,
                ],
                stdin=subprocess.DEVNULL,
                stdout=standard_streams.output(1, stack),
                stderr=standard_streams.output(2, stack),
                pass_fds=fds,
                # In a deleted one, an interpreter ends before it can say why.
                cwd=None if pickling.working_directory() else "/",
                env={
                    **os.environ,
                    **thread_environment(1),
                    **_streaming(),
                    **without_arrow_thread(),
                    **(variables or {}),
                },
            )
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        size = readable(sum(len(os.fsencode(entry)) for entry in path))
        raise OSError(
            error.errno,
            f"sys.path has {len(path)} entries of {size} in all: with the environment "
            "variables, this is more than the kernel passes to a program. Shorten "
            "them, or raise the limit with `ulimit -s 65536`",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _streaming() -> dict[str, str]:
    """Return the variable that makes glibc write large copies past the caches.

    A worker's copies of this size are observations, which another process reads much
    later. Copying them through the caches would read the target memory first and evict
    the environment's data. By default, glibc bypasses the caches only from about half
    the size of the last-level cache, and it reads this threshold only at process start.
    Other C libraries and processors ignore the variable. The user's own value takes
    precedence. The worker's ``os.environ`` does not contain it
    (``bootstrap.WorkerSetup``).
    """
    tunable = f"glibc.cpu.x86_non_temporal_threshold={_STREAMED_BYTES:#x}"
    value = os.environ.get("GLIBC_TUNABLES")
    return {"GLIBC_TUNABLES": f"{tunable}:{value}" if value else tunable}


def without_arrow_thread() -> dict[str, str]:
    """Return the variable that keeps pyarrow from starting a thread.

    tensordict imports pandas at the first call of a policy, and pandas imports pyarrow
    if it is installed. A thread of its allocator would make the fork server unusable.
    """
    name, setting = "JE_ARROW_MALLOC_CONF", "background_thread:false"
    value = os.environ.get(name)
    return {name: f"{value},{setting}" if value else setting}


class _ForkServer:
    """The trainer's end of one fork server."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        """Start the server; ``await_ready`` waits until it has imported ``preload``."""
        self._preload = preload
        self._ready = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        with theirs:
            try:
                self._popen = _start_interpreter(
                    "from marl_collect.processes.forkserver import main; "
                    f"main({theirs.fileno()}, {os.getpid()}, {preload!r})",
                    [theirs.fileno()],
                    room_for_mark(),
                )
            except BaseException:
                ours.close()
                raise

    def await_ready(self, deadline: float) -> None:
        """Wait until the server can fork.

        Raises:
            TimeoutError: if it was not ready by ``deadline``, on ``time.monotonic``.
            RuntimeError: if a module could not be imported, or the server has ended.
        """
        if self._ready:
            return
        if not wait_readable(self.control.fileno(), deadline):
            raise TimeoutError(
                f"the fork server did not finish importing {list(self._preload)} in "
                "time; increase start_timeout="
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
                "the fork server ended during its start, with exit code "
                f"{self._popen.wait(_EXIT_SECONDS)}; see its stderr"
            )
        self._ready = True

    @property
    def is_lost(self) -> bool:
        """Whether it has ended after it was ready."""
        return self._ready and self._popen.poll() is not None

    def end(self) -> None:
        """End the server and thereby all of its workers."""
        if not self._ready:
            self._popen.kill()  # It imports, and has no workers.
        with contextlib.suppress(OSError):
            # Unlike close() this also reaches past copies in forked processes.
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        self._popen.send_signal(signal.SIGCONT)  # It may have been stopped.
        try:
            self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(_EXIT_SECONDS)

    def abandon(self) -> None:
        """Release the trainer's resources in a forked copy of the trainer."""
        self.control.close()
        self._popen.returncode = 0  # Not our child: suppresses the ResourceWarning.


class _State:
    """The fork servers of this process."""

    def __init__(self) -> None:
        self.inherited: socket.socket | None = None
        self.inherited_modules: frozenset[str] = frozenset()
        self._servers: dict[tuple[str, ...], _ForkServer] = {}
        self._lock = threading.Lock()

    def server(self, preload: tuple[str, ...], deadline: float) -> socket.socket:
        """Return the control socket of a server that can fork."""
        if self.inherited is not None:
            return self.inherited
        with self._lock:
            server = self._running(preload)
            try:
                server.await_ready(deadline)
            except BaseException:
                del self._servers[preload]
                server.end()
                raise
            return server.control

    def start(self, preload: tuple[str, ...]) -> None:
        """Start a server if there is none, without waiting for it."""
        if self.inherited is None:
            with self._lock:
                self._running(preload)

    def _running(self, preload: tuple[str, ...]) -> _ForkServer:
        server = self._servers.get(preload)
        if server is not None and server.is_lost:
            server.end()
            server = None
        if server is None:
            server = self._servers[preload] = _ForkServer(preload)
        return server

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
