"""Where CI is set, an unlisted skip fails the run; --fast starts no process."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.scripts import run_python

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
    shutil.copytree(TESTS / "support", folder / "support")
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
    )


@pytest.mark.parametrize("case", ["unlisted", "missing_extra"])
def test_an_unlisted_skip_fails_a_run_where_ci_is_set(
    case: str, tmp_path: Path
) -> None:
    run = run_alone(tmp_path, SKIPS[case], ci="true")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "unexpected skips" in run.stdout


@pytest.mark.parametrize("case", ["listed", "expected_failure"])
def test_listed_skips_and_expected_failures_pass(case: str, tmp_path: Path) -> None:
    run = run_alone(tmp_path, SKIPS[case], ci="true")
    assert run.returncode == pytest.ExitCode.OK, run.stdout


def test_without_ci_a_missing_extra_only_skips(tmp_path: Path) -> None:
    run = run_alone(tmp_path, SKIPS["missing_extra"], ci="")
    assert run.returncode == pytest.ExitCode.OK, run.stdout


PROCESSES = """
import multiprocessing
import os
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

def test_starts_it_in_a_thread():
    thread = threading.Thread(target=subprocess.run, args=(COMMAND,))
    thread.start()
    thread.join()

def test_needs_none():
    assert not STARTED.exists()
"""


@pytest.mark.parametrize("options", [[], ["-n1"]])
def test_fast_runs_what_starts_no_process_and_starts_none(
    options: list[str], tmp_path: Path
) -> None:
    run = run_alone(tmp_path, PROCESSES, "true", "--fast", *options)
    assert run.returncode == pytest.ExitCode.OK, run.stdout + run.stderr
    assert re.search(r" 3 passed,( \d+ warnings?,)? 8 starts a process", run.stdout)
    assert not (tmp_path / "started").exists()


def test_fast_hides_no_failure_of_what_starts_no_process(tmp_path: Path) -> None:
    body = PROCESSES + "\ndef test_fails():\n    assert False\n"
    run = run_alone(tmp_path, body, "true", "--fast")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    counts = r"1 failed, 3 passed,( \d+ warnings?,)? 8 starts a process"
    assert re.search(counts, run.stdout)
