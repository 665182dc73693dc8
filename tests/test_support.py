"""Tests run as they should, and their programs as interpreters run them."""

import os
import re
import shutil
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from support.processes import left, wait_until, wait_until_gone
from support.processless import ROOMS
from support.scripts import run_python, start_python

# Some start a test run.
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TESTS = Path(__file__).parent

# Each runs in a folder with script.py and module.py, with "input" as stdin.
SURROUNDINGS = """
import os, signal, sys, warnings
warnings.warn("w")
print(__name__, sys.argv, sys.path[0] == "", os.getcwd(), sys.stdin.read())
print(os.environ["SET"], "HOME" in os.environ, sorted(os.listdir("/proc/self/fd"))[:3])
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
"""
PROGRAMS = {
    "surroundings": ["-Wignore", "-c", SURROUNDINGS, "--flag", "value"],
    "exit_code": ["-c", "raise SystemExit(3)"],
    "exit_message": ["-c", "import sys; sys.exit('a message')"],
    "exit_without_cleanup": ["-c", "import os; print('lost'); os._exit(4)"],
    "unbuffered_without_cleanup": ["-c", "import os; print('kept'); os._exit(4)"],
    "exception": ["-c", "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError"],
    "exception_in_a_module": ["-c", "import module; module.fail()"],
    "syntax_error": ["-c", "print("],
    "interrupted": [
        "-c",
        "import atexit, os\natexit.register(print, 1)\nos.kill(0, 2)\nprint()",
    ],
    "negative_exit_code": ["-c", "raise SystemExit(-2)"],
    "destructor": ["-c", "class A:\n def __del__(_): print('deleted')\na = A()"],
    "output_of_c": ["-c", "import ctypes; ctypes.CDLL(None).printf(b'from C')"],
    "killed": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "script": ["script.py", "1", "2"],
    "script_that_fails": ["script.py", "fail"],
    "module": ["-m", "module", "1"],
    "module_that_fails": ["-m", "module", "fail"],
    "from_stdin": ["-", "argument"],
}
SCRIPT = """
import os, sys
print(__name__, __file__, sys.argv, os.path.realpath(sys.path[0]) == os.getcwd())
if sys.argv[1] == "fail":
    raise ValueError("as asked")
"""
MODULE = """
import sys
def fail():
    raise RuntimeError("in a module")
if __name__ == "__main__":
    print(__name__, sys.argv[1:], __spec__.name, sys.path[0])
    if sys.argv[1] == "fail":
        fail()
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_what_it_does_in_a_fresh_interpreter(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "module.py").write_text(MODULE)
    left_out = ("HOME", "PYTHONUNBUFFERED")
    environment = {n: v for n, v in os.environ.items() if n not in left_out}
    environment["SET"] = "1"
    if name.startswith("unbuffered"):
        environment["PYTHONUNBUFFERED"] = "1"
    text = "import sys\nprint(sys.argv, __name__)\n"
    warm, fresh = (
        run_python(
            *PROGRAMS[name],
            cwd=tmp_path,
            env=environment,
            input=text,
            interpreter=interpreter,
        )
        for interpreter in (False, True)
    )
    assert warm.returncode == fresh.returncode
    assert warm.stdout == fresh.stdout
    assert comparable(warm.stderr) == comparable(fresh.stderr)


def comparable(text: str) -> list[str]:
    """Return the lines of a traceback that all versions of Python print alike.

    Left out are marks of columns, and the source lines of `-c`, which only some
    versions know.
    """
    lines = text.splitlines()
    return [
        line
        for number, line in enumerate(lines)
        if set(line) - set(" ^~")
        if not (number and '"<string>"' in lines[number - 1] and line[:4] == " " * 4)
    ]


@pytest.mark.parametrize("interpreter", [False, True])
def test_a_program_begins_with_one_thread_and_nothing_of_the_package(
    interpreter: bool,
) -> None:
    code = """
        import os, sys
        print("torch" in sys.modules, len(os.listdir(f"/proc/{os.getppid()}/task")))
        print([n for n in sys.modules if n.partition(".")[0] in sys.argv])
    """
    arguments = [textwrap.dedent(code), "marl_collect", "ray", "torchrl"]
    process = run_python("-c", *arguments, check=True, interpreter=interpreter)
    assert process.stdout.splitlines() == [f"{not interpreter} 1", "[]"]


def test_programs_run_at_the_same_time_each_the_leader_of_a_session() -> None:
    code = """
        import os, numpy
        ids = os.getpid(), os.getsid(0), os.getpgid(0)
        print(*ids, numpy.random.random(), flush=True)
        print(input())
    """
    arguments = ["-c", textwrap.dedent(code)]
    with (
        start_python(*arguments, stdin=subprocess.PIPE) as first,
        start_python(*arguments, stdin=subprocess.PIPE) as second,
    ):
        assert first.stdout is not None
        assert second.stdout is not None
        lines = [program.stdout.readline().split() for program in (first, second)]
        for program, (*ids, _) in zip((first, second), lines, strict=True):
            assert ids == [str(program.pid)] * 3
            assert program.poll() is None
        assert lines[0][-1] != lines[1][-1]
        first.kill()
        assert first.wait() == -signal.SIGKILL
        assert second.communicate("still here\n") == ("still here\n", "")
        assert (second.poll(), second.returncode) == (0, 0)


def test_a_program_that_takes_too_long_is_killed_with_its_session() -> None:
    code = """
        import subprocess, sys
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, flush=True)
        sys.stdin.read()
    """
    program = start_python("-c", textwrap.dedent(code), stdin=subprocess.PIPE)
    assert program.stdout is not None
    child = int(program.stdout.readline())
    with pytest.raises(subprocess.TimeoutExpired), program:
        program.wait(0.01)
    assert program.returncode == -signal.SIGKILL
    wait_until_gone([program.pid, child])
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("-c", "import time; time.sleep(1000)", timeout=0.1)


def test_a_failure_can_be_an_error() -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        run_python("-c", "print('out'); raise SystemExit(5)", check=True)
    assert (raised.value.returncode, raised.value.stdout) == (5, "out\n")


FORK_SERVERS = """
from pathlib import Path
from marl_collect.processes import WorkerPool

