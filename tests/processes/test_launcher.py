"""What becomes of the processes when the trainer ends, in whatever way.

Each test runs a script as a user would: without a ``__main__`` guard, with
lambdas and classes of its own, in a process group of its own.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.processes import SOON
from support.scripts import Program, start_python

from marl_collect.processes.launcher import launch

HEAD = """
import ctypes, os, signal, sys, threading, time
from marl_collect.errors import WorkerError
from marl_collect.processes import Phase, WorkerContext, WorkerPool

start_method = sys.argv[1]

def obey(worker, argument):
    while True:
        worker.send(worker.receive()(worker, argument))

def stuck(worker, argument):
    worker.line.enter(Phase.STEP)
    ctypes.PyDLL(None).sleep(1000)  # In C, with the interpreter lock.

def make_stuck(pool):
    pool.broadcast(stuck)
    while any(line.phase is not Phase.STEP for line in pool.status_board.lines):
        pool.check()

def tell(*pids):
    print(*pids, flush=True)
    sys.stdin.read()  # Until the test has seen them.
"""

Run = Callable[..., tuple[Program, list[int]]]
REFUSING = Path(__file__).parents[1] / "support" / "refusing.py"


@pytest.fixture
def run(start_method: str, tmp_path: Path) -> Iterator[Run]:
    """Start a script, and return it with pidfds of the pids that it prints."""
    with contextlib.ExitStack() as stack:

        def start(
            body: str, *, without_pidfds: bool = False
        ) -> tuple[Program, list[int]]:
            script = tmp_path / "script.py"
            script.write_text(HEAD + body)
            command: list[Any] = [script, start_method]
            if without_pidfds:  # On a kernel that refuses them.
                command = [REFUSING, "ENOSYS", sys.executable, *command]
            process = stack.enter_context(
                start_python(*command, stdin=subprocess.PIPE, interpreter=True)
            )
            stack.callback(kill_group, process)
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            pidfds = [os.pidfd_open(int(pid)) for pid in line.split()]
            for pidfd in pidfds:
                stack.callback(os.close, pidfd)
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None  # Else communicate() would write to it.
            return process, pidfds

        yield start


def kill_group(process: Program) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def assert_gone(pidfds: Sequence[int], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    for pidfd in pidfds:
        remaining = max(0.0, deadline - time.monotonic())
        assert select.select([pidfd], [], [], remaining)[0], "a process is left behind"


@pytest.mark.parametrize("without_pidfds", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_stuck_workers_and_programs_end_with_a_killed_trainer_while_a_fork_of_it_lives(
    run: Run, number: int, without_pidfds: bool
) -> None:
    process, pidfds = run(
        """
import subprocess

def play(worker, argument):
    program = subprocess.Popen(["sleep", "1000"]) if start_method != "spawn" else None
    return [os.getppid(), *([program.pid] if program else [])]

pool = WorkerPool(obey, [0, 1], start_method=start_method)
pool.broadcast(play)
starters = pool.receive()[1] + pool.receive()[1]
make_stuck(pool)
libc = ctypes.CDLL(None)
if libc.fork() == 0:  # Unknown to Python, with copies of all sockets.
    libc.pause()
tell(*starters, *pool.pids)
signal.pause()
""",
        without_pidfds=without_pidfds,
    )
    process.send_signal(number)
    assert_gone(pidfds)


def test_nested_workers_end_with_the_worker_that_asked_for_them(run: Run) -> None:
    process, pidfds = run(
        """
def nest(worker, argument):
    argument["pool"] = WorkerPool(obey, [0, 1], start_method=start_method)
    make_stuck(argument["pool"])
    return argument["pool"].pids

pool = WorkerPool(obey, [{}, {}], start_method=start_method)
pool.broadcast(nest)
nested = dict(pool.receive() for _ in range(2))
tell(*pool.pids, *nested[0], *nested[1])
sys.stdin.read()
os.kill(pool.pids[0], signal.SIGKILL)
signal.pause()
"""
    )
    assert_gone([pidfds[0], *pidfds[2:4]])
    process.kill()
    assert_gone(pidfds)


def test_exiting_without_close_is_quick_and_clean(run: Run) -> None:
    process, pidfds = run(
        """
from marl_collect.processes import cleanup, launcher
# However long a process of a busy machine takes; the test has a limit of its own.
cleanup._EXIT_SECONDS = launcher._EXIT_SECONDS = 1000.0

def main(worker, argument):
    worker.send(os.getppid())
    try:
        worker.receive()
    finally:
        # One write: where output is unbuffered, print writes the newline apart.
        os.write(1, b"the environment is closed;")

pool = WorkerPool(main, [0, 1], start_method=start_method)
starters = {pool.receive()[1] for _ in range(2)}
tell(*pool.pids, *starters)
"""
    )
    output, errors = process.communicate(timeout=SOON)
    assert process.returncode == 0
    assert errors == ""
    assert output == "the environment is closed;" * 2
    assert_gone(pidfds, 0.0)


@pytest.fixture
def slow_import(tmp_path: Path) -> None:
    """Write a module that notes its process and is imported without end."""
    (tmp_path / "slow_import.py").write_text(
        "import os, time\n"
        "with open('pid.tmp', 'w') as file: file.write(str(os.getpid()))\n"
        "os.rename('pid.tmp', 'pid')\n"
        "time.sleep(1000)\n"
    )


@pytest.mark.usefixtures("slow_import")
@pytest.mark.parametrize("start_method", ["forkserver"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_server_that_is_still_importing_ends_with_its_trainer(
    run: Run, *, killed: bool
) -> None:
    process, pidfds = run(
        f"""
