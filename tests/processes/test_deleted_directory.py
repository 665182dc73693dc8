"""Workers start where the trainer's working directory has been deleted."""

from pathlib import Path

from support.scripts import run_python

SCRIPT = """
import os
import tempfile

from marl_collect import MultiSyncCollector
from workloads.counting import CountingEnv

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    with MultiSyncCollector([CountingEnv] * 2, None, frames_per_batch=20) as collector:
        print(tuple(collector.next().shape))
"""


def test_workers_start_in_a_deleted_working_directory(tmp_path: Path) -> None:
    script = tmp_path / "collects.py"
    script.write_text(SCRIPT, encoding="utf-8")
    result = run_python(script, interpreter=True)
    assert result.stdout.strip() == "(2, 10)", result.stderr
