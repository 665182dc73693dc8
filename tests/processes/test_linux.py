"""System calls by number and what replaces them; odd namespaces and processes."""

import ctypes
import errno
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import SOON, gone, wait_until
from support.scripts import LIMIT, run_python

from marl_collect.processes import linux
from marl_collect.processes.linux import NO_PIDFD
from marl_collect.processes.shared_memory import Segment


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def refuse(code: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.fixture
def old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the functions that builds of Python lack."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(signal, "pidfd_send_signal")


@pytest.fixture(
    params=[errno.ENOSYS, errno.EPERM, errno.EACCES], ids=errno.errorcode.get
)
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the calls fail as an old kernel does, or a container's filter."""
    code: int = request.param
    monkeypatch.setattr(os, "memfd_create", refuse(code))
    monkeypatch.setattr(os, "pidfd_open", refuse(code))
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse(code))
    return code


def is_readable(fd: int, seconds: float = SOON) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


# By number


@pytest.mark.usefixtures("old_python")
def test_memory_files_are_made_by_number() -> None:
    descriptor = linux.create_memory_file(100)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:marl_collect")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.usefixtures("old_python")
def test_processes_are_opened_and_signalled_by_number(
    sleeper: subprocess.Popen[bytes],
) -> None:
    pidfd = linux.open_process(sleeper.pid)
    assert "pidfd" in os.readlink(f"/proc/self/fd/{pidfd}")
    assert not os.get_inheritable(pidfd)
    assert not is_readable(pidfd, 0)
    linux.send_signal(-1, pidfd, signal.SIGUSR1)  # The process id is not looked at.
    assert is_readable(pidfd)
    assert sleeper.wait(SOON) == -signal.SIGUSR1
    with pytest.raises(ProcessLookupError):
        linux.send_signal(-1, pidfd, signal.SIGUSR1)
    with pytest.raises(ProcessLookupError):
        linux.open_process(sleeper.pid)
    os.close(pidfd)


@pytest.mark.usefixtures("old_python")
@pytest.mark.parametrize(
    ("machine", "bits"),
    [("sparc64", 64), ("i686", 64), ("armv7l", 64), (os.uname().machine, 32)],
)
def test_numbers_of_unknown_machines_and_programs_of_32_bits_are_not_guessed(
    machine: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    monkeypatch.setattr(sys, "maxsize", 2 ** (bits - 1) - 1)
    assert linux.open_process(os.getpid()) == NO_PIDFD
    descriptor = linux.create_memory_file(100)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/shm/")
    os.close(descriptor)


@pytest.mark.usefixtures("old_python")
@pytest.mark.parametrize(
    ("machine", "numbers"), [("x86_64", [319, 434, 424]), ("aarch64", [279, 434, 424])]
)
def test_the_numbers_are_those_of_the_kernel(
    machine: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    class Libc:
        @staticmethod
        def syscall(number: Any, *_: object) -> int:
            called.append(number.value)
            return 1000

    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc)
    assert linux.create_memory_file(1) == linux.open_process(1) == 1000
    linux.send_signal(1, 1000, signal.SIGTERM)
    assert called == numbers


# Refused


@pytest.mark.usefixtures("refusal")
def test_processes_are_signalled_and_awaited_without_descriptors(
    sleeper: subprocess.Popen[bytes],
) -> None:
    assert linux.open_process(sleeper.pid) == NO_PIDFD
    linux.await_process(sleeper.pid, NO_PIDFD, 0.1)
    assert not gone(sleeper.pid)
    linux.send_signal(sleeper.pid, NO_PIDFD, signal.SIGTERM)
    assert sleeper.wait(SOON) == -signal.SIGTERM
    linux.await_process(sleeper.pid, NO_PIDFD, SOON)
    with pytest.raises(ProcessLookupError):
        linux.send_signal(sleeper.pid, NO_PIDFD, signal.SIGTERM)


@pytest.mark.usefixtures("refusal")
def test_a_descriptor_that_cannot_be_signalled_is_replaced_by_the_process_id(
    sleeper: subprocess.Popen[bytes],
) -> None:
    linux.send_signal(sleeper.pid, os.open(os.devnull, os.O_RDONLY), signal.SIGTERM)
    assert sleeper.wait(SOON) == -signal.SIGTERM


@pytest.mark.usefixtures("refusal")
def test_the_end_of_a_child_is_seen_although_its_fork_lives() -> None:
    code = "import os, time\nif os.fork() == 0: time.sleep(1000)\nos._exit(3)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    descriptor = linux.open_child(child.pid)
    try:
        assert is_readable(descriptor)
        assert child.wait(SOON) == 3  # Nobody else has waited for it.
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        os.close(descriptor)


@pytest.mark.usefixtures("refusal")
def test_the_end_of_a_child_that_was_waited_for_is_seen(
    sleeper: subprocess.Popen[bytes],
) -> None:
    descriptor = linux.open_child(sleeper.pid)
    assert not is_readable(descriptor, 0)
    sleeper.kill()
    sleeper.wait(SOON)
    assert is_readable(descriptor)
    os.close(descriptor)


@pytest.mark.usefixtures("refusal")
def test_a_child_that_nobody_listens_to_any_more_does_not_kill_us() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    os.close(linux.open_child(child.pid))
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        child.kill()
        child.wait(SOON)
        wait_until(lambda: "await-child" not in _threads())
    finally:
        signal.signal(signal.SIGPIPE, before)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.usefixtures("refusal")
def test_memory_is_a_file_without_a_name() -> None:
    segment = Segment.create(1 << 20, "The moon")
    target = os.readlink(segment.handle.path)
    assert target.startswith("/dev/shm/")
    assert target.endswith("(deleted)")
    other = Segment.attach(segment.handle)
    other.buffer[7] = 42
    assert segment.buffer[7] == 42


def room(monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
    """Let folders have this many free bytes."""

    def statvfs(folder: str) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=free[os.path.basename(folder)], f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(linux, "_warned", set())


@pytest.mark.usefixtures("refusal")
def test_without_room_in_dev_shm_the_temporary_folder_is_used_and_this_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    room(monkeypatch, shm=99, temporary=1000)
    with caplog.at_level(logging.WARNING):
        segments = [Segment.create(100, "The moon") for _ in range(2)]
    for segment in segments:
        assert os.readlink(segment.handle.path).startswith(str(folder))
    assert list(folder.iterdir()) == []
    (message,) = caplog.messages
    assert "memfd_create" in message
    assert "docker run --shm-size" in message


@pytest.mark.usefixtures("refusal")
def test_without_room_anywhere_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    room(monkeypatch, shm=99, tmp=99)
    message = r"The moon needs 100 B .* refuses memfd_create .* Enlarge /dev/shm"
    with pytest.raises(MemoryError, match=message):
        Segment.create(100, "The moon")


def test_other_errors_are_not_taken_for_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EMFILE))
    monkeypatch.setattr(os, "pidfd_open", refuse(errno.EMFILE))
    with pytest.raises(OSError, match="ulimit -n"):
        Segment.create(100, "The moon")
    with pytest.raises(OSError, match="Too many open files"):
        linux.open_process(os.getpid())


