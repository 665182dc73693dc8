"""``marl-collect compare --jobs`` trains runs side by side, each in its process."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import output_of, run
from support.processes import wait_until
from support.runs import SHORT, flags
from support.scripts import Program, start_python

pytest.importorskip("matplotlib")

from marl_collect.files.locks import LOCK
from marl_collect.training.run_folder import RunFolder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TASK = "workloads.counting:CountingEnv"
RUNS = ("ippo-local-shared/seed_0", "ippo-local-shared/seed_1")
SMALL = [
    *("compare", TASK, "--setup", "ippo-local-shared", "--seeds", "2"),
    *("--workers=1", "--env=n_prey=0", *flags(SHORT | {"ppo.epochs": 1})),
]
SLOW: Any = {"seconds": 300.0}
LONG: Any = {"timeout": 300.0}
ENDLESS = ["--frames", "100000000", "--set", "eval_interval=40"]


def start(out: Path, *arguments: str) -> Program:
    """Start the command in a session of its own."""
    return start_python(
        *("-m", "marl_collect.cli.main", *SMALL, "--jobs", "2", "--out", str(out)),
        *arguments,
    )


def has_checkpoint(run: Path) -> bool:
    return (run / "checkpoints" / "last.pt").exists()


def process_of(run: Path) -> psutil.Process | None:
    """Return the process that trains a run: it has opened the run's lock."""
    lock = str((run / LOCK).resolve())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == lock for file in process.open_files()):
                return process
    return None


def shorten(run: Path, frames: int) -> None:
    """Change a run's configuration, as if it had been started with fewer frames."""
    folder = RunFolder(run)
    config = folder.read_json("config.json")
    config["options"]["frames"] = frames
    folder.write_json("config.json", config)


def test_runs_side_by_side_have_the_same_results(tmp_path: Path) -> None:
    rows = {}
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        text = output_of(*SMALL, "--jobs", jobs, "--frames", 80, "--out", out)
        assert (out / "report.md").exists()
        for name in RUNS:
            rows[jobs, name] = [
                {k: v for k, v in row.items() if not k.startswith("seconds")}
                for row in RunFolder(out / name).rows()
            ]
            assert RunFolder(out / name).read_json("result.json")["frames"] == 80
        log = (out / "progress.log").read_text()
    for name in RUNS:
        assert rows[1, name] == rows[2, name] != []
    # Each line names its run.
    for seed in (0, 1):
        line = f"ippo-local-shared, seed {seed}: 80 frames: return "
        assert log.count(line) == text.count(line) == 1


def test_one_signal_saves_all_runs_and_resume_continues_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with start(out, *ENDLESS) as command:
        wait_until(lambda: all(has_checkpoint(out / name) for name in RUNS), **SLOW)
        first, second = (process_of(out / name) for name in RUNS)
        assert first
        assert second
        assert len({first.pid, second.pid, command.pid}) == 3
        os.kill(command.pid, signal.SIGINT)  # Only the command, not its group.
        _, errors = command.communicate(**LONG)
        assert command.returncode == 130
        assert "Traceback" not in errors
        assert "Interrupted: the runs are in" in errors
        assert errors.count("finishing this batch, then saving") == 1
        wait_until(lambda: not (first.is_running() or second.is_running()))
    saved = {}
    for name in RUNS:
        saved[name] = len(RunFolder(out / name).rows())
        shorten(out / name, 40 * saved[name] + 80)
    frames = max(saved.values()) * 40 + 80
    for name in RUNS:
        shorten(out / name, frames)
    more = ["--frames", frames, "--resume", "--set=eval_interval=40"]
    text = output_of(*SMALL, "--jobs", 2, "--out", out, *more)
    assert ": 0 frames: return" not in text
    for name in RUNS:
        assert len(RunFolder(out / name).rows()) == frames // 40


def test_a_run_whose_process_is_killed_does_not_stop_the_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    frames = ["--frames", "2000", "--set", "eval_interval=400"]
    with start(out, *frames) as command:
        wait_until(lambda: process_of(out / RUNS[1]) is not None, **SLOW)
        victim = process_of(out / RUNS[1])
        assert victim
        victim.kill()
        _, errors = command.communicate(**LONG)
    assert command.returncode == 1
    assert "killed by SIGKILL" in errors
    assert "error: 1 of 2 runs ended early" in errors
    assert [(out / name / "result.json").exists() for name in RUNS] == [True, False]


def test_an_error_of_the_environment_is_told_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_of_jobs.py").write_text(
        "from workloads.counting import CountingEnv, Fault\n"
        "def failing():\n"
        "    return CountingEnv(n_prey=0, fault=Fault('raise', 'step', at=30))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [word for word in SMALL if word != "--env=n_prey=0"]
    words[1] = "failing_of_jobs:failing"
    words += ["--jobs", "2", "--frames", "80", "--out", str(tmp_path / "out")]
    code, text = run(*words)
    assert code == 1, text
    for seed in (0, 1):
        assert f"seed {seed}: CountingError: fault in step" in text
    assert "Traceback" not in text
    log = (tmp_path / "out" / "progress.log").read_text()
    assert log.count("raise CountingError") >= 2


@pytest.mark.parametrize("jobs", [1, 2])
def test_reports_that_cannot_be_written_stop_no_run(jobs: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "report.md").mkdir(parents=True)
    code, text = run(*SMALL, "--jobs", jobs, "--frames", "80", "--out", out)
    assert code, text
    assert "report.md" in text
    assert all((out / name / "result.json").exists() for name in RUNS)
