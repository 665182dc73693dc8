"""The process that forks programs of tests; see ``scripts.py``.

    caller --- request, file descriptors ---> warm process -- fork --> program
           <------ process id, exit code ----

It has imported what takes long to import, and has one thread. When the test process
ends, however it ends, stdin ends; then it kills all programs and what these have left.

A program forks once before it begins. The copy is its *spare*: where the program would
start an interpreter that becomes the package's fork server, which imports for five
seconds, the spare becomes this interpreter.

A program ends as in an interpreter, up to its own ``__main__``: see ``end_quickly``.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

Request = tuple[list[str], str, dict[str, str], dict[int, int]]
"""Arguments, working directory, environment, and file descriptors by their numbers in
the program."""

_MODULES: Final = (
    "torch",
    "tensordict.nn",
    "gymnasium",
    "pettingzoo",
    # What tensordict imports at the first call of a policy.
    *("h5py", "pandas"),
    # What the command line imports.
    *("typer.main", "rich.console"),
    # What Ray's workers import; Ray itself reads a worker's environment at its import.
    *("google.protobuf.reflection", "jsonschema", "requests", "yaml"),
)
PRELOAD: Final = os.environ.get("MARL_COLLECT_TEST_PRELOAD", " ".join(_MODULES)).split()
"""What is imported once. A missing extra is left out. Nothing of this package: its own
imports happen in each program, as in a fresh interpreter. A test run in a test needs
less, and says what by the variable."""

MOUNT: Final = "MARL_COLLECT_TEST_MOUNT"
"""Environment variable of a program: a folder, a colon, and the MiB of the empty file
system that is mounted there."""

_PR_SET_CHILD_SUBREAPER: Final = 36
_CLONE_NEWNS, _CLONE_NEWUSER, _MS_REC, _MS_PRIVATE = 1 << 17, 1 << 28, 1 << 14, 1 << 18
_FIRST_HIGH_FD: Final = 500


def hand_over(connection: socket.socket, popen: Any, *arguments: Any) -> None:
    """Do what ``popen._execute_child(*arguments)`` does, in another process.

    Args:
        connection: to the process that forks, or has forked, the new one.
        popen: a ``subprocess.Popen``, which lacks its process id then.
        arguments: of the method.
    """
    call = _SIGNATURE.bind(popen, *arguments).arguments
    ends = (call["p2cread"], call["c2pwrite"], call["errwrite"])
    fds = {number: number if fd == -1 else fd for number, fd in enumerate(ends)}
    fds |= {fd: fd for fd in call["pass_fds"]}
    env = os.environ if call["env"] is None else call["env"]
    ask(connection, (call["args"], str(call["cwd"] or os.getcwd()), dict(env), fds))
    popen._close_pipe_fds(*map(call.get, _PIPES))


_execute_child: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_SIGNATURE: Final = inspect.signature(_execute_child)
_PIPES: Final = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def ask(connection: socket.socket, request: Request) -> None:
    """Ask for a process; see ``receive``."""
    socket.send_fds(connection, [b"."], list(request[3].values()))
    with connection.makefile("wb") as file:
        pickle.dump(request, file)


def receive(connection: socket.socket) -> Request:
    """Wait for a request.

    Raises:
        EOFError: if there is none, and the caller has ended.
    """
    _, fds, _, _ = socket.recv_fds(connection, 1, 16)
    with connection.makefile("rb") as file:
        command, cwd, env, numbers = pickle.load(file)
    return command, cwd, env, dict(zip(numbers, fds, strict=True))


def serve(listener: socket.socket) -> Request | None:
    """Fork and reap; return a request in the child that fulfils it, None at the end."""
    callers: dict[int, socket.socket] = {}  # Of a program's process id.

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if caller := callers.pop(ended[0], None):  # Else it is an orphan.
                    with caller, contextlib.suppress(OSError):
                        caller.sendall(b"%10d" % os.waitstatus_to_exitcode(ended[1]))

    signal.signal(signal.SIGCHLD, reap)
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            kill_all()
            return None
        caller, _ = listener.accept()
        request = receive(caller)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if not (pid := os.fork()):
            break
        callers[pid] = caller
        for fd in request[3].values():
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    caller.sendall(b"%10d" % os.getpid())
    for owner in (listener, caller, *callers.values()):
        owner.detach()
    take_only(request[3])
    return request


def kill_all() -> None:
    """Kill our descendants; orphans become our children, and ``reap`` reaps them."""
    import psutil

    while programs := psutil.Process().children(recursive=True):
        for program in programs:
            with contextlib.suppress(psutil.NoSuchProcess):
                program.kill()


def keep_spare() -> Request | None:
    """Fork the spare; return in it, once it is needed, what it becomes, else None."""
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if not (pid := os.fork()):
        ours.close()
        with theirs:
            try:
                request = receive(theirs)
            except EOFError:  # The program has ended.
                os._exit(0)
        take_only(request[3])
        return request
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    spares = [(pid, ours)]
    os.register_at_fork(after_in_child=spares.clear)

    @functools.wraps(_execute_child)
    def execute_child(popen: Any, args: Any, *arguments: Any) -> None:
        if not (spares and "forkserver import" in str(args)):
            _execute_child(popen, args, *arguments)
            return
        popen.pid, connection = spares.pop()
        with connection:
            hand_over(connection, popen, args[1:], *arguments)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    return None


def take_only(fds: Mapping[int, int]) -> None:
    """Close all file descriptors but these, and give them their numbers."""
    copies = {
        n: fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_HIGH_FD) for n, fd in fds.items()
    }
    os.closerange(0, _FIRST_HIGH_FD)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def mount(folder: str, mebibytes: str) -> None:
    """Mount an empty file system, which only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    maps = {"setgroups": "deny"}
    maps |= {"uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    size = f"size={mebibytes}m".encode() if mebibytes else None

    def check(failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), "cannot mount")

    check(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS))
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    check(libc.mount(b"none", folder.encode(), b"tmpfs", ctypes.c_ulong(0), size))