def main(worker, argument):
    worker.receive()

for preload in (), ("json.tool",):
    with WorkerPool(main, [None], preload=preload) as pool:
        stat = Path(f"/proc/{pool.pids[0]}/stat").read_text()
        server = stat.rpartition(")")[2].split()[1]
        print("import warm" in Path(f"/proc/{server}/cmdline").read_text())
"""


def test_the_spare_becomes_the_first_fork_server() -> None:
    process = run_python("-c", FORK_SERVERS, check=True)
    assert process.stdout.split() == ["True", "False"]


MARK, PRELOAD = "MARL_COLLECT_TEST_OF_LEFT_PROCESSES", "MARL_COLLECT_TEST_PRELOAD"
INTERRUPTED = """
from support.scripts import start_python

START = '''
import subprocess
from pathlib import Path
from marl_collect.processes import WorkerPool

def wait(worker, argument):
    worker.send("up")
    worker.receive()

subprocess.Popen(["sleep", "1000"], start_new_session=True)
with WorkerPool(wait, [0, 1]) as pool:
    for _ in range(2):
        pool.receive()
    Path("up").touch()
    pool.receive()
'''

def test_that_is_interrupted():
    program = start_python("-c", START)
    program.wait()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, pytest.ExitCode.INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_interrupted_test_leaves_no_process(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "test_that_is_interrupted.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    mark = f"{MARK}={tmp_path.name}"
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    with start_python(
        *("-m", "pytest", *options, str(tmp_path)),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, PRELOAD: "", MARK: tmp_path.name},
        stderr=subprocess.STDOUT,
    ) as program:
        up = tmp_path / "up"
        wait_until(lambda: up.exists() or program.poll() is not None)
        assert program.poll() is None, program.communicate()
        # Their warm process, the program, its fork server, two workers, and a daemon.
        assert len(left(mark=mark)) >= 6
        os.kill(program.pid, number)
        assert program.wait() == code
    wait_until(lambda: not left(mark=mark), "processes are left")


SKIPS = """
def test_unlisted():
    pytest.skip("not today")

def test_listed():
    pytest.skip("needs Atari ROMs")

@pytest.mark.xfail
def test_expected_failure():
    assert False
"""
MISSING = 'pytest.importorskip("no_such_extra")'


