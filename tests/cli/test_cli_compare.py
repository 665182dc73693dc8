"""``marl-collect compare`` writes folders, tables and a picture.

With ``--jobs``, it trains runs side by side, each in its process.
"""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from rich.console import Console
from support.commands import error_of, output_of, run
from support.packages import hide
from support.processes import SOON, wait_until
from support.runs import SHORT, flags
from support.scripts import Program, start_python

pytest.importorskip("matplotlib")

from workloads.counting import CountingEnv

from marl_collect import describe
from marl_collect.cli.training_progress import TrainingProgress
from marl_collect.files.locks import LOCK, FolderLock
from marl_collect.training import comparison, presets
from marl_collect.training.comparison import Comparison, check_settings, default_setups
from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.report import LEGEND
from marl_collect.training.run_folder import RunFolder
from marl_collect.training.trainer import Task

pytestmark = pytest.mark.processes

TASK = "workloads.counting:CountingEnv"
ONE_RUN = ["--frames=80", "--workers=1", "--jobs=1"]
SMALL = [*ONE_RUN, "--env=n_prey=0", *flags(SHORT)]
SMALL_PPO = [*SMALL, "--set=ppo.epochs=1"]
VALUE = flags({"value.warm_up_frames": 0, "value.frames_per_update": 20})
SMALL_VALUE = [*SMALL, *VALUE]
SMALL_ALL = [*SMALL_PPO, *VALUE]


def test_compare_writes_tables_a_picture_and_marl_eval_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Mock(wraps=comparison.write_report)
    monkeypatch.setattr(comparison, "write_report", reports)
    arguments = [
        *("compare", TASK, *SMALL_VALUE),
        *("--setup", "vdn-local-shared", "--seeds", "2"),
    ]
    text = output_of(*arguments, "--out", str(tmp_path))
    assert "vdn-local-shared, seed 0 (1/2) 0 frames: return " in text
    assert re.search(r"vdn-local-shared +2 +-?\d+\.\d+ +-?\d+\.\d+ +-?\d+\.\d+", text)
    page = (tmp_path / "report.md").read_text()
    assert "Return of random actions: team" in page
    assert "Return of random actions: team" in text
    assert page.endswith(LEGEND + "\n")
    assert len(re.findall(r"^\| vdn-local-shared \|", page, re.M)) == 3
    assert "| setup | seeds | best weights |" in page
    assert re.search(r"setup +seeds +weights +low +high +weights +actions", text)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    shared = json.loads((tmp_path / "marl_eval.json").read_text())
    seeds = shared["pettingzoo"][TASK]["vdn-local-shared"]
    assert set(seeds) == {"seed_0", "seed_1"}
    assert set(seeds["seed_1"]) == {"step_0", "step_1", "step_2", "absolute_metrics"}
    step = seeds["seed_1"]["step_2"]
    assert step["step_count"] == 80
    assert len(step["team_return"]) == len(step["mean_agent_return"]) == 2
    assert step["mean_agent_return"][0] == pytest.approx(step["team_return"][0] / 2)
    assert reports.call_count == 2  # After the first run, and in the end.
    assert run(*arguments, "--out", str(tmp_path), "--resume")[0] == 0
    assert reports.call_count == 3  # No run had anything to train.
    text = output_of("compare", "--report", str(tmp_path))
    assert (tmp_path / "report.md").read_text() == page
    text = error_of(*arguments, "--out", str(tmp_path))
    assert "has runs already: add --resume" in text


