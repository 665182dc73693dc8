"""The page of published results: its statistics, its rule, and what is missing."""

import math
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reproduce
from reproduce import Cell, agrees, cell_of, mean_interval, page

from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.results import Run

CELL = Cell(
    task="matrix/climbing",
    setup="qmix-local-shared-ids",
    frames=100,
    seconds=9.0,
    returns=[[0.0, 4.0, 1.0], [2.0, 6.0, 9.0]],
)


def a_run(seed: int, returns: list[float], **changes: object) -> Run:
    records = [
        EvaluationRecord(frames, 2, [2 * value], [25])
        for frames, value in enumerate(returns)
    ]
    seconds = {"collecting": 1.0, "training": 2.0}
    last = records[-1]
    setup = "qmix-local-shared-ids"
    run = Run("matrix/climbing", setup, seed, {}, records, last, last, {}, seconds)
    return replace(run, **changes)  # type: ignore[arg-type]


def test_maximum_is_of_one_evaluation_and_average_over_all() -> None:
    # The means over seeds are 1, 5 and 5; of equal ones, the wider interval.
    assert CELL.maximum == mean_interval([1.0, 9.0])
    lucky = replace(CELL, returns=[[99.0, 4.0, 1.0], [99.0, 6.0, 9.0]])
    assert lucky.maximum == CELL.maximum, "untrained weights are never best"
    assert CELL.average[0] == pytest.approx((5 / 3 + 17 / 3) / 2)


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_the_interval_covers_the_mean_in_95_of_100_draws(seeds: int) -> None:
    draws = np.random.default_rng(0).normal(3.0, 2.0, (4000, seeds))
    intervals = [mean_interval(draw) for draw in draws.tolist()]
    covered = sum(abs(mean - 3.0) <= half for mean, half in intervals)
    assert abs(covered / len(draws) - 0.95) < 0.02


def test_a_reference_agrees_within_the_interval_or_one_percent() -> None:
    assert agrees((10.0, 2.0), 12.0)
    assert not agrees((10.0, 2.0), 12.1)
    assert agrees((125.0, 0.0), 126.0)
    assert not agrees((125.0, 0.0), 127.0)
    assert agrees((-100.0, 0.0), -100.5)
    assert not agrees((math.nan, 0.0), 1.0)


def test_a_cell_has_the_returns_of_an_agent_in_matrix_games() -> None:
    slow = {"collecting": 4.0, "training": 3.0}
    runs = [a_run(0, [1.0, 2.0]), a_run(1, [3.0, 5.0], seconds=slow)]
    assert cell_of(runs) == Cell(
        "matrix/climbing", "qmix-local-shared-ids", 1, 5.0, [[1.0, 2.0], [3.0, 5.0]]
    )
    foraging = [replace(run, task="lbforaging/10x10-3p-3f") for run in runs]
    assert cell_of(foraging).returns == [[2.0, 4.0], [6.0, 10.0]]
    for other in (a_run(2, [1.0, 2.0], best=None), a_run(2, [1.0])):
        with pytest.raises(ValueError, match="must be finished, with equal frames"):
            cell_of([*runs, other])


def test_the_page_names_what_agrees_and_what_is_missing() -> None:
    same = replace(CELL, returns=[[125.0] * 2] * 2)
    text = page([same])
    assert "| 125.00 ± 0.00 | 125.00 ± 0.00 | 100 | 9 | - | 125.00: agrees |" in text
    assert "125.00: differs" in page([replace(same, returns=[[275.0] * 2] * 2)])
    assert "- `matrix/climbing`: iql, vdn, ippo, mappo, ia2c, maa2c\n" in text
    assert text.count("\n- `") == len({task for task, _ in reproduce.CELLS})


def test_cells_that_are_not_finished_are_trained_until_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, commands = {"matrix-climbing-ia2c": 3}, []

    def train(command: list[str], **_: Any) -> Any:
        folder = Path(command[command.index("--out") + 1])
        commands.append((folder.name, command[5:]))
        return SimpleNamespace(returncode=codes.get(folder.name, 0))

    begun = tmp_path / "matrix-climbing-qmix" / "config.json"
    begun.parent.mkdir()
    begun.touch()
    complete = {"matrix-climbing-vdn": reproduce.SEEDS, "matrix-climbing-qmix": 1}
    committed = tmp_path / "committed"
    committed.mkdir()
    (committed / "matrix-climbing-mappo.json").touch()
    monkeypatch.setattr(reproduce, "COMMITTED", committed)
    monkeypatch.setattr(reproduce, "RUNS", tmp_path)
    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(
        reproduce, "finished", lambda folder: [None] * complete.get(folder.name, 0)
    )
    assert reproduce.run_cells("climbing", jobs=2) == 3
    names = [name for name, _ in commands]
    assert names == [
        f"matrix-climbing-{name}" for name in ("iql", "qmix", "ippo", "ia2c")
    ]
    resumed = ["--resume" in command for _, command in commands]
    assert resumed == [False, True, False, False]
    frames = [command[command.index("--frames") + 1] for _, command in commands]
    assert frames == ["250000", "250000", "2500000", "2500000"]
    commands.clear()
    assert reproduce.run_cells("8x8-2p-2f-coop", jobs=1) == 0
    assert len(commands) == 3
    assert not any("--frames" in command for _, command in commands)


def test_the_page_has_the_frames_of_runs_on_matrix_games() -> None:
    text = page([])
    for task, algorithm in reproduce.CELLS:
        if task.startswith("matrix/"):
            frames = f"{reproduce.MATRIX_FRAMES[algorithm]:,} frames"
            assert algorithm in text.partition(frames)[2].partition(")")[0]


def test_the_committed_page_is_of_the_committed_cells() -> None:
    assert reproduce.PAGE.read_text() == page(reproduce.committed())