def become(command: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run a program as an interpreter would, in this process."""
    os.chdir(cwd)
    if command[0] == sys.executable:
        os.execve(command[0], command, env)
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        # The fork server's workers write to the memory of an unchanged variable.
        if os.environ.get(name) != value:
            os.environ[name] = value
    if env.get("PYTHONUNBUFFERED"):
        raw: Any = open(1, "wb", 0, closefd=False)  # noqa: SIM115
        sys.stdout = io.TextIOWrapper(raw, write_through=True)
    while command[0].startswith("-W"):
        sys.warnoptions.append(command[0][2:])
        warnings.simplefilter(command.pop(0)[2:])  # type: ignore[arg-type]
    np.random.seed()  # noqa: NPY002 - The global generator is meant.
    added = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:1] = [p for p in added if p not in sys.path]
    sys.excepthook = print_without_us
    run(*command)


def run(kind: str, *rest: str) -> None:
    """Run ``-m MODULE``, ``-c CODE``, ``-`` or a script as ``__main__``."""
    main = sys.modules["__main__"]
    sys.argv[:] = [kind, *rest]
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        del sys.argv[0]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    name, folder = "<string>", ""
    if kind == "-c":
        text = sys.argv.pop(1)
    elif kind == "-":
        text, name = sys.stdin.read(), "<stdin>"
    else:
        main.__file__ = name = os.path.abspath(kind)
        folder = os.path.dirname(os.path.realpath(kind))
        with open(name, encoding="utf-8") as file:
            text = file.read()
    sys.path.insert(0, folder)
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


def print_without_us(
    kind: type[BaseException], error: BaseException, trace: Any
) -> None:
    """Print a traceback as if the program had been started by an interpreter."""
    trace = trace.tb_next  # That is `-c "import warm; ..."`.
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def end_quickly() -> None:
    """End a program after its last hook, without taking libraries apart.

    That would copy the memory that it shares with the warm process, in most of the time
    of a short program. What its ``__main__`` holds is deleted.
    """
    names = vars(sys.modules["__main__"])
    names.update(dict.fromkeys(names.keys() - {"__builtins__"}))
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(_exit_code)


_exit_code = 0


def main() -> None:
    """Serve, and return in a program when it has ended."""
    global _exit_code
    atexit.register(end_quickly)  # First, so it is called last.
    del sys.modules["__main__"].warm
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # Of pandas.
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    if mounted := request[2].get(MOUNT):
        os.chdir(request[1])
        mount(*mounted.split(":"))
    if request[0][0] != sys.executable:
        request = keep_spare() or request
    try:
        become(*request[:3])
    except KeyboardInterrupt:
        atexit.unregister(end_quickly)  # It dies by the signal.
        raise
    except SystemExit as end:
        code = end.code
        _exit_code = int(code or 0) & 0xFF if isinstance(code, int | None) else 1
        raise
    except BaseException:
        _exit_code = 1
        raise