def test_compare_trains_on_whole_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are those of the episodes, and evaluations are after so many frames.

    A run keeps the task's own keywords beside those of the command.
    """
    monkeypatch.setattr(presets, "ENV_KWARGS", {TASK: {"n_hunters": 3}})
    output_of(
        *("compare", TASK, *SMALL_PPO, "--set=ppo.episodes_per_batch=6"),
        *("--setup", "ippo-local-shared", "--seeds", "1", "--out", str(tmp_path)),
    )
    run_folder = tmp_path / "ippo-local-shared" / "seed_0"
    config = json.loads((run_folder / "config.json").read_text())
    assert config["env_kwargs"] == {"n_hunters": 3, "n_prey": 0}
    rows = RunFolder(run_folder).rows()
    assert [row["episodes"] for row in rows] == [6 * (k + 1) for k in range(len(rows))]
    assert len(rows) > 1
    frames = [row["frames"] for row in rows]
    for row in rows:  # All of them are among the last hundred.
        length = row["episode_length"] * row["episodes"]
        assert row["frames"] == pytest.approx(length)
    assert frames[-2] < 80 <= frames[-1]
    evaluations = json.loads((run_folder / "evaluations.json").read_text())
    first = min(number for number in frames if number >= 40)
    assert [e["frames"] for e in evaluations] == sorted({0, first, frames[-1]})


def start(*arguments: str) -> Program:
    """Start the command in a session of its own, as a terminal does."""
    return start_python("-m", "marl_collect.cli.main", "compare", TASK, *arguments)


def interrupt(command: Program) -> str:
    """Press Ctrl-C: the whole process group gets the signal."""
    os.killpg(command.pid, signal.SIGINT)
    _, errors = command.communicate(timeout=SOON)
    assert command.returncode == 130
    assert "Traceback" not in errors
    return errors


def test_ctrl_c_before_the_first_run_promises_nothing_to_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [*SMALL_PPO, "--setup", "mappo-local-shared", "--out", str(out)]
    # The first evaluation, of random actions, does not end.
    with start(*arguments, "--set", "final_episodes=100000000") as command:
        wait_until(lambda: command.poll() is not None or out.exists())
        errors = interrupt(command)
    assert errors == "Interrupted before the first run began.\n"


def test_the_display_shows_the_whole_comparison_at_80_columns(tmp_path: Path) -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    log = tmp_path / "progress.log"
    progress = TrainingProgress(console, runs=4, frames=4_000_000, log=log)
    setup = Setup.parse("mappo-centralised-shared-ids")
    row = {"return_team": -303.1, "loss_objective": 0.1, "loss_critic": 1e6}
    for seed in (0, 1):
        run = progress.begin(setup, seed, frames=1_000_000)
        run.evaluated(record := evaluation(0))
        run.progress(500_000, row)
        if seed == 0:
            run.finished()
    with console.capture() as captured:
        console.print(progress)
    first, second = captured.get().splitlines()
    assert first.startswith("1,500,000/4,000,000 frames")
    assert " left " in first
    assert second.startswith("mappo-centralised-shared-ids, seed 1 (2/4): 500,000 fra")
    assert len(second) <= 80
    assert record.frames == 0
    assert log.read_text().count("   0 frames: return 1.00 (team)") == 2


def test_without_a_live_display_a_line_a_minute_shows_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0
    clock = SimpleNamespace(monotonic=lambda: seconds)
    monkeypatch.setattr("marl_collect.cli.training_progress.time", clock)
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    log = tmp_path / "progress.log"
    progress = TrainingProgress(console, runs=1, frames=1000, log=log)
    run = progress.begin(Setup.parse("mappo-local-shared"), 0, frames=1000)
    with console.capture() as captured:
        for seconds in range(25, 200, 25):
            run.progress(seconds, {"return_team": 2.0})
    lines = ["  75 frames: return 2.0", "  150 frames: return 2.0"]
    assert captured.get().splitlines() == lines
    assert all(log.read_text().count(line) == 1 for line in lines)


def evaluation(frames: int) -> EvaluationRecord:
    return EvaluationRecord(frames, 2, [1.0], [3])


def test_the_default_setups_are_those_that_can_be_trained() -> None:
    names = {s.name for s in default_setups(describe(CountingEnv), TrainingOptions())}
    assert {n.split("-")[0] for n in names} == {"ippo", "mappo"}
    description = describe(partial(CountingEnv, n_prey=0))
    names = {s.name for s in default_setups(description, TrainingOptions())}
    assert "qmix-local-shared-ids" in names
    memory = TrainingOptions(recurrent="gru")
    names = {s.name for s in default_setups(description, memory)}
    assert {n.split("-")[0] for n in names} == {"ippo", "mappo", "vdn", "qmix"}


def test_the_settings_of_a_preset_are_printed_by_algorithm() -> None:
    text = output_of("compare", "--settings", "--preset", "epymarl")
    assert "setting ippo mappo ia2c maa2c iql vdn qmix " in text
    assert " value.epsilon_frames 200000 50000 50000 " in text
    assert " value.warm_up_frames 32 " in text
    assert " ppo.normalise_advantages " in text


def test_settings_need_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ("torchrl", "matplotlib", "mpe2", "pettingzoo", "meltingpot", "vmas")
    hide(monkeypatch, *absent)
    for task, rate in (
        ("simple_spread_v3", "0.0007"),
        ("meltingpot/coins", "0.0003"),
        ("vmas/balance", "0.0003"),
    ):
        text = output_of("compare", task, "--settings", "--frames", "4000")
        assert f"ppo.lr {rate} learning rate of Adam." in text
        assert "eval_interval 400 frames between evaluations." in text
        assert all(f"{name} " in text for name in TrainingOptions().settings())


EFFECTS = {
    "ippo-local-shared": (
        "value.tau=0.5 ppo.sequence_frames=4 ppo.popart=true",
        "ppo.lr=0.1",
    ),
    "vdn-local-shared": (
        "ppo.lr=0.1 reward=team value.mixing_cells=8 value.minibatch_episodes=8",
        "value.minibatch_frames=8 value.tau=0.1",
    ),
    "iql-local-shared": (
        "value.mixing_cells=8 hidden_size=8&num_cells=[]",
        "reward=team",
    ),
    "qmix-local-shared": (
        "value.noise=0.1",
        "value.mixing_cells=8 value.epsilon_end=0.1",
    ),
    "maddpg-local-shared": (
        "value.minibatch_episodes=8 value.epsilon_end=0.1 ppo.lr=0.1",
        "gamma=0.9 value.lr=0.1 value.noise=0.1 hidden_size=8&num_cells=[]",
    ),
    "maddpg-local-own": ("conv_dtype=bfloat16", ""),
    "maa2c-local-shared": ("ppo.clip_value=0.2", "ppo.episodes_per_batch=4"),
    "ippo-centralised-shared": ("hidden_size=8&num_cells=[]", "network=attention"),
    "mappo-local-shared": (
        "hidden_size=8 hidden_size=8&num_cells=[]&ppo.critic_num_cells=[8]",
        "network=attention hidden_size=8&ppo.critic_num_cells=[]",
    ),
    "vdn-centralised-shared": ("", "network=attention"),
    "vdn-local-shared qmix-local-shared": ("", "value.mixing_gain=1"),
    "vdn-local-shared mappo-local-shared": ("", "ppo.lr=0.1"),
    "vdn-local-shared iql-local-shared": ("ppo.episodes_per_batch=4", ""),
    "ippo-local-shared vdn-local-shared": ("hidden_size=8", ""),
    "ippo-local-shared qmix-local-shared": ("network=attention", ""),
}
"""Setups, settings that none of them reads, and settings that one of them does.

