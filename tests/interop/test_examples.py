"""The scripts in `examples/` run, and the documentation shows how they differ."""

import re
from pathlib import Path

import pytest
from support.scripts import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PPO = ["--iterations", "1", "--frames", "100", "--epochs", "1", "--minibatch", "50"]


def run(script: str, *arguments: str, folder: Path) -> str:
    process = run_python("-W", "ignore", ROOT / script, *arguments, cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def shown(folder: Path) -> list[list[str]]:
    """Return the rows that ``marl-collect view`` has for the tables below a folder."""
    pytest.importorskip("matplotlib")
    from marl_collect.cli.viewer.runs import Runs

    runs = Runs(folder)
    about = runs.about()
    assert runs.figure(0, about["stamp"])
    rows: list[list[str]] = about["runs"]
    return rows


@pytest.mark.parametrize("name", ["multi_agent_ppo", "multi_agent_ppo_torchrl"])
def test_multi_agent_ppo_runs_in_both_forms(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    pytest.importorskip("mpe2")
    text = run(f"examples/{name}.py", *PPO, folder=tmp_path)
    assert re.search(r"iteration 0: mean return -\d+\.\d\d\n", text), text
    assert re.search(r"return of one episode: -\d+\.\d\d\n", text), text
    (row,) = shown(tmp_path)
    assert row[:2] == [f"runs/{name}", "0"]


def test_a_benchmarl_experiment_runs(tmp_path: Path) -> None:
    reason = "needs BenchMARL, which needs torchrl<0.12"
    pytest.importorskip("benchmarl", reason=reason)
    pytest.importorskip("mpe2")
    budget = ["--iterations", "1", "--frames", "2400", "--epochs", "1"]
    arguments = [*budget, "--folder", str(tmp_path)]
    text = run("examples/benchmarl_mappo.py", *arguments, folder=tmp_path)
    assert re.search(r"mean return: -?\d+", text), text
    (row,) = shown(tmp_path)
    assert row[1] == "2,400"


def test_the_documentation_shows_the_diffs_of_the_examples(tmp_path: Path) -> None:
    text = run("scripts/migration_diffs.py", "--check", folder=tmp_path)
    matches = re.findall(r"(\w+): (\d+) of \d+ lines removed, (\d+) added", text)
    assert {name for name, *_ in matches} == {"multi_agent_ppo"}
    assert all(int(removed) + int(added) < 30 for _, removed, added in matches)
