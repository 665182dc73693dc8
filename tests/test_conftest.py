"""Unlisted skips fail where CI is set; --fast starts no process; draws repeat."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processless import ROOMS
from support.scripts import run_python

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
]  # Each starts a test run, or two.
TESTS = Path(__file__).parent
SKIPS = {
    "unlisted": "def test_it():\n    pytest.skip('not today')\n",
    "missing_extra": "pytest.importorskip('no_such_extra')\n",
    "listed": "def test_it():\n    pytest.skip('needs Atari ROMs')\n",
    "expected_failure": "@pytest.mark.xfail\ndef test_it():\n    assert False\n",
}


def run_alone(
    folder: Path, body: str, ci: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run one test file under the repository's conftest, in another process."""
    for name in ("conftest.py", "expected_skips.txt"):
        shutil.copy(TESTS / name, folder)
    shutil.copytree(TESTS / "support", folder / "support", dirs_exist_ok=True)
    passing = "import pytest\n\ndef test_passes():\n    pass\n\n"
    (folder / "test_other.py").write_text(passing)
    (folder / "test_sample.py").write_text("import pytest\n" + body)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    return run_python(
        *command,
        *options,
        "--rootdir",
        folder,
        folder,
        env={**os.environ, "CI": ci},
        timeout=500.0,
    )


def test_unlisted_skips_fail_a_run_where_ci_is_set(tmp_path: Path) -> None:
    for number, case in enumerate(("unlisted", "missing_extra")):
        (tmp_path / f"test_{number}.py").write_text("import pytest\n" + SKIPS[case])
    process = run_alone(tmp_path, SKIPS["expected_failure"], ci="true")
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    _, _, unexpected = process.stdout.partition("unexpected skips")
    assert re.findall(r"^  .*test_(\d)\.py", unexpected, re.MULTILINE) == ["1", "0"]


def test_listed_skips_and_expected_failures_pass(tmp_path: Path) -> None:
    body = SKIPS["listed"] + SKIPS["expected_failure"].replace("test_it", "test_that")
    process = run_alone(tmp_path, body, ci="true")
    assert process.returncode == pytest.ExitCode.OK, process.stdout
    assert "1 skipped, 1 xfailed" in process.stdout


def test_without_ci_a_missing_extra_only_skips(tmp_path: Path) -> None:
    process = run_alone(tmp_path, SKIPS["missing_extra"], ci="")
    assert process.returncode == pytest.ExitCode.OK, process.stdout


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


def test_draws_are_the_same_in_every_test_and_none_is_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(variable, "1")
    process = run_alone(tmp_path, DRAWS, ci="")
    assert process.returncode == pytest.ExitCode.OK, process.stdout


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

def test_forks():
    if os.fork() == 0:
        os._exit(0)

def test_spawns():
    multiprocessing.get_context("spawn").Process(target=print).start()

def test_asks_a_shell():
    os.system("true")

def test_opens_a_terminal():
    if pty.fork()[0] == 0:
        os._exit(0)

def test_replaces_this_one():
    os.execvp(COMMAND[0], COMMAND)

def test_starts_it_in_a_thread():
    thread = threading.Thread(target=subprocess.run, args=(COMMAND,))
    thread.start()
    thread.join()

def test_needs_none():
    assert not STARTED.exists()
"""


def test_fast_fails_with_unmarked_tests_that_start_a_process(tmp_path: Path) -> None:
    process = run_alone(tmp_path, PROCESSES, "true", "--fast", "-W", "ignore")
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "8 failed, 3 passed, 3 errors" in process.stdout
    assert "test_forks starts a process: mark it @pytest.mark" in process.stdout
    assert not (tmp_path / "started").exists()


def test_fast_leaves_out_what_is_marked_and_processes_runs_it(tmp_path: Path) -> None:
    body = re.sub(
        r"^def test_(?!needs_none|fails\()",
        "@pytest.mark.processes\ndef test_",
        PROCESSES + "\ndef test_fails():\n    assert False\n",
        flags=re.MULTILINE,
    )
    process = run_alone(tmp_path, body, "true", "--fast", "-W", "ignore")
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 2 passed, 11 deselected" in process.stdout
    assert not (tmp_path / "started").exists()
    collect = ("--collect-only", "-q", "-W", "ignore")
    process = run_alone(tmp_path, body, "true", "--processes", *collect)
    names = set(re.findall(r"::test_(\w+)", process.stdout))
    assert len(names) == 11
    assert names.isdisjoint({"passes", "needs_none", "fails"})
    whole = PROCESSES + "\npytestmark = [pytest.mark.x, pytest.mark.processes]\n"
    process = run_alone(tmp_path, whole, "true", "--fast", *collect)
    assert re.findall(r"::test_(\w+)", process.stdout) == ["passes"]


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
    process = run_alone(tmp_path, FORKS, "", "-n0", "-rA")
    lines = re.findall(r"^([A-Z]+) \S+::test_(\w+)", process.stdout, re.MULTILINE)
    assert sorted(lines) == [
        ("ERROR", "disconnects"),
        ("ERROR", "forks_it"),
        ("FAILED", "fails_in_another"),
        ("PASSED", "disconnects"),
        ("PASSED", "forks_another"),
        ("PASSED", "forks_it"),
        ("PASSED", "is_the_last"),
        ("PASSED", "passes"),
    ], process.stdout
    assert "mark the test `forks`" in process.stdout
    assert "each later test would start its own" in process.stdout
    assert ", in fork\n" in process.stdout
