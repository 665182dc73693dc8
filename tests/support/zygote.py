"""The program that forks programs of tests; see ``scripts.py``.

It has one thread, and so have its children until their program starts some. For each
request it forks a child that becomes the program, and passes on how it ended.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any, Final, NoReturn

PRELOAD: Final = (
    "torch",
    "tensordict.nn",
    "numpy",
    "gymnasium",
    "pettingzoo",
    "torchrl.collectors",
    "torchrl.envs",
    "marl_collect.cli.main",
    "marl_collect.collectors.warm_up",
    "marl_collect.collectors.worker",
    "marl_collect.envs",
    "marl_collect.models",
    "marl_collect.processes.forkserver",
    "marl_collect.storage",
    "workloads.counting",
    "marl_collect.training",
)
"""What is worth importing once. A missing extra is left out."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


class Become(Exception):  # noqa: N818 - not an error
    """Raised in a child, to leave the zygote's frames before its program runs."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__()
        self.request = request


class Zygote:
    """The loop that forks and reaps."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._status: dict[int, int] = {}  # Of a program's process id: its pipe.
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> None:
        """Answer requests until the test process has ended."""
        poller = select.poll()
        poller.register(self._control.fileno(), select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 1000)
            self._reap()
            if self._control.fileno() in ready:
                try:
                    size, fds, _, _ = socket.recv_fds(self._control, 4, 4)
                except ConnectionResetError:
                    return
                if not size:
                    return
                self._start(self._receive(int.from_bytes(size, "little")), fds)

    def _receive(self, size: int) -> dict[str, Any]:
        payload = b""
        while len(payload) < size:
            payload += self._control.recv(size - len(payload))
        return pickle.loads(payload)

    def _start(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        leads, copy = os.pipe()
        pid = os.fork()
        if not pid:
            self._leave(fds)
            raise Become(request)
        # Its session can be killed once it leads one; it then closes its copy.
        os.close(copy)
        os.read(leads, 1)
        os.close(leads)
        *standard, self._status[pid] = fds
        for fd in standard:
            os.close(fd)
        self._control.sendall(str(pid).encode())

    def _leave(self, fds: Sequence[int]) -> None:
        """In a child: keep nothing of the zygote."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        for fd in (*fds, self._wake, *self._status.values(), self._control.detach()):
            os.close(fd)
        # The other end of the wake-up pipe.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.close(int(name))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._status:  # Otherwise an orphan of a program.
                with os.fdopen(self._status.pop(pid), "wb") as pipe:
                    pipe.write(str(os.waitstatus_to_exitcode(status)).encode())

    def kill_all(self) -> None:
        """Kill the sessions of all programs that run, and what programs have left.

        Orphans of programs are our children, also those with sessions of their own.
        """
        for pid in self._status:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        import psutil

        while children := psutil.Process().children():
            for child in children:
                child.kill()
            for child in children:  # Their children become ours.
                child.wait()


class Spare:
    """A copy of the child that waits to become the package's fork server."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Ctrl-C reaches the session of the program: what waits in it stays quiet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.pid = os.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not self.pid:
            self._ours.close()
            self._wait(theirs)
        theirs.close()

    @staticmethod
    def _wait(command: socket.socket) -> NoReturn:
        try:
            payload, fds, _, _ = socket.recv_fds(command, 1 << 20, 8)
            if not payload:
                os._exit(0)
            command.close()
            order = pickle.loads(payload)
            for number, fd in enumerate(fds[:2], start=1):
                os.dup2(fd, number)
                os.close(fd)
            for name in set(os.environ) - set(order["env"]):
                del os.environ[name]
            for name, value in order["env"].items():
                if name != "MARL_COLLECT_WORKER":  # Its memory is written to.
                    os.environ[name] = value
            sys.path[:] = order["path"]
            sys.warnoptions[:] = order["warnings"]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            server = importlib.import_module("marl_collect.processes.forkserver")
            (control,) = fds[2:]
            os.set_inheritable(control, True)
            server.main(control, os.getppid(), order["preload"])
        finally:
            os._exit(1)

    def become(self, order: dict[str, Any], fds: Sequence[int]) -> None:
        """Start the fork server.

        Args:
            order: environment variables, ``sys.path``, warnings, modules to import.
            fds: stdout, stderr, our control socket's other end.
        """
        socket.send_fds(self._ours, [pickle.dumps(order)], fds)
        self._ours.close()


class SparePopen:
    """What ``launcher`` uses of the fork server's ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        import subprocess
        import time

        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the fork server", timeout or 0.0)
            select.select([], [], [], 0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def use_spare() -> None:
    """Let this process's first fork server be a fork instead of an interpreter."""
    launcher: Any = importlib.import_module("marl_collect.processes.launcher")
    spares = [Spare()]
    start = launcher._start_interpreter

    def start_interpreter(
        code: str, fds: Sequence[int], variables: dict[str, str] | None = None
    ) -> Any:
        if not spares or "forkserver" not in code or spares[0].pid == os.getpid():
            return start(code, fds, variables)
        spare = spares.pop()
        preload = eval(code.rpartition("main")[2])[2]  # Our own text.
        order = {
            "env": {
                **os.environ,
                **launcher.thread_environment(1),
                **launcher.without_arrow_thread(),
                **(variables or {}),
            },
            "path": [str(entry) for entry in sys.path],
            "warnings": list(sys.warnoptions),
            "preload": preload,
        }
        with contextlib.ExitStack() as stack:
            outputs = [launcher.standard_streams.output(fd, stack) for fd in (1, 2)]
            spare.become(order, [*outputs, *fds])
        return SparePopen(spare.pid)

    launcher._start_interpreter = start_interpreter
    os.register_at_fork(after_in_child=spares.clear)


def prctl(option: int, argument: int) -> None:
    ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def become(request: dict[str, Any]) -> None:
    """Run a program as an interpreter would, in this process."""
    os.chdir(request["cwd"])
    env, command = request["env"], list(request["command"])
    if request["interpreter"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(sys.executable, [sys.executable, *command], env)
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)
    use_spare()
    _seed()
    _open_standard_streams(unbuffered=bool(env.get("PYTHONUNBUFFERED")))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while command[0] == "-W":
        sys.warnoptions.append(command[1])
        import warnings

        warnings.simplefilter(command[1])
        del command[:2]
    _run(command, env)


def _open_standard_streams(*, unbuffered: bool) -> None:
    for name, fd, mode, errors in (
        ("stdin", 0, "r", "strict"),
        ("stdout", 1, "w", "strict"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        direct = unbuffered and mode == "w"
        raw: Any = open(fd, f"{mode}b", 0 if direct else -1, closefd=False)  # noqa: SIM115
        stream: Any = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors=errors,
            line_buffering=fd == 2,
            write_through=direct,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _seed() -> None:
    """Draw anew what an interpreter draws at its start."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()  # noqa: NPY002 - the global generator is meant


def _run(command: list[str], env: dict[str, str]) -> None:
    first = sys.path[0]
    sys.path.remove(first)  # The folder of this file.
    added = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:0] = [p for p in added if p not in sys.path]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if command[0] == "-m":
        import runpy

        sys.argv[:] = command[1:]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(command[1], None)  # It runs as __main__, as if never imported.
        run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        run_module(command[1])
        return
    if command[0] == "-c":
        text, name = command[1], "<string>"
        sys.argv[:] = ["-c", *command[2:]]
        sys.path.insert(0, "")
    elif command[0] == "-":
        text, name = sys.stdin.read(), "<stdin>"
        sys.argv[:] = command
        sys.path.insert(0, "")
    else:
        name = os.path.abspath(command[0])
        with open(name, encoding="utf-8") as file:
            text = file.read()
        sys.argv[:] = command
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
        main.__file__ = name
    # Not `dont_inherit`: this file has no future imports.
    exec(compile(text, name, "exec"), main.__dict__)


def _without_our_frames(
    kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """Print a traceback as if the program had been started by an interpreter."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    if issubclass(kind, KeyboardInterrupt):
        _interrupted.append(True)


_interrupted: Final[list[bool]] = []


def _end_by_signal() -> None:
    """End like an interpreter that Ctrl-C interrupted, after all other handlers."""
    if _interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def main() -> dict[str, Any] | None:
    """Serve; return a request in the child that is to fulfil it, None at the end."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=int(sys.argv[1]))
    atexit.register(_end_by_signal)  # Before others, so that it is called last.
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    zygote = Zygote(control)
    try:
        zygote.serve()
    except Become as call:
        return call.request
    except OSError:  # The test process ended while it was answered.
        pass
    zygote.kill_all()
    return None


if __name__ == "__main__":
    _request = main()
    if _request is not None:
        sys.excepthook = _without_our_frames
        become(_request)
