"""Runs Python programs in processes of their own, without starting an interpreter.

The programs are forked from a *warm process*, one per test process, which has imported
torch and what else takes long; see ``warm.py``. A program is leader of its own session,
has its own ``__main__``, arguments, environment and working directory, and ends like an
interpreter: it prints a traceback, runs ``atexit``, dies by the signal of Ctrl-C. It
does not outlive its test process.

Use ``interpreter=True`` for a fresh interpreter, where the test is about the start
itself, about what is imported, or about the environment variables that libraries read
when they load.
"""

import atexit
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, Self, cast

LIMIT: Final = 280.0
"""Seconds that a program may take; below pytest's limit for a test."""


class Program:
    """A running program; the methods are those of ``subprocess.Popen``.

    The process is not our child but the warm process's, which sends its exit code.
    """

    def __init__(
        self,
        args: Sequence[str],
        pid: int,
        status: socket.socket,
        pipes: Sequence[int | None],
    ) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        # What is written to by several programs may contain anything.
        self.stdin, self.stdout, self.stderr = (
            None
            if fd is None
            else os.fdopen(fd, mode, encoding="utf-8", errors="replace")
            for fd, mode in zip(pipes, "wrr", strict=True)
        )

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
            poller = select.poll()
            poller.register(self._status, select.POLLIN)
            if poller.poll(None if timeout is None else timeout * 1000):
                with self._status:
                    code = self._status.recv(16)
                # Nothing: the warm process has ended, and killed its programs.
                self.returncode = int(code) if code else -signal.SIGKILL
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
    request = {
        "command": args,
        "cwd": str(cwd or os.getcwd()),
        "env": dict(os.environ if env is None else env),
        "interpreter": interpreter,
    }
    try:
        status = ask(warm_process(os.getpid()), request, theirs)
    finally:
        for fd in theirs:
            os.close(fd)
    pid = b""
    while not pid.endswith(b"\n"):
        pid += (byte := status.recv(1))
        assert byte, "the warm process has ended"
    return Program([sys.executable, *args], int(pid), status, ours)


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


@cache
def warm_process(owner: int) -> str:
    """Return the socket of this test process's warm process, which is started first.

    Args:
        owner: our process id; the warm process of our parent is not ours.
    """
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(100)
        process = subprocess.Popen(
            [
                sys.executable,
                Path(__file__).with_name("warm.py"),
                str(listener.fileno()),
            ],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"MARL_COLLECT_WORKER": "0000000000"},
            start_new_session=True,
        )

    def end() -> None:
        if owner == os.getpid():
            process.communicate(timeout=LIMIT)
            folder.cleanup()

    atexit.register(end)
    return path


def ask(path: str, request: Mapping[str, object], fds: Sequence[int]) -> socket.socket:
    """Ask a warm process for a program; return the connection that says how it ends.

    Args:
        path: of its socket.
        request: ``command``, ``cwd``, ``env``, ``interpreter``.
        fds: stdin, stdout and stderr of the program.
    """
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(path)
    socket.send_fds(caller, [b"."], fds)
    with caller.makefile("wb") as file:
        pickle.dump(request, file)
    return caller
