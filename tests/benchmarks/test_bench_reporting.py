"""Reports of a run: verdicts, the README's table, and the report."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reproduce
from bench_tools import BENCHMARKS, EVERYTHING, ROOT, made_up
from experiments.headline import OURS, OURS_PARALLEL
from experiments.plan import plan
from harness.results import load
from peers import install
from peers.installed import installed, pythons
from reporting.reading import Reading
from reporting.readme import between_marks, readme_table
from reporting.targets import TARGETS, judge
from reproduce import Cell, agrees, cell_of, mean_interval, page
from support.scripts import run_python

from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.results import Run

COMMITTED = BENCHMARKS / "results" / "committed.json"


LIMITS = {
    "direct loops against PufferLib": 6,
    "direct loops that meet at every step against PufferLib": 6,
    "ParallelEnv against loops that meet": 6,
    "CPU seconds of direct loops": 6,
    "direct loops against TorchRL": 4,
    "storing direct loops against direct": 5,
    "storing direct loops against stock": 5,
}
"""Ratios printed below the targets, and the number of lines of each."""


def test_every_target_is_measured_by_the_suite() -> None:
    verdicts = judge(Reading(made_up({})))
    assert [(v.target.title, v.reason) for v in verdicts if v.figure is None] == []
    assert len({v.target.title for v in verdicts}) == len(TARGETS)


def test_verdicts_use_the_median() -> None:
    fast = {v.target.title: v for v in judge(Reading(made_up({OURS: 50.0})))}
    slow = {v.target.title: v for v in judge(Reading(made_up({})))}
    title = "MultiSync against TorchRL's best: free, MLP"
    assert fast[title].word == "pass"
    assert fast[title].certain
    assert slow[title].word == "fail"
    best = "PufferLib's best, 0 us steps, workers: 1"
    cost = f"CPU seconds per frame of ParallelEnv, of {best}"
    dear = {v.target.title: v for v in judge(Reading(made_up({OURS_PARALLEL: 50.0})))}
    assert (dear[cost].word, slow[cost].word) == ("fail", "pass")


def test_a_target_that_was_not_measured_is_not_passed() -> None:
    results = made_up({OURS: 1000.0})
    failed = {"status": "failed", "reason": "a\nb"}
    results["experiments"]["headline/free/mlp"] |= failed
    entry = results["experiments"]["headline/multiwalker/random"]["systems"][OURS]
    entry |= {"windows": [], "error": "killed"}
    verdicts = {v.target.title: v for v in judge(Reading(results))}
    free = verdicts["MultiSync against TorchRL's best: free, MLP"]
    assert (free.word, free.passed) == ("not measured", False)
    assert free.reason == "headline/free/mlp failed: b"
    stock = verdicts["MultiSync, random, against stock loops: multiwalker"]
    assert stock.reason == "killed"


@pytest.mark.processes
def test_the_commands_print_targets_and_table(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(made_up({OURS: 2.0})))
    process = run_python(BENCHMARKS / "check_targets.py", path)
    assert process.returncode == 1
    assert f"of {len(TARGETS)} targets are passed" in process.stdout
    assert "fail" in process.stdout
    beside = [line for line in process.stdout.splitlines() if "no target" in line]
    storing = [line for line in beside if "loops that store" in line]
    assert len(storing) == 6
    assert all("2.00 (2.00 to 2.00)" in line for line in storing if "large" not in line)
    for phrase, count in LIMITS.items():
        limits = [line for line in beside if phrase in line]
        assert len(limits) == count
        assert all("1.00 (1.00 to 1.00)" in line for line in limits)
    document = tmp_path / "README.md"
    document.write_text("a\n<!-- benchmarks/report.py -->\nold\n<!-- end -->\nb\n")
    command = [BENCHMARKS / "report.py", path]
    chart = tmp_path / "chart.png"
    run_python(*command, "--readme", document, "--chart", chart, check=True)
    assert "| multiwalker_v9, mlp | 1.00 |" in between_marks(document.read_text())
    assert document.read_text().endswith("<!-- end -->\nb\n")
    assert chart.read_bytes().startswith(b"\x89PNG")
    nothing = run_python(*command)
    assert nothing.returncode == 2
    assert "pass --readme, --chart or both" in nothing.stderr


def test_systems_that_prefetch_are_paused_while_others_are_measured() -> None:
    for experiment in plan(EVERYTHING):
        grids = [list(grid.values()) for grid in experiment.candidates.values()]
        for system in [*experiment.systems.values(), *itertools.chain(*grids)]:
            if system.options.get("prefetch"):
                assert system.pause


def test_the_readme_has_the_table_of_the_committed_run() -> None:
    expected = readme_table(load(COMMITTED)) if COMMITTED.exists() else ""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert between_marks(readme) == expected


@pytest.mark.processes
def test_a_peer_that_cannot_be_installed_is_recorded_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "STEPS", ())
    monkeypatch.setattr(install, "CHECK", "import no_such_module_here")
    for minutes, reason in (
        ("0", "no end before the deadline"),
        ("5", "No module named 'no_such_module_here'"),
    ):
        arguments = ["install.py", "--at", str(tmp_path), "--minutes", minutes]
        monkeypatch.setattr(sys, "argv", arguments)
        install.main()
        assert reason in installed(tmp_path)["pufferlib"]["reason"]
        assert pythons(tmp_path) == {}


CELL = Cell(
    task="matrix/climbing",
    setup="qmix-local-shared-ids",
    frames=100,
    cpu_seconds=9.0,
    returns=[[0.0, 4.0, 1.0], [2.0, 6.0, 9.0]],
)


def a_run(seed: int, returns: list[float], **changes: object) -> Run:
    records = [
        EvaluationRecord(frames, 2, [2 * value], [25])
        for frames, value in enumerate(returns)
    ]
    last = records[-1]
    setup = "qmix-local-shared-ids"
    run = Run("matrix/climbing", setup, seed, {}, records, last, last, {}, {})
    return replace(run, **{"cpu_seconds": 3.0, **changes})  # type: ignore[arg-type]


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
    runs = [a_run(0, [1.0, 2.0]), a_run(1, [3.0, 5.0], cpu_seconds=7.0)]
    assert cell_of(runs) == Cell(
        "matrix/climbing", "qmix-local-shared-ids", 1, 5.0, [[1.0, 2.0], [3.0, 5.0]]
    )
    foraging = [replace(run, task="lbforaging/10x10-3p-3f") for run in runs]
    assert cell_of(foraging).returns == [[2.0, 4.0], [6.0, 10.0]]
    for other in (a_run(2, [1.0, 2.0], best=None), a_run(2, [1.0])):
        with pytest.raises(ValueError, match="must be finished, with equal frames"):
            cell_of([*runs, other])
    with pytest.raises(ValueError, match="train this cell anew"):
        cell_of([*runs, a_run(2, [1.0, 2.0], cpu_seconds=None)])


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
    algorithms = ("iql", "qmix", "ippo", "ia2c")
    assert names == [f"matrix-climbing-{name}" for name in algorithms]
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
