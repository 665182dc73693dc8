"""Unlisted skips fail where CI is set; --fast starts no process; draws repeat."""

import os
import re
import shutil
from pathlib import Path

import pytest
from support.processless import ROOMS
from support.scripts import run_python

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
]  # Each starts a test run.
TESTS = Path(__file__).parent
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
import re
import subprocess
import sys
import threading
from pathlib import Path

STARTED = Path(__file__).with_name("started")
COMMAND = [sys.executable, "-c", f"open({str(STARTED)!r}, 'w')"]


@pytest.fixture(scope="module")
def shared():
    subprocess.run(COMMAND)


@pytest.fixture
def leaves():
    yield
    subprocess.run(COMMAND)


def test_uses_it_first(shared):
    pass

def test_uses_it_again(shared):
    pass

def test_passes_before_it(leaves):
    pass

def test_hides_it():
    with pytest.raises(BaseException):
        subprocess.run(COMMAND)

def test_fails_after_it():
    try:
        os.posix_spawn(sys.executable, COMMAND, {})
    except BaseException:
        pass
    assert False

@pytest.mark.parametrize("start", [
    lambda: os.fork() or os._exit(0),
    lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    lambda: os.system("true"),
    lambda: pty.fork()[0] or os._exit(0),
    lambda: os.execvp(COMMAND[0], COMMAND),
])
def test_starts(start):
    start()

def test_starts_it_in_a_thread():
    thread = threading.Thread(target=subprocess.run, args=(COMMAND,))
    thread.start()
    thread.join()

def test_needs_none():
    assert not STARTED.exists()
"""


def test_fast_runs_what_starts_no_process_and_processes_the_rest(
    tmp_path: Path,
) -> None:
    marked = re.sub(
        r"^def test_(?!needs_none|fails\()",
        "@pytest.mark.processes\ndef test_",
        PROCESSES + "\ndef test_fails():\n    assert False\n",
        flags=re.MULTILINE,
    )
    whole = PROCESSES + "\npytestmark = [pytest.mark.x, pytest.mark.processes]\n"
    files = {"unmarked": PROCESSES, "marked": marked, "whole": whole}
    code, output = run_alone(tmp_path / "fast", files, "--fast", CI="true")
    assert code == pytest.ExitCode.TESTS_FAILED
    # Of `whole` nothing is imported.
    assert "9 failed, 3 passed, 11 deselected, 3 errors" in output, output
    assert "test_starts[<lambda>0] starts a process: mark it @pytest.mark" in output
    assert not (tmp_path / "fast" / "started").exists()
    options = ("--processes", "--collect-only", "-q")
    _, output = run_alone(tmp_path / "slow", files, *options, CI="true")
    names = set(re.findall(r"test_marked\.py::test_(\S+)", output))
    assert len(names) == 11
    assert names.isdisjoint({"needs_none", "fails"})
    assert len(re.findall(r"test_whole\.py::", output)) == 12
    assert "test_unmarked.py" not in output


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
