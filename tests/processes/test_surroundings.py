"""Trainers in unusual environments: signals, streams, limits."""

import errno
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripts import LIMIT

from marl_collect.processes.children import ForkedChild
from marl_collect.processes.packets import REFUSED, encode

HEAD = """
import os, select, signal, sys, threading, time
import cloudpickle
from marl_collect.errors import WorkerError
from marl_collect.processes import WorkerPool

method = {method!r}

def obey(worker, argument):
    while True:
        worker.send(worker.receive()(worker, argument))

def pool(*arguments):
    return WorkerPool(obey, arguments or [0], start_method=method)

def ask(pool, question, worker=0):
    pool.send(worker, question)
    return pool.receive([worker])[1]

def tell(text):
    with open({told!r}, "a") as file:
        print(text, file=file)
"""


RunLines = Callable[..., list[str]]


@pytest.fixture
def run_lines(tmp_path: Path, start_method: str) -> RunLines:
    """Return a function that runs a script and returns the lines that it prints."""
    script, file = tmp_path / "script.py", tmp_path / "told"

    def run(body: str, shell: str = 'exec "$@"', **options: Any) -> list[str]:
        head = HEAD.format(method=start_method, told=str(file))
        script.write_text(head + textwrap.dedent(body))
        command = ["bash", "-c", shell, "bash", sys.executable, str(script)]
        with (tmp_path / "output").open("w+") as output:
            code = subprocess.call(
                command, stdout=output, stderr=output, timeout=LIMIT, **options
            )
            output.seek(0)
            assert code == 0, output.read()
        return file.read_text().splitlines()

    return run


# Signals

SIGCHLD_BODY = """
    with pool(0, 1) as first, pool(0) as second:
        os.kill(first.pids[0], signal.SIGKILL)
        try:
            first.receive([0])
        except WorkerError as error:
            tell(error)
        first.restart(0, 2)
        tell(ask(first, lambda worker, argument: argument))
        first.close()
        tell(ask(second, lambda worker, argument: "alive"))
        tell(ask(second, lambda worker, argument: os.system("exit 3") >> 8))
"""


@pytest.mark.parametrize("inherited", [False, True], ids=["set", "inherited"])
def test_workers_may_end_where_sigchld_is_ignored(
    run_lines: RunLines, inherited: bool
) -> None:
    ignore = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    if inherited:
        lines = run_lines(SIGCHLD_BODY, shell="trap '' CHLD; exec \"$@\"")
    else:
        lines = run_lines(ignore + textwrap.dedent(SIGCHLD_BODY))
    assert "ended unexpectedly" in lines[0]
    assert "SIGKILL" in lines[0] or "this process ignores SIGCHLD" in lines[0]
    assert lines[1:] == ["2", "alive", "3"]


def test_a_trainer_may_reap_its_own_children(run_lines: RunLines) -> None:
    body = """
        def reap(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
        signal.signal(signal.SIGCHLD, reap)
        """
    lines = run_lines(textwrap.dedent(body) + textwrap.dedent(SIGCHLD_BODY))
    assert lines[1:] == ["2", "alive", "3"]


def test_signals_that_the_trainer_blocks_or_ignores_are_not_so_in_workers(
    run_lines: RunLines,
) -> None:
    body = """
        every = set(signal.Signals) - {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, every)
        for number in (signal.SIGTERM, signal.SIGIO, signal.SIGABRT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

        def mask(worker, argument):
            return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

        with pool(0, 1) as workers:
            tell(ask(workers, mask))
            handle = workers._handles[0]
            handle.child.send_signal(signal.SIGTERM)
            tell(handle.join(100))
        """
    assert run_lines(body) == ["[]", "True"]


# Streams

