"""Where CI is set, a skip that nobody agreed to fails the run."""

import os
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


def run_alone(folder: Path, body: str, ci: str) -> subprocess.CompletedProcess[str]:
    """Runs one test file under the repository's conftest, in another process."""
    for name in ("conftest.py", "expected_skips.txt"):
        shutil.copy(TESTS / name, folder)
    passing = "import pytest\n\ndef test_passes():\n    pass\n\n"
    (folder / "test_other.py").write_text(passing)
    (folder / "test_sample.py").write_text("import pytest\n" + body)
    options = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
    return run_python("-m", "pytest", *options, folder, env=os.environ | {"CI": ci})


@pytest.mark.parametrize("case", ["unlisted", "missing_extra"])
def test_an_unlisted_skip_fails_a_run_where_ci_is_set(case: str, tmp_path: Path):
    run = run_alone(tmp_path, SKIPS[case], ci="true")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert "unexpected skips" in run.stdout


@pytest.mark.parametrize("case", ["listed", "expected_failure"])
def test_listed_skips_and_expected_failures_pass(case: str, tmp_path: Path):
    run = run_alone(tmp_path, SKIPS[case], ci="true")
    assert run.returncode == pytest.ExitCode.OK, run.stdout


def test_without_ci_a_missing_extra_only_skips(tmp_path: Path):
    run = run_alone(tmp_path, SKIPS["missing_extra"], ci="")
    assert run.returncode == pytest.ExitCode.OK, run.stdout
