"""Training from pixels survives real signals, and goes on exactly."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import SOON
from support.scripts import Program, run_python, start_python
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector
from marl_collect.training.checkpoint import Checkpoint

pytestmark = pytest.mark.processes

LOOP = """
import sys
import time
from functools import partial

import torch

from marl_collect import MultiSyncCollector, describe
from marl_collect.models import make_policy
from marl_collect.training import checkpoint as module
from workloads.counting import CountingEnv

module.SAVE_SECONDS = 0.0  # Each batch takes longer.
make_env = partial(CountingEnv, n_prey=0, image=(32, 32, 3))
description = describe(make_env)
conv = {"num_cells": [4], "kernel_sizes": 8, "strides": 8}
torch.manual_seed(0)
policy = make_policy(description, num_cells=[8], conv=conv)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
rows = []
parts = {"policy": policy, "optimizer": optimizer, "rows": rows}
with (
    MultiSyncCollector(
        make_env, policy, frames_per_batch=40, total_frames=400, num_workers=1,
        envs_per_worker=2, seed=1,
    ) as collector,
    module.Checkpoint(
        sys.argv[1], parts | {"collector": collector}, resume="--resume" in sys.argv
    ) as checkpoint,
):
    for batch in collector:
        for index in torch.randperm(40).split(20):
            data = batch.reshape(-1)[index]
            log_prob = policy.get_dist(data).log_prob(data["hunter", "action"])
            reward = data["next", "hunter", "reward"].squeeze(-1)
            optimizer.zero_grad()
            (-(log_prob * (reward - 0.25)).mean()).backward()
            optimizer.step()
        collector.update_policy_weights_()
        rows.append((collector.frames, float(reward.mean())))
        checkpoint.print(f"{collector.frames} frames")
        if "--slow" in sys.argv and collector.frames >= 120:
            time.sleep(0.5)
        checkpoint.batch_done()
torch.save({"policy": policy.state_dict(), "rows": rows}, f"{sys.argv[1]}/result.pt")
"""


def started(folder: Path, *arguments: str) -> Program:
    (folder / "loop.py").write_text(LOOP)
    return start_python("loop.py", *arguments, cwd=folder, stderr=-2)


def output(program: Program) -> str:
    text, _ = program.communicate(timeout=SOON)
    return str(text)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Result of a loop that nothing stops."""
    folder = tmp_path_factory.mktemp("loop")
    with started(folder, "straight") as program:
        output(program)
    return torch.load(folder / "straight" / "result.pt")


@pytest.mark.xdist_group("straight")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_resumes_exactly(number: int, code: int, tmp_path: Path, straight: Any) -> None:
    with started(tmp_path, "stopped", "--slow") as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("120 frames"):
                break
        program.send_signal(number)
        text = output(program)
        assert program.returncode == code, text
        assert "Traceback" not in text
        if number != signal.SIGKILL:
            assert "To go on, begin with resume=True (--resume in the examples)" in text
    assert "120 frames\n" in (tmp_path / "stopped" / "progress.log").read_text()
    assert not (tmp_path / "stopped" / "result.pt").exists()
    with started(tmp_path, "stopped", "--resume") as program:
        text = output(program)
        assert f"Resumed {tmp_path / 'stopped/checkpoints/last.pt'}." in text
        assert "\n80 frames" not in text
    resumed = torch.load(tmp_path / "stopped" / "result.pt")
    assert straight["rows"] == resumed["rows"]
    for name, value in straight["policy"].items():
        assert torch.equal(value, resumed["policy"][name])


def test_parts_other_than_those_of_the_checkpoint_are_errors(tmp_path: Path) -> None:
    rows: list[Any] = [(1, torch.ones(2))]
    Checkpoint(tmp_path, {"rows": rows}).save()
    parts: Any = {"rows": [], "layer": torch.nn.Linear(1, 1)}
    larger = Checkpoint(tmp_path, parts, resume=True)
    with (
        pytest.raises(ValueError, match=r"has the parts \['rows'\], but .*\['layer'"),
        larger,
    ):
        raise AssertionError
    restored: list[Any] = [7]
    with Checkpoint(tmp_path, {"rows": restored}, resume=True):
        assert str(restored) == str(rows)
    damaged = tmp_path / "checkpoints" / "last.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with (
        pytest.raises(ValueError, match="damaged"),
        Checkpoint(tmp_path, {"rows": []}, resume=True),
    ):
        raise AssertionError


def test_a_signal_after_the_last_batch_saves_and_ends_the_program(
    tmp_path: Path,
) -> None:
    rows: list[str] = []

    def loop() -> None:
        with Checkpoint(tmp_path, {"rows": rows}) as checkpoint:
            checkpoint.batch_done()
            os.kill(os.getpid(), signal.SIGINT)
            rows.append("the end of the block")

    with pytest.raises(SystemExit) as ended:
        loop()
    assert ended.value.code == 128 + signal.SIGINT
    restored: list[str] = []
    with Checkpoint(tmp_path, {"rows": restored}, resume=True):
        assert restored == ["the end of the block"]


def test_a_signal_after_the_loop_ends_the_program_all_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop() -> None:
        rows: list[int] = []
        with (
            MultiSyncCollector(
                CountingEnv, frames_per_batch=8, total_frames=16
            ) as collector,
            Checkpoint(
                tmp_path, {"rows": rows, "collector": collector}, resume=True
            ) as checkpoint,
        ):
            for _ in collector:
                rows.append(collector.frames)
                checkpoint.batch_done()
            os.kill(os.getpid(), signal.SIGTERM)
            checkpoint.print(f"after the loop: {rows}")

    for saved in (False, True):
        with pytest.raises(SystemExit) as ended:
            loop()
        assert ended.value.code == 128 + signal.SIGTERM
        printed = capsys.readouterr().out
        assert ("Resumed " in printed) == saved
        assert "after the loop: [8, 16]\n" in printed


@pytest.mark.parametrize("value", [np.float64(1.5), np.zeros(2), Path("a")])
def test_what_cannot_be_read_again_is_not_written(value: Any, tmp_path: Path) -> None:
    rows: list[Any] = [{"return": 1.0}]
    with Checkpoint(tmp_path, {"rows": rows}) as checkpoint:
        checkpoint.save()
        before = (tmp_path / "checkpoints" / "last.pt").read_bytes()
        rows.append({"return": value})
        with pytest.raises(TypeError, match="parts / rows / 1 / return is of type"):
            checkpoint.save()
    assert (tmp_path / "checkpoints" / "last.pt").read_bytes() == before


def test_a_change_of_the_working_directory_does_not_move_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = Checkpoint("run", {"rows": [1]})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    saved.save()
    rows: list[int] = []
    with Checkpoint(tmp_path / "run", {"rows": rows}, resume=True):
        assert rows == [1]


FAULTS = """
import resource, sys
import torch
from marl_collect.training.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(25_000_000)  # 100 MB, above every dynamic threshold of glibc.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
assert keep_freed_memory()
first = faults()
print(before, first, faults())
"""


def test_large_tensors_reuse_the_pages_of_freed_ones() -> None:
    process = run_python("-c", FAULTS, check=True, interpreter=True)
    before, _first, after = map(int, process.stdout.split())
    assert before > 1_000  # Otherwise the page size or the C library is another.
    assert after < before / 2  # A freed block may be split once.
