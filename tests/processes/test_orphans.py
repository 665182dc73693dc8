"""Programs that a worker starts end with it; other programs do not."""

import importlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_tools import obey
from support.processes import SOON, wait_until
from support.scripts import run_python

from marl_collect.processes import WorkerContext, WorkerPool


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(obey, [0, 0]) as pool:
        yield pool


def opened(pool: WorkerPool, worker: int, start: Any) -> int:
    """Let a worker start a process and return its id; return a pidfd of it."""
    pool.send(worker, start)
    return os.pidfd_open(pool.receive([worker])[1])


def has_ended(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


@pytest.mark.parametrize(
    "command",
    ["sh -c \"trap '' TERM; while :; do sleep 1; done\"", "setsid sleep 1000"],
    ids=["ignores SIGTERM", "in its own session"],
)
def test_a_stubborn_program_ends_too(pool: WorkerPool, command: str) -> None:
    def start(context: Any, argument: Any) -> Any:
        return subprocess.Popen(["sh", "-c", f"exec {command}"]).pid

    program = opened(pool, 0, start)
    pool.close()
    assert has_ended(program, SOON)


def test_a_daemon_lives_as_long_as_its_worker(pool: WorkerPool) -> None:
    def start(context: Any, argument: Any) -> Any:
        command = "sleep 1000 >/dev/null & echo $!"
        return int(subprocess.run(["sh", "-c", command], stdout=-1).stdout)

    daemon = opened(pool, 0, start)
    os.kill(pool.pids[1], signal.SIGKILL)
    pool.restart(1, "new")
    assert not has_ended(daemon, 0.5)
    pool.close()
    assert has_ended(daemon, SOON)


def test_programs_do_not_stay_as_zombies_of_the_server(pool: WorkerPool) -> None:
    pool.send(0, lambda context, argument: os.getppid())
    server = pool.receive()[1]
    program = opened(pool, 0, run_a_program)
    pool.close()
    assert has_ended(program, SOON)
    children = Path(f"/proc/{server}/task/{server}/children")
    wait_until(lambda: not children.read_text().split(), "the server has children")


def test_a_program_that_is_just_starting_ends_too(pool: WorkerPool) -> None:
    def fork_unmarked(context: Any, argument: Any) -> Any:
        """Start a process whose initial environment is empty for half a second."""
        ctypes, time = map(importlib.import_module, ("ctypes", "time"))
        # proc(5): env_start and env_end are the fields 50 and 51, after the name.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        address, end = int(fields[47]), int(fields[48])
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            environment = ctypes.string_at(address, end - address)
            ctypes.memset(address, 0, end - address)
            os.write(writer, b"x")
            time.sleep(0.5)
            ctypes.memmove(address, environment, end - address)
            signal.sigwait([signal.SIGUSR1])
        os.read(reader, 1)
        return pid

    program = opened(pool, 0, fork_unmarked)
    pool.close()
    assert has_ended(program, SOON)


def test_shared_memory_of_a_killed_worker_is_removed_by_its_tracker(
    pool: WorkerPool,
) -> None:
    def create(context: Any, argument: Any) -> Any:
        shared_memory = importlib.import_module("multiprocessing.shared_memory")
        argument.append(shared_memory.SharedMemory(create=True, size=64))
        return argument[0].name

    pool.restart(0, [])
    pool.send(0, create)
    path = Path("/dev/shm") / pool.receive()[1]
    assert path.exists()
    pids = pool.pids
    os.kill(pids[0], signal.SIGKILL)
    try:
        wait_until(lambda: not path.exists(), "the tracker was killed before it could")
    finally:
        path.unlink(missing_ok=True)


def fork_a_helper(
    context: WorkerContext, argument: Any, on_sigterm: Any = signal.SIG_DFL
) -> int:
    """Start a process of ``multiprocessing`` as environments do; return its id."""

    def wait() -> None:
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.sigwait([signal.SIGUSR1])

    multiprocessing = importlib.import_module("multiprocessing")
    helper = multiprocessing.get_context("fork").Process(target=wait, daemon=True)
    helper.start()
    return helper.pid


def fork_what_ignores_sigterm(context: WorkerContext, argument: Any) -> int:
    return fork_a_helper(context, argument, signal.SIG_IGN)


def fork_twice(context: WorkerContext, argument: Any) -> int:
    """Start a helper in another session, whose parent ends."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(writer, str(fork_a_helper(context, argument)).encode())
        os._exit(0)
    return int(os.read(reader, 100))


def forget_the_environment(context: WorkerContext, argument: Any) -> int:
    os.environ.clear()
    return fork_a_helper(context, argument)


def run_a_program(context: WorkerContext, argument: Any) -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


@pytest.mark.parametrize(
    "start",
    [
        run_a_program,
        fork_a_helper,
        fork_what_ignores_sigterm,
        fork_twice,
        forget_the_environment,
    ],
)
def test_only_processes_of_the_killed_worker_end(pool: WorkerPool, start: Any) -> None:
    first, second = (opened(pool, worker, start) for worker in (0, 1))
    assert not has_ended(first, 0.3)
    os.kill(pool.pids[0], signal.SIGKILL)
    assert has_ended(first, SOON)
    assert not has_ended(second, 0.3)
    os.kill(pool.pids[1], signal.SIGKILL)
    assert has_ended(second, SOON)


def test_forked_helpers_end_with_each_restart(pool: WorkerPool) -> None:
    helpers = []
    for _ in range(3):
        helpers.append(opened(pool, 0, fork_a_helper))
        pool.restart(0, 0)
        assert has_ended(helpers[-1], SOON)


def test_a_helper_of_a_nested_worker_ends_with_that_worker(pool: WorkerPool) -> None:
    def nest(context: Any, argument: Any) -> Any:
        argument["inner"] = inner = WorkerPool(obey, [0, 0])
        inner.broadcast(fork_a_helper)
        return dict([inner.receive(), inner.receive()])

    def kill(context: Any, argument: Any) -> None:
        os.kill(argument["inner"].pids[0], signal.SIGKILL)

    pool.restart(0, {})
    pool.send(0, nest)
    helpers = pool.receive([0])[1]
    first, second = (os.pidfd_open(helpers[worker]) for worker in (0, 1))
    pool.send(0, kill)
    assert has_ended(first, SOON)
    assert not has_ended(second, 0.3)
    os.kill(pool.pids[0], signal.SIGKILL)
    assert has_ended(second, SOON)


def test_a_process_whose_parent_has_ended_before_it_could_be_bound_ends() -> None:
    code = (
        "import os; from marl_collect.processes.survival import die_with_parent; "
        "die_with_parent({}); os._exit(7)"
    )
    assert run_python("-c", code.format("os.getppid()")).returncode == 7
    assert run_python("-c", code.format("os.getpid()")).returncode == 1
