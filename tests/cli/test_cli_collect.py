"""``marl-collect collect``, mostly in a process of its own, with real signals."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import psutil
import pytest
from support.commands import error_of, output_of, run
from support.processes import SOON, left, wait_until
from support.scripts import Program, start_python
from support.stores import s3_server
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.storage import DatasetDescription, Writer, copy, open_dataset

pytestmark = pytest.mark.processes

COUNTING = "workloads.counting:CountingEnv"


def start(folder: Path, *arguments: str, interpreter: bool = False) -> Program:
    """Start the command in its own session, as a terminal does."""
    return start_python(
        *("-m", "marl_collect.cli.main", "collect", *arguments),
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"},
        interpreter=interpreter,
    )


def collect(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    with start(folder, *arguments) as command:
        out, err = command.communicate(timeout=SOON)
    wait_until(lambda: not left(command.pid))
    return subprocess.CompletedProcess(arguments, command.wait(), out, err)


def wait_for(command: Program, condition: Callable[[], bool]) -> None:
    """Wait until ``condition()`` is true, while the command runs."""
    while not condition():
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(0.02)


def interrupt(command: Program) -> str:
    """Press Ctrl-C: the whole process group gets the signal."""
    with command:
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate(timeout=SOON)
    assert out == ""
    wait_until(lambda: not left(command.pid))
    return re.sub(r"\s+", " ", err)


def test_collect_writes_multiwalker_data_and_prints_a_summary(tmp_path: Path) -> None:
    pytest.importorskip("Box2D", reason="needs the extra pettingzoo")
    options = ["--workers", "2", "--frames", "400", "--frames-per-batch", "200"]
    options += ["--seed", "3", "--policy", "mlp", "--centralised"]
    process = collect(tmp_path, "multiwalker_v9", *options)
    assert process.returncode == 0, process.stderr
    dataset = open_dataset(tmp_path / "runs" / "multiwalker_v9-1")
    frames = dataset.transitions[:]
    assert frames["walker", "observation"].shape == (400, 3, 31)
    assert frames["walker", "action"].shape == (400, 3, 4)
    assert frames["next", "walker", "reward"].any()
    (run,) = dataset.runs
    assert run.seed == 3
    assert run.policy["centralised"] is True
    episodes = dataset.trajectories
    output = re.sub(r"[\s│]+", " ", process.stdout)
    assert "frames 400" in output
    assert "frames/s" in output
    assert f"episodes {len(episodes)}" in output
    third = episodes.agent_returns["walker"].mean(0)[2]
    assert f"walker_2 {third:,.3f}" in output
    assert f"team sum {episodes.returns.mean():,.3f}" in output
    assert "runs/multiwalker_v9-1" in output


@pytest.mark.usefixtures("here")
def test_workers_do_not_change_data_and_a_second_run_appends() -> None:
    options = [COUNTING, "--frames", "40", "--policy", "random", "--quiet"]
    options += ["--frames-per-batch", "900"]
    spread = {"7": ["--envs-per-worker", "4"], "8": ["--workers", "4"]}
    for seed, workers in spread.items():
        more = (*workers, "--seed", seed, "--out", "d")
        assert output_of("collect", *options, *more) == "d "
    dataset = open_dataset("d")
    assert [run.seed for run in dataset.runs] == [7, 8]
    for seed, frames in zip(spread, dataset.transitions[:].split(40), strict=True):
        collector = Collector([CountingEnv] * 4, frames_per_batch=40, seed=int(seed))
        assert (frames == collector.next().reshape(-1)).all()


@pytest.mark.parametrize("amount", ["--frames", "--episodes"])
def test_the_speed_includes_the_end_of_writing(
    amount: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, close = 0.0, Writer.close

    def slow(writer: Writer) -> None:
        nonlocal now
        now += 100.0
        close(writer)

    clock = SimpleNamespace(perf_counter=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr("marl_collect.cli.collecting.time", clock)
    monkeypatch.setattr(Writer, "close", slow)
    out = tmp_path / "d"
    arguments = ["collect", COUNTING, amount, "40", "--policy", "random"]
    text = output_of(*arguments, "--out", out)
    assert f"frames/s {len(open_dataset(out)) / 100:,.0f}, writing" in text


def test_ctrl_c_keeps_complete_batches_and_prints_the_folder(tmp_path: Path) -> None:
    options = ["--frames", "100000000", "--frames-per-batch", "200", "--workers", "2"]
    command = start(tmp_path, COUNTING, *options, "--policy", "random", "--out", "d")
    wait_for(command, lambda: len(list((tmp_path / "d").glob("*.parquet"))) > 3)
    output = interrupt(command)
    assert command.returncode == 130
    dataset = open_dataset(tmp_path / "d")
    frames = len(dataset)
    assert frames % 200 == 0
    assert frames >= 800
    assert f"{frames:,} frames in complete batches are in d" in output
    names = [path.name for path in (tmp_path / "d").iterdir()]
    assert len([name for name in names if name.endswith(".parquet")]) == 1


SLOW = """
import pathlib, threading
def make():
    pathlib.Path("building").touch()
    threading.Event().wait()
