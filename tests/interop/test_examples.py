"""The scripts in `examples/` run, and the documentation shows how they differ."""

import csv
import re
from difflib import unified_diff
from pathlib import Path

import pytest
from support.scripts import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PPO = ["--iterations", "1", "--frames", "100", "--epochs", "1", "--minibatch", "50"]


def run(script: str, *arguments: str, folder: Path) -> str:
    process = run_python("-Wignore", ROOT / script, *arguments, cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("name", ["multi_agent_ppo", "multi_agent_ppo_torchrl"])
def test_multi_agent_ppo_runs_in_both_forms(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    pytest.importorskip("mpe2")
    text = run(f"examples/{name}.py", *PPO, folder=tmp_path)
    assert re.search(r"iteration 0: mean return -\d+\.\d\d\n", text), text
    assert re.search(r"return of one episode: -\d+\.\d\d\n", text), text


def test_a_benchmarl_experiment_runs(tmp_path: Path) -> None:
    reason = "needs BenchMARL, which needs torchrl<0.12"
    pytest.importorskip("benchmarl", reason=reason)
    pytest.importorskip("mpe2")
    budget = ["--iterations", "1", "--frames", "2400", "--epochs", "1"]
    arguments = [*budget, "--out", str(tmp_path)]
    text = run("examples/benchmarl_mappo.py", *arguments, folder=tmp_path)
    assert re.search(r"mean return: -?\d+", text), text
    (path,) = tmp_path.rglob("progress.csv")
    with path.open() as file:
        rows = list(csv.reader(file))
    assert float(rows[-1][0]) == 2400


def test_the_documentation_shows_what_a_torchrl_script_changes() -> None:
    theirs, ours = (
        (ROOT / "examples" / f"multi_agent_ppo{end}.py").read_text("utf-8")
        for end in ("_torchrl", "")
    )
    codes = [text.partition('"""\n\n')[2].splitlines() for text in (theirs, ours)]
    lines = list(unified_diff(codes[0], codes[1], n=0, lineterm=""))[2:]
    expected = [re.sub("^@@.*", "@@", line) for line in lines if line[1:].strip()]
    page = (ROOT / "docs" / "coming_from_torchrl.md").read_text("utf-8")
    (shown_diff,) = re.findall(r"```diff\n(@@.*?)```", page, re.DOTALL)
    assert shown_diff.splitlines() == expected
    removed, added = (sum(line[0] == sign for line in expected) for sign in "-+")
    total = sum(bool(line.strip()) for line in codes[0])
    assert f"{removed} of {total} lines removed, {added} added:" in page
    assert removed + added < 30
