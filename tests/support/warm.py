"""The process that forks programs of tests; see ``scripts.py``.

    caller --- request, stdin, stdout, stderr ---> warm process -- fork --> program
           <-- process id, exit code -------------

It has imported what takes long to import, and has one thread, as has a child until its
program starts some. When the test process ends, however it ends, stdin ends; then it
kills the sessions of the programs that run, and what programs have left behind.

A program forks once before it begins. The copy is its *spare*: where the program would
start an interpreter that becomes the package's fork server, which imports for five
seconds, the spare becomes this interpreter.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Sequence
from typing import Any, Final

PRELOAD: Final = (
    "torch",
    "tensordict.nn",
    "gymnasium",
    "pettingzoo",
    # What tensordict imports at the first call of a policy.
    "h5py",
    "pandas",
    # What the command line imports.
    "typer.main",
    "rich.console",
    # What Ray's workers import; Ray itself reads a worker's environment at its import.
    "google.protobuf.reflection",
    "jsonschema",
    "requests",
    "yaml",
)
"""What is imported once. A missing extra is left out. Nothing of this package: its own
imports happen in each program, as in a fresh interpreter."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_HIGH_FD: Final = 500


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork and reap; return a request in the child that fulfils it, None at the end."""
    callers: dict[int, socket.socket] = {}  # Of a program's process id.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poller = select.poll()
    for fd in (sys.stdin.fileno(), woken, listener.fileno()):
        poller.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if sys.stdin.fileno() in ready:
            kill_all(callers)
            return None
        if woken in ready:
            os.read(woken, 1000)
        reap(callers)
        if listener.fileno() not in ready:
            continue
        caller, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(caller, 1, 3)
        with caller.makefile("rb") as file:
            request: dict[str, Any] = pickle.load(file)
        leads, copy = os.pipe()
        if not (pid := os.fork()):
            break
        # It is named once it leads its session, which can then be killed.
        os.close(copy)
        os.read(leads, 1)
        for fd in (leads, *streams):
            os.close(fd)
        callers[pid] = caller
        tell(caller, pid)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for owner in (listener, caller, *callers.values()):
        owner.detach()
    os.closerange(3, 1 + max(int(name) for name in os.listdir("/proc/self/fd")))
    return request


def tell(caller: socket.socket, number: int) -> None:
    """Send the process id or the exit code of a program to the test that started it."""
    with contextlib.suppress(OSError):  # It waits no longer.
        caller.sendall(b"%d\n" % number)


def reap(callers: dict[int, socket.socket]) -> None:
    """Pass on how programs ended; take no notice of their orphans."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if caller := callers.pop(found[0], None):
                tell(caller, os.waitstatus_to_exitcode(found[1]))
                caller.close()


def kill_all(pids: Sequence[int] | dict[int, Any]) -> None:
    """Kill the sessions of these programs, and all orphans: they are our children."""
    import psutil

    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    while children := psutil.Process().children():
        for child in children:
            child.kill()
        for child in children:  # Their children become ours.
            child.wait()


def become(request: dict[str, Any]) -> None:
    """Run a program as an interpreter would, in this process."""
    os.chdir(request["cwd"])
    env, command = request["env"], list(request["command"])
    if request["interpreter"]:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.execve(sys.executable, [sys.executable, *command], env)
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        # The fork server's workers write to the memory of an unchanged variable.
        if os.environ.get(name) != value:
            os.environ[name] = value
    draw_anew()
    open_standard_streams(unbuffered=bool(env.get("PYTHONUNBUFFERED")))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while command[0] == "-W":
        sys.warnoptions.append(command[1])
        warnings.simplefilter(command[1])
        del command[:2]
    del sys.path[0]  # The folder of this file.
    added = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:0] = [p for p in added if p not in sys.path]
    run(command)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts a program's first fork server from its spare, all else as always."""

    spares: Final[list[tuple[int, socket.socket]]] = []
    """The spare's process id and our end of its socket, while there is one."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        if not (
            self.spares and args[1] in ("-c", "-W") and "forkserver import" in str(args)
        ):
            super().__init__(args, *rest, **options)
            return
        self.pid, spare = self.spares.pop()
        # What the other methods read.
        self.args, self.returncode, self._child_created = args, None, True
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        with spare, open(os.devnull, "r+b") as null:
            streams = {0: null.fileno(), 1: options["stdout"], 2: options["stderr"]}
            for number, fd in streams.items():
                if fd == subprocess.DEVNULL:
                    streams[number] = null.fileno()
            fds = streams | {fd: fd for fd in options["pass_fds"]}
            request = {
                "command": args[1:],
                "cwd": options["cwd"] or os.getcwd(),
                "env": options["env"],
                "interpreter": False,
                "fds": list(fds),
            }
            socket.send_fds(spare, [b"."], list(fds.values()))
            spare.sendall(pickle.dumps(request))


def keep_spare() -> dict[str, Any] | None:
    """Fork the spare; return in it, once it is needed, what it becomes, else None."""
    ours, theirs = socket.socketpair()
    program = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        Popen.spares.append((pid, ours))
        os.register_at_fork(after_in_child=Popen.spares.clear)
        subprocess.Popen = Popen  # type: ignore[misc]
        return None
    ours.close()
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != program:
        os._exit(0)
    with theirs:
        started, fds, _, _ = socket.recv_fds(theirs, 1, 16)
        if not started:
            os._exit(0)
        with theirs.makefile("rb") as file:
            request: dict[str, Any] = pickle.load(file)
    libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, copy in zip(request.pop("fds"), copies, strict=True):
        os.dup2(copy, fd)
        os.close(copy)
    return request


def draw_anew() -> None:
    """Seed the generators that an interpreter seeds when it starts."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()  # noqa: NPY002 - the global generator is meant


def open_standard_streams(*, unbuffered: bool) -> None:
    """Give stdin, stdout and stderr to the program."""
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


def run(command: list[str]) -> None:
    """Run ``-m MODULE``, ``-c CODE``, ``-`` or a script as ``__main__``."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    kind, *rest = command
    sys.argv[:] = rest if kind == "-m" else command
    if kind == "-m":
        import runpy

        sys.path.insert(0, os.getcwd())
        sys.modules.pop(rest[0], None)  # It runs as __main__, as if never imported.
        run_module: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        run_module(rest[0])
        return
    if kind == "-c":
        text, name, folder = rest.pop(0), "<string>", ""
        sys.argv[:] = ["-c", *rest]
    elif kind == "-":
        text, name, folder = sys.stdin.read(), "<stdin>", ""
    else:
        name, folder = os.path.abspath(kind), os.path.dirname(os.path.realpath(kind))
        with open(name, encoding="utf-8") as file:
            text = file.read()
        main.__file__ = name
    sys.path.insert(0, folder)
    # Not `dont_inherit`: this file has no future imports.
    exec(compile(text, name, "exec"), main.__dict__)


def without_our_frames(
    kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """Print a traceback as if the program had been started by an interpreter."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    if issubclass(kind, KeyboardInterrupt):
        interrupted.append(True)


interrupted: Final[list[bool]] = []


def end_by_signal() -> None:
    """End like an interpreter that Ctrl-C interrupted, after all other handlers."""
    if interrupted:
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # Of pandas.
    atexit.register(end_by_signal)  # Before others, so that it is called last.
    for _name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _request = serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        sys.excepthook = without_our_frames
        if not _request["interpreter"]:
            _request = keep_spare() or _request
        become(_request)