Further settings, after ``&``, decide whether the first one is read.
"""


@pytest.mark.parametrize("names", EFFECTS)
def test_a_setting_that_no_setup_reads_is_refused(names: str, tmp_path: Path) -> None:
    setups = [Setup.parse(name) for name in names.split()]
    task = Task(TASK, CountingEnv, CountingEnv().description, {})
    ignored, used = (settings.split() for settings in EFFECTS[names])
    for setting in (*ignored, *used):
        pairs = [pair.split("=") for pair in setting.split("&")]
        texts, name = ("reward", "network", "conv_dtype"), pairs[0][0]
        settings = {n: text if n in texts else json.loads(text) for n, text in pairs}
        options = TrainingOptions().with_settings(settings)
        comparison = Comparison(task, setups, [0], options, tmp_path)
        if setting in used:
            check_settings(comparison, [name])
            continue
        message = f"{name} has no effect on {', '.join(names.split())}: omit"
        with pytest.raises(ValueError, match=message):
            check_settings(comparison, [name])


def test_a_second_command_cannot_write_to_the_same_folder(tmp_path: Path) -> None:
    with FolderLock(tmp_path / ".lock"):
        code, text = run(
            "compare", TASK, *SMALL_ALL, "--seeds", "1", "--out", str(tmp_path)
        )
    assert code == 2
    assert "is being written to by another process" in re.sub(r"\s+", " ", text)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


ODD_TASKS = """
from marl_collect.envs import FrameStack, PettingZooEnv, PettingZooWrapper
from workloads.counting import CountingEnv, Fault
from workloads.pair import PairEnv