CLOSED = ["1>&-", "2>&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
def test_workers_start_where_streams_are_closed(
    run_lines: RunLines, closed: str
) -> None:
    body = """
        def speak(worker, argument):
            print("heard")
            print("heard", file=sys.stderr, flush=True)
            return os.read(0, 1), [os.fstat(fd).st_rdev != 0 for fd in (1, 2)]

        with pool(0, 1) as workers:
            tell(ask(workers, speak, 0)[0])
            workers.restart(1, 1)
            tell(ask(workers, speak, 1)[0])
        """
    assert run_lines(body, shell=f'exec "$@" {closed}') == ["b''", "b''"]


def test_a_file_that_took_the_number_of_stdout_is_not_written_to(
    run_lines: RunLines, tmp_path: Path
) -> None:
    body = f"""
        kept = open({str(tmp_path / "kept")!r}, "w")
        if kept.fileno() != 1:  # A library has taken it.
            os.dup2(kept.fileno(), 1, inheritable=False)
        with pool(0) as workers:
            ask(workers, lambda worker, argument: print("heard", flush=True))
        tell("done")
        """
    assert run_lines(body, shell='exec "$@" >&-') == ["done"]
    assert (tmp_path / "kept").read_text() == ""


def test_streams_can_be_closed_later(run_lines: RunLines) -> None:
    body = """
        with pool(0, 1) as workers:
            for fd in (0, 1, 2):
                os.close(fd)
            workers.restart(1, 1)
            tell(ask(workers, lambda worker, argument: argument, 1))
            with pool(2) as others:
                tell(ask(others, lambda worker, argument: argument))
        os._exit(0)
        """
    assert run_lines(body) == ["1", "2"]


# Limits, and how the trainer goes on or ends


def test_a_limit_on_processes_is_named_and_leaves_nothing(run_lines: RunLines) -> None:
    body = """
        import ctypes, resource
        if os.getuid() == 0:
            os.setuid(54321)  # Root has no limit.
            ctypes.CDLL(None).prctl(4, 1)  # Other processes may open our files.
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        files = len(os.listdir("/proc/self/fd"))
        try:
            pool(0, 1)
        except OSError as error:
            told_of = str(error)
        assert len(os.listdir("/proc/self/fd")) == files
        print(told_of)
        assert "cannot start 2 worker(s): too many processes" in told_of
        assert "ulimit -u" in told_of
        """
    # Another user may not write where the test does.
    run_lines('tell("started")\n' + textwrap.dedent(body))


def test_workers_start_in_a_deleted_working_directory(run_lines: RunLines) -> None:
    body = """
        import tempfile
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        with pool(0, 1) as workers:
            tell(ask(workers, lambda worker, argument: argument, 1))
        """
    assert run_lines(body) == ["1"]


def test_workers_have_the_options_of_the_trainer_s_python(run_lines: RunLines) -> None:
    body = """
        with pool(0) as workers:
            flags = lambda *_: (sys.flags.optimize, sys.warnoptions)
            tell(ask(workers, flags))
        """
    assert run_lines(body, 'exec "$1" -OO -W once "$2"') == ["(2, ['once'])"]


def test_a_path_that_is_longer_than_an_argument_may_be_reaches_all_processes(
    run_lines: RunLines,
) -> None:
    body = """
        entries = [f"/no/such/folder/{'x' * 200}/{i}" for i in range(1000)]
        sys.path += entries
        with WorkerPool(obey, [0], start_method=method) as workers:
            tell(ask(workers, lambda worker, argument: sys.path) == sys.path)
            tell(ask(workers, lambda worker, argument: sys.argv) == sys.argv)
        """
    assert run_lines(body) == ["True", "True"]


def test_a_path_that_is_longer_than_all_arguments_may_be_is_named(
    run_lines: RunLines,
) -> None:
    body = """
        sys.path += [f"/no/such/folder/{'x' * 4000}/{i}" for i in range(2000)]
        files = len(os.listdir("/proc/self/fd"))
        try:
            pool(0)
        except OSError as error:
            tell(error)
        tell(len(os.listdir("/proc/self/fd")) == files)
        """
    message, is_closed = run_lines(body)
    assert "sys.path has 2" in message
    assert "MiB" in message
    assert is_closed == "True"


def test_a_server_that_cannot_fork_says_why() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(encode(REFUSED, errno.EAGAIN))
        child = ForkedChild(ours)
        with pytest.raises(OSError, match="fork server could not fork") as excinfo:
            child.confirm(time.monotonic() + 20)
        child.close()
    assert excinfo.value.errno == errno.EAGAIN
