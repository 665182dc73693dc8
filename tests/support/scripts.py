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
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from support.warm import MOUNT, hand_over

LIMIT: Final = 280.0
"""Seconds that a program may take; below pytest's limit for a test."""

FRESH: Final = "MARL_COLLECT_TEST_FRESH" in os.environ
"""Whether every program is a fresh interpreter (``make test-fresh``)."""


class Program(subprocess.Popen[str]):
    """A program. Its process is the warm process's child, which sends its exit code."""

    def _execute_child(self, *arguments: Any) -> None:
        self._status = socket.socket(socket.AF_UNIX)
        self._status.connect(warm_process(os.getpid()))
        hand_over(self._status, self, *arguments)
        self.pid = int(self._status.recv(10, socket.MSG_WAITALL))

    def _internal_poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                code = self._status.recv(10, socket.MSG_WAITALL)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._status.close()
            # Nothing: the warm process has ended, and killed its programs.
            self.returncode = int(code or -signal.SIGKILL)
        return self.returncode

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None and self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(kind, *rest)


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
    if interpreter or FRESH:
        args.insert(0, sys.executable)
    return Program(
        args,
        cwd=cwd,
        env=env,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",  # What several programs write to may contain anything.
    )


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
        folder: on which it is mounted, for this program only, which may mount more.
        code: of the program.
        arguments: of the program.
        mebibytes: size of the file system; None for the system's default.
        cwd: working directory.
        timeout: seconds until it is killed and ``TimeoutExpired`` raised.
    """
    mount = f"{folder}:{mebibytes or ''}"
    env = os.environ | {MOUNT: mount}
    return run_python("-c", code, *arguments, cwd=cwd, env=env, timeout=timeout)


@cache
def warm_process(owner: int) -> bytes:
    """Return the address of this test process's warm process, which is started first.

    Args:
        owner: our process id; the warm process of our parent is not ours.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # The kernel chooses a name, which is no file.
        listener.listen(100)
        process = subprocess.Popen(
            [sys.executable, "-c", "import warm; warm.main()", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parent,
            env=os.environ | {"MARL_COLLECT_WORKER": "0" * 10, "PYTHONUNBUFFERED": ""},
            start_new_session=True,
        )
        address: bytes = listener.getsockname()

    def end() -> None:
        if owner == os.getpid():
            process.communicate(timeout=LIMIT)

    atexit.register(end)
    return address
