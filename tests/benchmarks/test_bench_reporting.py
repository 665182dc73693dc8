"""Reports of a run: verdicts, the README's table, and the report."""

import itertools
import json
import sys
from pathlib import Path

import pytest
from bench_tools import BENCHMARKS, EVERYTHING, ROOT, made_up
from experiments.headline import OURS, OURS_PARALLEL
from experiments.plan import plan
from harness.results import load
from peers import install
from peers.installed import installed, pythons
from reporting.reading import Reading
from reporting.readme import between_marks, readme_table
from reporting.targets import TARGETS, judge
from support.scripts import run_python

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
    results["experiments"]["headline/free/mlp"] |= {
        "status": "failed",
        "reason": "a\nb",
    }
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