def failing():
    return CountingEnv(n_prey=0, fault=Fault("raise", "step", at=30))


def unseen():
    return PettingZooWrapper(PairEnv())


def stacked(max_cycles=5, render_mode=None):
    env = PettingZooEnv(
        "simple_spread_v3", max_cycles=max_cycles, render_mode=render_mode
    )
    return FrameStack(env, frames=2)
"""


@pytest.fixture
def odd_tasks(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the name of a module with tasks that fail, in the current folder."""
    (here / "odd_tasks_of_compare.py").write_text(ODD_TASKS)
    monkeypatch.syspath_prepend(str(here))
    yield "odd_tasks_of_compare"
    sys.modules.pop("odd_tasks_of_compare", None)


ONE = [*ONE_RUN, *flags(SHORT), "--set=ppo.epochs=1"]
ONE += ["--setup", "ippo-local-own", "--seeds", "1", "--out", "out"]


# imageio's reader leaves closing a pipe to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_wrapped_environment_is_compared_played_and_rendered(odd_tasks: Any) -> None:
    pytest.importorskip("mpe2", reason="needs the extra mpe")
    imageio = pytest.importorskip("imageio", reason="needs the extra video")
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    task = f"{odd_tasks}:stacked"
    text = output_of("compare", task, *ONE, "--env", "max_cycles=4", "--video")
    video = "out/ippo-local-own/seed_0/videos/best.mp4"
    pictures = imageio.mimread(video, memtest=False)
    assert len(pictures) == 5
    height, width = pictures[0].shape[:2]
    assert height > width  # The world is square; the text stands above it.
    # The task is typed, because a run folder must not choose code.
    played = [task, "--policy", "out/ippo-local-own/seed_0", "--env", "max_cycles=4"]
    text = output_of("play", *played, "--episodes=2")
    assert f"{task}: 2 episodes" in text
    text = output_of("render", *played, "--episodes=2", "--out", "played.mp4")
    assert "2 episodes, 10 pictures" in text
    pictures = imageio.mimread("played.mp4", memtest=False)
    assert len(pictures) == 2 * (4 + 1)


def test_environment_errors_have_the_worker_s_traceback_only(odd_tasks: Any) -> None:
    code, text = run("compare", f"{odd_tasks}:failing", *ONE)
    assert code == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert "error: CountingError: fault in step" in text
    assert "raise CountingError" in text


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path: Path) -> None:
    arguments = ["compare", TASK, *SMALL_ALL, "--set", "ppo.lr=1e30", "--seeds", "1"]
    arguments += ["--setup", "ippo-local-own", "--setup", "vdn-local-shared"]
    arguments += ["--out", str(tmp_path)]
    for options in [], ["--resume"]:
        code, text = run(*arguments, *options)
        assert code == 1, text
        assert " The gradient of ippo-local-own is NaN or infinite." in text
        assert "error: 1 of 2 runs ended early" in text
        assert "Traceback" not in text
        page = (tmp_path / "report.md").read_text()
        assert "appear in the curves only: 1 of 2." in page
        assert "| vdn-local-shared | 1 |" in page


def test_a_video_that_cannot_be_recorded_fails_before_training(odd_tasks: Any) -> None:
    pytest.importorskip("imageio", reason="needs the extra video")
    text = error_of("compare", f"{odd_tasks}:unseen", *ONE, "--video")
    assert "error: pair_v0 renders no picture" in text
    assert not Path("out").exists()


@pytest.mark.usefixtures("here")
def test_damaged_results_of_a_comparison_are_named() -> None:
    text = output_of("compare", TASK, *ONE, "--env", "n_prey=0")
    contents = {p: p.read_bytes() for p in Path("out").rglob("*.json")}
    folder = Path("out/ippo-local-own/seed_0")
    for path, content, message in (
        (Path("out/random.json"), b"{}", "random.json is damaged. Delete this file"),
        (Path("out/random.json"), b"", "random.json is damaged. Delete this file"),
        (folder / "result.json", b"{}", "is damaged: an entry of"),
        (folder / "evaluations.json", b"[]", "but no evaluations in evaluations.json"),
    ):
        for name, valid_content in contents.items():
            name.write_bytes(valid_content)
        path.write_bytes(content)
        text = error_of("compare", "--report", "out")
        assert f"error: {path if path.parent == Path('out') else folder}" in text
        assert message in text