"""


def test_ctrl_c_while_environments_are_built_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = start(tmp_path, "slow:make", "--out", "d")
    wait_for(command, (tmp_path / "building").exists)
    output = interrupt(command)
    assert command.returncode == 130
    assert "Interrupted: no batch was complete, so nothing was written." in output
    assert not (tmp_path / "d").exists()


def test_ctrl_c_while_libraries_are_loaded_leaves_nothing(tmp_path: Path) -> None:
    command = start(tmp_path, COUNTING, "--out", "d", interpreter=True)
    process = psutil.Process(command.pid)

    def loads_torch() -> bool:
        if COUNTING not in process.cmdline():  # Before exec, it is a copy of another.
            return False
        return any("torch" in mapped.path for mapped in process.memory_maps())

    wait_for(command, loads_torch)
    interrupt(command)
    assert command.returncode == 130
    assert not (tmp_path / "d").exists()


BREAKS = """
import os, shutil, threading
from glob import glob
from workloads.counting import CountingEnv

class Stuck(Exception):
    pass

def make():
    env = CountingEnv()
    steps = iter(range(25))
    step = env.step_row
    def step_row():
        if next(steps, None) is None:
            while os.path.exists("deleted") and len(glob("deleted/*.parquet")) < 2:
                threading.Event().wait(0.01)
            shutil.rmtree("deleted", ignore_errors=True)
            raise Stuck("the door is locked")
        step()
    object.__setattr__(env, "step_row", step_row)
    return env
"""


def test_environment_errors_are_reported_and_batches_kept(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    options = ["--frames", "100", "--frames-per-batch", "10", "--policy", "random"]
    process = collect(tmp_path, "breaks:make", *options, "--out", "d")
    assert process.returncode == 1
    assert "Stuck: the door is locked" in process.stderr
    assert "in step of environment 0" in process.stderr
    assert "20 frames in complete batches are in d" in process.stderr
    assert "Traceback (most recent call last)" in process.stderr  # of the worker
    assert "collecting.py" not in process.stderr  # none of the command
    assert len(open_dataset(tmp_path / "d")) == 20
    process = collect(tmp_path, "breaks:make", *options, "--out", "deleted")
    assert re.search(r"deleted is gone, to which \d+ frames were", process.stderr)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Environment variables of a local S3 server, which has the bucket ``bucket``."""
    with s3_server() as options:
        yield {
            "AWS_ENDPOINT_URL": options["endpoint_url"],
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
        }


@pytest.fixture
def _in_store(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.mark.usefixtures("_in_store")
def test_a_collection_is_copied_to_a_store(tmp_path: Path) -> None:
    url = "s3://bucket/collected"
    for number in (1, 2):
        result = collect(tmp_path, COUNTING, "--frames", "4000", "--out", url)
        assert result.returncode == 0, result.stderr
        folder = f"runs/workloads.counting-CountingEnv-{number}"
        assert f"Copying the last files to {url}" in result.stderr
        lines = [line.split() for line in result.stdout.splitlines()]
        assert ["written", "to", folder] in lines
        assert ["copied", "to", url] in lines
        local = open_dataset(tmp_path / folder)
        assert len(local) == 4000
    copied = open_dataset(url)
    assert len(copied) == 8000
    assert (copied.transitions[4000:] == local.transitions[:4000]).all()


@pytest.mark.usefixtures("_in_store")
def test_uncopied_files_stay(here: Path) -> None:
    options = ("--frames", "4000", "--out", "s3://later/d")
    code, text = run("collect", COUNTING, *options)
    folder = "runs/workloads.counting-CountingEnv-1"
    assert code == 1
    assert "Traceback" not in text
    assert "bucket does not exist Not everything could be copied." in text
    assert f"4,000 frames in complete batches are in {folder}." in text
    command = f"marl-collect copy {folder} s3://later/d"
    assert f"`{command}` copies what s3://later/d lacks." in text
    assert len(open_dataset(here / folder)) == 4000
    # The command does it, once there is a bucket.
    fsspec.filesystem("s3").mkdir("later")
    output_of(*command.split()[1:])
    assert len(open_dataset("s3://later/d")) == 4000


@pytest.mark.usefixtures("_in_store")
def test_a_store_that_is_not_suited_is_refused_at_once(here: Path) -> None:
    description = DatasetDescription("other", CountingEnv().description)
    with Writer(here / "other", description) as writer:
        writer.add(Collector(CountingEnv, frames_per_batch=20).next())
    copy(here / "other", "s3://bucket/other")
    for url, message in (
        ("s3://bucket/other", "s3://bucket/other holds a dataset of another kind"),
        ("nothing://x/y", "nothing://x/y cannot be read or written: .*Protocol not kn"),
    ):
        text = error_of("collect", COUNTING, "--out", url)
        assert re.search(f"error: {message}", text)
        assert not (here / "runs").exists()


@pytest.mark.usefixtures("_in_store")
def test_ctrl_c_names_the_command_that_copies(tmp_path: Path) -> None:
    url = "s3://bucket/stopped"

    def is_there() -> bool:
        try:
            return bool(fsspec.filesystem("s3").ls("bucket/stopped", refresh=True))
        except FileNotFoundError:
            return False

    with start(tmp_path, COUNTING, "--frames", "100000000", "--out", url) as command:
        wait_for(command, is_there)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=SOON)
    assert command.returncode == 130
    folder = "runs/workloads.counting-CountingEnv-1"
    assert f"`marl-collect copy {folder} {url}` copies what {url} lacks" in err
    frames = len(open_dataset(tmp_path / folder))
    assert 0 < len(open_dataset(url)) <= frames
    copy(tmp_path / folder, url)
    assert len(open_dataset(url)) == frames
