"""Runs Python programs in processes of their own, without starting an interpreter.

    test process --- request, stdin, stdout, stderr ---> zygote -- fork --> program
                 <--- exit status of the program -------

The *zygote* is one process per test process. It has imported torch, this package and
what programs of tests usually import, and forks a child for each program. A child is
leader of its own session, has its own ``__main__``, arguments, environment and working
directory, and ends like any interpreter: it prints a traceback, runs ``atexit``, dies
by the signal of Ctrl-C. It also forks a *spare* beforehand, an idle copy that becomes
the package's fork server if the program needs one; a program with a collector would
otherwise start a second interpreter. All that takes milliseconds instead of the two to
six seconds of CPU time of two interpreters that import torch.

Use ``interpreter=True`` for a fresh interpreter, where the test is about the start
itself, about what is imported, or about the environment variables that libraries read
when they load.

Programs do not outlive their test process: the zygote kills their sessions when the
test process ends, however it ends.
"""

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self, cast

ZYGOTE: Final = Path(__file__).with_name("zygote.py")
LIMIT: Final = 280.0
"""Seconds that a program may take; below pytest's limit for a test."""


class Program:
    """A running program; the methods are those of ``subprocess.Popen``.

    The process is not our child but the zygote's, which reports its exit status through
    a pipe.
    """

    def __init__(
        self, args: Sequence[str], pid: int, status: int, pipes: Sequence[int | None]
    ) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        files = [_open(pipe, mode) for pipe, mode in zip(pipes, "wrr", strict=True)]
        self.stdin, self.stdout, self.stderr = files

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: after ``timeout`` seconds.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(list(self.args), cast(float, timeout))
        return code

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            import select

            poller = select.poll()
            poller.register(self._status, select.POLLIN)
            if poller.poll(None if timeout is None else timeout * 1000):
                status = os.read(self._status, 16)
                os.close(self._status)
                # An empty answer: the zygote itself has ended, and killed its programs.
                self.returncode = int(status) if status else -signal.SIGKILL
        return self.returncode

    def communicate(
        self,
        input: str | None = None,  # noqa: A002
        timeout: float | None = None,
    ) -> tuple[str, str]:
        """Write ``input``, read both outputs to their ends, and wait.

        Raises:
            subprocess.TimeoutExpired: after ``timeout`` seconds; the program goes on.
        """
        texts: dict[str, str] = {}

        def read(name: str, file: IO[str]) -> None:
            texts[name] = file.read()
            file.close()

        def write(text: str, file: IO[str]) -> None:
            try:
                file.write(text)
                file.close()
            except BrokenPipeError:
                pass

        jobs: list[tuple[Any, ...]] = []
        if self.stdin is not None:
            jobs.append((write, input or "", self.stdin))
        for name in ("stdout", "stderr"):
            file = getattr(self, name)
            if file is not None and not file.closed:
                jobs.append((read, name, file))
        threads = [threading.Thread(target=f, args=arguments) for f, *arguments in jobs]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise subprocess.TimeoutExpired(list(self.args), cast(float, timeout))
        self.wait(timeout)
        return texts.get("stdout", ""), texts.get("stderr", "")

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()

    def __del__(self) -> None:
        if self.returncode is None:
            os.close(self._status)
            self.returncode = -signal.SIGKILL


def start_python(
    *command: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stderr: int | None = subprocess.PIPE,
    interpreter: bool = False,
) -> Program:
    """Start ``python *command`` in a session of its own.

    Args:
        command: arguments of ``python``: ``-c CODE``, ``-m MODULE`` or a script, or
            ``-`` for a script from stdin; options ``-W`` may precede it.
        cwd: working directory; ours by default.
        env: the whole environment; ours by default.
        stdin: ``subprocess.PIPE``, or ``DEVNULL``.
        stderr: ``subprocess.PIPE``, or ``STDOUT`` for one pipe with stdout.
        interpreter: start a fresh interpreter instead of forking a warm one.
    """
    args = [str(argument) for argument in command]
    ours: list[int | None] = [None, None, None]
    theirs: list[int] = []
    if stdin == subprocess.PIPE:
        end, ours[0] = os.pipe()
    else:
        end = os.open(os.devnull, os.O_RDONLY)
    theirs.append(end)
    ours[1], end = os.pipe()
    theirs.append(end)
    if stderr == subprocess.STDOUT:
        theirs.append(os.dup(end))
    else:
        ours[2], end = os.pipe()
        theirs.append(end)
    status, end = os.pipe()
    theirs.append(end)
    request = {
        "command": args,
        "cwd": str(cwd or os.getcwd()),
        "env": dict(os.environ if env is None else env),
        "interpreter": interpreter,
    }
    try:
        pid = _zygote().start(request, theirs)
    finally:
        for fd in theirs:
            os.close(fd)
    return Program([sys.executable, *args], pid, status, ours)


def run_python(
    *command: str | Path,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,  # noqa: A002
    timeout: float = LIMIT,
    check: bool = False,
    interpreter: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run ``python *command`` to its end; return its exit code and outputs.

    Args:
        command: see ``start_python``, also for the other arguments.
        cwd: working directory.
        env: the whole environment.
        input: text for stdin.
        timeout: seconds until its session is killed and ``TimeoutExpired`` raised.
        check: raise ``CalledProcessError`` if the exit code is not 0.
        interpreter: start a fresh interpreter.
    """
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with start_python(
        *command, cwd=cwd, env=env, stdin=stdin, interpreter=interpreter
    ) as program:
        out, err = program.communicate(input, timeout)
    process = subprocess.CompletedProcess(program.args, program.wait(), out, err)
    if check:
        process.check_returncode()
    return process


def run_mounted(
    folder: str,
    code: str,
    *arguments: str,
    mebibytes: int | None = None,
    cwd: Path | None = None,
    timeout: float = LIMIT,
) -> "subprocess.CompletedProcess[str]":
    """Run code where an empty file system is mounted; needs the mark ``mounts``.

    Args:
        folder: on which it is mounted, for this program only.
        code: of the program.
        arguments: of the program.
        mebibytes: size of the file system; None for the system's default.
        cwd: working directory.
        timeout: seconds until it is killed and ``TimeoutExpired`` raised.
    """
    size = "" if mebibytes is None else f"-o size={mebibytes}m "
    script = f'mount -t tmpfs {size}none {folder} && exec "$@"'
    return subprocess.run(
        [
            *("unshare", "-Urm", "sh", "-c", script, "sh"),
            *(sys.executable, "-c", code, *arguments),
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _open(fd: int | None, mode: str) -> IO[str] | None:
    # One that is written to by several programs may contain anything.
    return (
        None if fd is None else os.fdopen(fd, mode, encoding="utf-8", errors="replace")
    )


class _Zygote:
    """Our end of the zygote."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, str(ZYGOTE), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"MARL_COLLECT_WORKER": "0000000000"},
                start_new_session=True,
            )

    def start(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        payload = pickle.dumps(request)
        with self._lock:
            socket.send_fds(self._socket, [len(payload).to_bytes(4, "little")], fds)
            self._socket.sendall(payload)
            answer = self._socket.recv(16)
        if not answer:
            raise RuntimeError(f"the zygote ended with exit code {self._popen.wait()}")
        return int(answer)

    def end(self) -> None:
        if self.owner == os.getpid():
            self._socket.close()
            self._popen.wait(LIMIT)


_running: _Zygote | None = None


def _zygote() -> _Zygote:
    global _running
    if _running is None or _running.owner != os.getpid():
        _running = _Zygote()
        atexit.register(_running.end)
    return _running
