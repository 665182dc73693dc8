"""Checkpoints are saved after signals and in time, whole, and resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scripts import run_python
from workloads.counting import CountingEnv

from marl_collect import MultiSyncCollector
from marl_collect.files.log_file import LOG
from marl_collect.training.checkpoint import Checkpoint
from marl_collect.training.run_folder import LAST

pytestmark = pytest.mark.processes


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


@pytest.mark.parametrize("part", [3, torch.ones(1), (1, 2), lambda: None])
def test_a_part_that_cannot_be_saved_is_an_error_before_training(
    part: Any, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="'best' cannot be saved.* put it into one"):
        Checkpoint(tmp_path, {"rows": [], "best": part})


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
    assert (tmp_path / LOG).read_text().count("after the loop: [8, 16]\n") == 2


def test_a_batch_that_is_done_is_saved_when_it_is_time_and_after_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, last = ["of the first batch"], tmp_path / LAST
    with pytest.raises(SystemExit), Checkpoint(tmp_path, {"rows": rows}) as saved:  # noqa: PT012
        saved.batch_done()
        assert not last.exists()
        with monkeypatch.context() as patch:
            patch.setattr("marl_collect.training.checkpoint.SAVE_SECONDS", 0.0)
            saved.batch_done()
        assert last.exists()
        rows[:] = ["after a signal"]
        os.kill(os.getpid(), signal.SIGINT)
        saved.batch_done()
    restored: list[str] = []
    with Checkpoint(tmp_path, {"rows": restored}, resume=True):
        assert restored == ["after a signal"]


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