def run_alone(
    folder: Path, files: dict[str, str], *options: str, **variables: str
) -> tuple[int, str]:
    """Run test files under the repository's conftest; return exit code and output."""
    folder.mkdir(exist_ok=True)
    for name in ("conftest.py", "expected_skips.txt"):
        shutil.copy(TESTS / name, folder)
    shutil.copytree(TESTS / "support", folder / "support")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text("import pytest\n" + text)
    process = run_python(
        *("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, *options),
        *("-Wignore", "--rootdir", folder, folder),
        env={**os.environ, "CI": "", "MARL_COLLECT_TEST_PRELOAD": "torch", **variables},
        timeout=500.0,
    )
    return process.returncode, process.stdout


DRAWS = """
import os
import random
import numpy as np
import torch

DRAWS = []


def draw():
    unseeded = np.random.default_rng().random()
    return random.random(), np.random.random(), unseeded, torch.rand(()).item()


def test_draws():
    DRAWS.append(draw())
    assert set(draw()).isdisjoint(DRAWS[0])


def test_draws_the_same():
    assert draw() == DRAWS[0]


def test_is_not_a_rank_of_a_job():
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}.isdisjoint(os.environ)
"""


def test_unlisted_skips_fail_a_run_of_ci_and_draws_repeat(tmp_path: Path) -> None:
    rank = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"), "1")
    files = {"skips": SKIPS, "missing": MISSING, "draws": DRAWS}
    code, output = run_alone(tmp_path, files, CI="true", **rank)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "3 passed, 3 skipped, 1 xfailed" in output, output
    _, _, unexpected = output.partition("unexpected skips")
    found = re.findall(r"^  (?:.*/)?test_(\w+)\.py", unexpected, re.MULTILINE)
    assert found == ["missing", "skips"]
    assert "not today" in unexpected


PROCESSES = """
import multiprocessing
import os
import pty
import subprocess
import threading

@pytest.mark.parametrize("start", [
    lambda: subprocess.run(["true"]),
    lambda: os.fork() or os._exit(0),
    lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    lambda: os.system("true"),
    lambda: os.posix_spawn("/bin/true", ["true"], {}),
    lambda: pty.fork()[0] or os._exit(0),
    lambda: threading.Thread(target=subprocess.run, args=(["true"],)).start(),
])
def test_starts(start):
    start()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()

@pytest.fixture
def leaves():
    yield
    subprocess.run(["true"])

def test_passes_before_it(leaves):
    pass

def test_needs_none():
    pass
"""


def test_fast_runs_what_starts_no_process_and_processes_the_rest(
    tmp_path: Path,
) -> None:
    mark = "@pytest.mark.processes\n"
    marked = PROCESSES.replace("@pytest.mark.param", f"{mark}@pytest.mark.param")
    marked = marked.replace("def test_passes", f"{mark}def test_passes")
    whole = PROCESSES + "\npytestmark = [pytest.mark.x, pytest.mark.processes]\n"
    files = {"unmarked": PROCESSES, "marked": marked, "whole": whole}
    code, output = run_alone(tmp_path / "fast", files, "--fast", CI="true")
    assert code == pytest.ExitCode.TESTS_FAILED
    # Of `whole` nothing is imported.
    assert "10 passed, 8 deselected, 8 errors" in output, output
    assert "starts a process: mark it @pytest.mark" in output
    options = ("--processes", "--collect-only", "-q")
    _, output = run_alone(tmp_path / "slow", files, *options, CI="true")
    for file, count in (("marked", 8), ("whole", 9), ("unmarked", 0)):
        assert len(re.findall(rf"test_{file}\.py::", output)) == count
    assert "needs_none" not in output.partition("test_whole")[0]


def test_every_test_of_the_rooms_of_processes_counts_as_one() -> None:
    """Their files are not even imported by ``--fast``."""
    assert all(any((TESTS / room).glob("test_*.py")) for room in ROOMS)


FORKS = """
import os
import sys
import types

pytest_plugins = ["support.ray_cluster"]
PID = os.environ.setdefault("PID_WITH_RAY", str(os.getpid()))
ray = sys.modules.setdefault("ray", types.ModuleType("ray"))
connected = lambda: os.getpid() == int(PID)
ray.is_initialized = connected

@pytest.fixture(scope="session")
def cluster():
    yield
    ray.is_initialized = lambda: False

def fork():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def test_forks_it():
    fork()

@pytest.mark.forks
def test_forks_another():
    fork()
    assert os.getpid() != int(PID)

@pytest.mark.forks
def test_fails_in_another():
    assert os.getpid() == int(PID)

def test_disconnects(cluster):
    ray.is_initialized = lambda: False

def test_is_the_last(cluster):
    ray.is_initialized = connected
"""


def test_a_process_with_ray_is_neither_forked_nor_disconnected(tmp_path: Path) -> None:
    _, output = run_alone(tmp_path, {"it": FORKS, "missing": MISSING}, "-n0", "-rA")
    lines = re.findall(r"^([A-Z]+) \S+::test_(\w+)", output, re.MULTILINE)
    assert sorted(lines) == [
        ("ERROR", "disconnects"),
        ("ERROR", "forks_it"),
        ("FAILED", "fails_in_another"),
        ("PASSED", "disconnects"),
        ("PASSED", "forks_another"),
        ("PASSED", "forks_it"),
        ("PASSED", "is_the_last"),
    ], output
    assert "mark the test `forks`" in output
    assert "each later test would start its own" in output
    assert ", in fork\n" in output
    assert "unexpected skips" not in output  # A missing extra only skips without CI.