# Processes that are closed to others, and namespaces

WITHOUT_CAPABILITIES = """
import ctypes, os
from marl_collect.processes.shared_memory import Segment

libc = ctypes.CDLL(None)

def drop_capabilities():
    header = (ctypes.c_uint * 2)(0x20080522, 0)
    assert libc.capset(header, (ctypes.c_uint * 6)()) == 0

def tell(do):
    try:
        do()
    except PermissionError as error:
        print(error, flush=True)
"""


CREATED = """
drop_capabilities()
Segment.create(9, "The moon")
libc.prctl(4, 0)
tell(lambda: Segment.create(9, "The moon"))
libc.prctl(4, 1)
Segment.create(9, "The moon")
"""
ATTACHED = """
handle = Segment.create(9, "The moon")
libc.prctl(4, 0)
if os.fork() == 0:
    drop_capabilities()
    tell(lambda: Segment.attach(handle.handle))
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (CREATED, ["The moon is shared memory"]),
        (ATTACHED, ["/fd/", "cannot be opened"]),
    ],
)
def test_memory_of_a_process_that_is_not_dumpable_says_what_to_do(
    body: str, parts: list[str]
) -> None:
    process = run_python("-c", WITHOUT_CAPABILITIES + body)
    assert process.stderr == ""
    (line,) = process.stdout.splitlines()
    for part in (*parts, "os.setuid", "prctl(4, 1)"):
        assert part in line


NAMESPACE = """
import logging, os, signal, sys
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from marl_collect.errors import WorkerError
from marl_collect.processes import WorkerPool

assert os.getpid() == 1
assert os.readlink("/proc/self") != "1"

def obey(worker, argument):
    while True:
        worker.send(worker.receive()(worker, argument))

for method in ("forkserver", "spawn"):
    pool = WorkerPool(obey, [3, 4], start_method=method)
    pool.broadcast(lambda worker, argument: argument)
    print(method, sorted(pool.receive() for _ in range(2)))
    print(pool.resident_bytes(0))
    os.kill(pool.pids[0], signal.SIGKILL)
    try:
        pool.receive([0])
    except WorkerError as error:
        print("killed", error.exitcode)
    pool.restart(0, 5)
    pool.send(0, lambda worker, argument: argument)
    print(pool.receive())
    print(pool.close())
"""


@pytest.mark.mounts
def test_a_pid_namespace_without_its_own_proc_runs() -> None:
    process = subprocess.run(
        ["unshare", "-Urpf", sys.executable, "-c", NAMESPACE],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert process.stderr == ""
    lines = process.stdout.splitlines()
    warning = lines.pop(1)
    assert "another PID namespace: max_worker_rss has no effect" in warning
    results = ["0", "killed -9", "(0, 5)", "()"]
    started = "[(0, 3), (1, 4)]"
    assert lines == [f"forkserver {started}", *results, f"spawn {started}", *results]