from marl_collect.processes import launcher
launcher._EXIT_SECONDS = 1000.0  # The test has a limit of its own.
os.chdir(os.path.dirname(__file__))
launcher.start_server(["slow_import"])
while not os.path.exists("pid"):
    time.sleep(0.01)
tell(open("pid").read())
if {killed}:
    signal.pause()
"""
    )
    if killed:
        process.kill()
        assert_gone(pidfds)
        return
    _, errors = process.communicate(timeout=SOON)
    assert (process.returncode, errors) == (0, "")
    assert_gone(pidfds, 0.0)


@pytest.mark.parametrize("thread", ["main", "other"])
def test_killing_the_trainer_ends_processes_that_are_stopped(
    run: Run, thread: str
) -> None:
    """Such as after SIGSTOP to a whole tree; also if the starting thread has ended."""
    process, pidfds = run(
        f"""
def start():
    global pool
    pool = WorkerPool(obey, [0, 1], start_method=start_method)

if {thread == "other"}:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
pool.broadcast(lambda worker, argument: (os.getpid(), os.getppid()))
pids = {{pid for _ in range(2) for pid in pool.receive()[1]}} - {{os.getpid()}}

def is_stopped(pid):
    with open(f"/proc/{{pid}}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"

for pid in pids:
    os.kill(pid, signal.SIGSTOP)
while not all(map(is_stopped, pids)):
    pass
tell(*pids)
signal.pause()
"""
    )
    process.send_signal(signal.SIGSTOP)
    process.kill()
    assert_gone(pidfds)


@pytest.mark.parametrize("start_method", ["forkserver"])
def test_the_end_of_a_server_is_noticed_without_process_descriptors(run: Run) -> None:
    process, pidfds = run(
        """
pool = WorkerPool(obey, [0, 1], start_method=start_method)
pool.send(0, lambda worker, argument: os.getppid())
_, server = pool.receive()
tell(server, *pool.pids)
os.kill(server, signal.SIGKILL)
try:
    pool.receive()
except WorkerError as error:
    print(error, flush=True)
signal.pause()
""",
        without_pidfds=True,
    )
    assert process.stdout is not None
    assert "its fork server was killed" in process.stdout.readline()
    assert_gone(pidfds)


@pytest.mark.parametrize("start_method", ["forkserver"])
def test_exiting_ends_a_fork_server_that_is_stopped(run: Run) -> None:
    process, pidfds = run(
        """
pool = WorkerPool(obey, [0], start_method=start_method)
pool.send(0, lambda worker, argument: os.getppid())
_, server = pool.receive()
os.kill(server, signal.SIGSTOP)
tell(server, *pool.pids)
"""
    )
    _, errors = process.communicate(timeout=SOON)
    assert (process.returncode, errors) == (0, "")
    assert_gone(pidfds)


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(1000)",
        "WorkerPool(stuck_in_create, [0], start_method=start_method).receive()",
    ],
    ids=["learn", "start"],
)
def test_ctrl_c_gives_one_traceback_and_leaves_no_process(run: Run, body: str) -> None:
    """Batches and a shutdown are interrupted in ``test_matrix_workers.py``."""
    process, pidfds = run(
        f"""
def ignore(worker, argument):
    worker.line.enter(Phase.STEP)
    while True:
        try:
            worker.receive()
        except EOFError:
            threading.Event().wait(1000)

def stuck_in_create(worker, argument):
    worker.line.enter(Phase.CREATE)
    threading.Event().wait(1000)

pool = WorkerPool(ignore, [0, 1], start_method=start_method)
while any(line.phase is not Phase.IDLE for line in pool.status_board.lines):
    pool.check()
tell(*pool.pids)
print("go", flush=True)
{body}
"""
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    # The line above is printed before the call that shall be interrupted.
    assert not select.select(pidfds, [], [], 0.3)[0]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=SOON)
    assert process.returncode in (-signal.SIGINT, 130)
    assert len(re.findall("Traceback", errors)) == 1, errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert_gone(pidfds)


def test_ctrl_c_while_interpreters_start_prints_nothing_from_them(run: Run) -> None:
    process, _ = run(
        """
signal.signal(signal.SIGINT, lambda number, frame: None)
tell(os.getpid())
for i in range(8):
    with WorkerPool(obey, [0], start_method=start_method, preload=("json",) * i) as p:
        p.send(0, lambda worker, argument: None)
        p.receive()
tell("done")
"""
    )
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], 0.002)[0]:
        os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=SOON)
    assert (process.returncode, output, errors) == (0, "done\n", "")


@pytest.mark.parametrize("path", [None, ""])
def test_a_program_that_embeds_python_is_told_to_name_it(
    monkeypatch: pytest.MonkeyPatch, path: Any
) -> None:
    monkeypatch.setattr(sys, "executable", path)
    with pytest.raises(RuntimeError, match=r"Set sys\.executable to the path"):
        launch("spawn", (), time.monotonic())