TWO_RUNS = ["--setup", "ippo-local-shared", "--seeds", "2", "--workers=1"]
TWO_RUNS += ["--env=n_prey=0", *flags(SHORT | {"ppo.epochs": 1})]
RUNS = ("ippo-local-shared/seed_0", "ippo-local-shared/seed_1")
SLOW: Any = {"seconds": 300.0}
LONG: Any = {"timeout": 300.0}
ENDLESS = ["--frames", "100000000", "--set", "eval_interval=40"]


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


@pytest.mark.timeout(900)
def test_runs_side_by_side_have_the_same_results(tmp_path: Path) -> None:
    rows = {}
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        text = output_of(
            "compare", TASK, *TWO_RUNS, "--jobs", jobs, "--frames", 80, "--out", out
        )
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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_saves_all_runs_and_resume_continues_them(
    jobs: int, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in RUNS[:jobs]]
    arguments = [*TWO_RUNS, f"--seeds={jobs}", f"--jobs={jobs}", f"--out={tmp_path}"]
    with start(*arguments, *ENDLESS) as command:
        wait_until(lambda: all(map(has_checkpoint, folders)), **SLOW)
        trainers = {process_of(folder) for folder in folders}
        assert len(trainers - {None, psutil.Process(command.pid)}) == jobs - (jobs == 1)
        if jobs == 1:  # A terminal's Ctrl-C is for the whole group.
            os.killpg(command.pid, signal.SIGINT)
        else:
            os.kill(command.pid, signal.SIGINT)
        _, errors = command.communicate(**LONG)
        assert command.returncode == 130
        assert "Traceback" not in errors
        assert "Interrupted: the runs are in" in errors
        # A run in the command's own process needs no word.
        assert errors.count("finishing this batch, then saving") == jobs - 1
        wait_until(lambda: not any(trainer.is_running() for trainer in trainers))
    text = output_of("compare", "--report", tmp_path)
    assert f"appear in the curves only: {jobs} of {jobs}. To continue" in text
    frames = 40 * max(len(RunFolder(folder).rows()) for folder in folders) + 80
    for folder in folders:
        shorten(folder, frames)
    more = ["--frames", frames, "--resume", "--set=eval_interval=40"]
    text = output_of("compare", TASK, *arguments, *more)
    assert ": 0 frames: return" not in text
    for folder in folders:
        assert len(RunFolder(folder).rows()) == frames // 40
        assert RunFolder(folder).read_json("result.json")["frames"] == frames


@pytest.mark.timeout(900)
def test_a_run_whose_process_is_killed_does_not_stop_the_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    frames = ["--frames", "2000", "--set", "eval_interval=400"]
    with start(*TWO_RUNS, "--jobs=2", f"--out={out}", *frames) as command:
        wait_until(lambda: process_of(out / RUNS[1]) is not None, **SLOW)
        victim = process_of(out / RUNS[1])
        assert victim
        victim.kill()
        _, errors = command.communicate(**LONG)
    assert command.returncode == 1
    assert "killed by SIGKILL" in errors
    assert "error: 1 of 2 runs ended early" in errors
    assert [(out / name / "result.json").exists() for name in RUNS] == [True, False]


@pytest.mark.timeout(900)
def test_an_error_of_the_environment_is_told_for_each_run(odd_tasks: Any) -> None:
    words = [word for word in TWO_RUNS if word != "--env=n_prey=0"]
    more = ["--jobs", "2", "--frames", "80", "--out", "out"]
    code, text = run("compare", f"{odd_tasks}:failing", *words, *more)
    assert code == 1, text
    for seed in (0, 1):
        assert f"seed {seed}: CountingError: fault in step" in text
    assert "Traceback" not in text
    assert Path("out/progress.log").read_text().count("raise CountingError") >= 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("jobs", [1, 2])
def test_reports_that_cannot_be_written_stop_no_run(jobs: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "report.md").mkdir(parents=True)
    code, text = run(
        "compare", TASK, *TWO_RUNS, "--jobs", jobs, "--frames", "80", "--out", out
    )
    assert code, text
    assert "report.md" in text
    assert all((out / name / "result.json").exists() for name in RUNS)
