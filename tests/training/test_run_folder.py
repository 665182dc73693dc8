"""Files of a training run: rows, checkpoints, the lock, evaluations."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect.training import evaluating
from marl_collect.training.evaluating import evaluate_policy, evaluator_of
from marl_collect.training.options import TrainingOptions
from marl_collect.training.run_folder import EPISODES, RunFolder, read_json, read_rows


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for frames in (10, 20, 30):
        folder.add_row({"frames": frames, "loss": 0.5})
    folder.keep_rows(2)
    folder.add_row({"frames": 31, "loss": 1.0})
    assert [row["frames"] for row in folder.rows()] == [10, 20, 31]
    with pytest.raises(ValueError, match=r"progress.csv is damaged: .* 4 rows, .* 3\."):
        folder.keep_rows(4)
    folder.keep_rows(0)
    folder.add_row({"loss": 1.0})  # A run that begins again may have other columns.
    assert folder.rows() == [{"loss": 1.0}]


def test_an_incomplete_last_row_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_row({"frames": 10, "loss": 0.5})
    with (tmp_path / "progress.csv").open("a") as file:
        file.write("20")
    assert folder.rows() == [{"frames": 10, "loss": 0.5}]


def test_other_columns_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_row({"frames": 10})
    with pytest.raises(ValueError, match="has the columns"):
        folder.add_row({"frames": 10, "loss": 0.5})


def test_an_interrupted_write_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_checkpoint("checkpoints/last.pt", {"a": torch.ones(2), "b": {"c": 1}})
    leftover = tmp_path / "checkpoints" / ".last.pt.0123abcd.new"
    leftover.write_bytes(b"half")  # Killed here.
    state = folder.read_checkpoint("checkpoints/last.pt")
    assert torch.equal(state["a"], torch.ones(2))
    assert state["b"] == {"c": 1}
    assert folder.read_checkpoint("checkpoints/best.pt") is None


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    message = "run is being written to by another process"
    with folder.lock(), pytest.raises(BlockingIOError, match=message):
        folder.lock()
    folder.lock().close()


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


def test_reading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"collector": Trap()}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="last.pt is damaged, or holds no tensors"):
        RunFolder(tmp_path).read_checkpoint("last.pt")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: os.symlink("/dev/zero", p)])
@pytest.mark.parametrize("read", [read_json, read_rows])
def test_no_link_or_pipe_of_a_run_is_read(read: Any, make: Any, tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=r"(link|not a regular file).*a'"):
        read(tmp_path / "a")


class Returning:
    """An evaluator whose only episode has this return."""

    def __init__(self, value: float) -> None:
        self.value = value

    environments = 1

    def evaluate(self, episodes: Any, *, seeds: Any, first: Any) -> Any:
        del seeds
        assert episodes == first + 1
        return SimpleNamespace(
            episodes=[SimpleNamespace(returns={"agents": [self.value]})],
            team_returns=[self.value],
            lengths=[3],
        )


ONE = TrainingOptions().with_settings({"eval_episodes": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_an_error(value: Any, tmp_path: Path) -> None:
    evaluator: Any = Returning(value)
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="reward of agents in an evaluation is NaN"):
        evaluate_policy(evaluator, ONE, folder, {}, frames=0)
    evaluator = Returning(1.0)
    assert evaluate_policy(evaluator, ONE, folder, {}, frames=0).team == 1.0


@pytest.mark.processes
def test_evaluations_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = TrainingOptions().with_settings(
        {"eval_episodes": 9, "envs_per_worker": 2, "workers": 1}
    )
    folder, about = RunFolder(tmp_path), {"setup": "random"}
    monkeypatch.setattr(evaluating, "_NOTE_SECONDS", 0.0)
    with evaluator_of(None, CountingEnv, options) as evaluator:
        expected = evaluate_policy(evaluator, options, folder, about, frames=0)
        assert not (tmp_path / EPISODES).exists()
        played: list[int] = []
        evaluate = evaluator.evaluate

        def evaluate_or_stop(episodes: int, **keywords: Any) -> Any:
            played.append(keywords["first"])
            if len(played) == 3:
                raise KeyboardInterrupt
            return evaluate(episodes, **keywords)

        monkeypatch.setattr(evaluator, "evaluate", evaluate_or_stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate_policy(evaluator, options, folder, about, frames=0)
        assert played == [0, 2, 6]  # Slices grow while they are short.
        resumed = evaluate_policy(evaluator, options, folder, about, frames=0)
        assert played[3:] == [6, 8]
        assert resumed == expected
        folder.write_json(EPISODES, {"about": "another", "record": None})
        assert evaluate_policy(evaluator, options, folder, about, frames=0) == expected
