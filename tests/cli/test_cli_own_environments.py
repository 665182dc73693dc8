"""Commands take the wrapper's keywords for classes of users, as for their own tasks."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from marl_collect import open_dataset
from marl_collect.cli.main import app

pytestmark = pytest.mark.processes

TASK = "own_environment:Mine"
MODULE = """
from pettingzoo import ParallelEnv
from support.zoo import Script, ScriptedEnv


class Mine(ParallelEnv):
    metadata = {"name": "mine_v0"}

    def __init__(self):
        ends = {"agent_1": (3, "terminated")}
        self.inner = ScriptedEnv(Script(ends=ends, max_cycles=6))
        self.possible_agents = self.inner.possible_agents

    @property
    def agents(self):
        return self.inner.agents

    def observation_space(self, agent):
        return self.inner.observation_space(agent)

    def action_space(self, agent):
        return self.inner.action_space(agent)

    def reset(self, seed=None, options=None):
        return self.inner.reset(seed=seed)

    def step(self, actions):
        return self.inner.step(actions)
"""
KEYWORDS = {
    "done_on_any": "false",
    "group_map": "all_in_one_group",
    "agent_ids": "true",
}
GIVEN = [part for item in KEYWORDS.items() for part in ("--env", "=".join(item))]


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_environment.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, *GIVEN], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_info_shows_what_the_keywords_change() -> None:
    text = run("info", TASK)
    assert "as soon as all agents are done" in text
    assert "Box [6]" in text  # Three numbers, and the identity of one of three.


def test_collect_records_whole_episodes(tmp_path: Path) -> None:
    size = ("--frames", "24", "--policy", "random", "--seed", "0")
    run("collect", TASK, *size, "--out", str(tmp_path / "data"))
    dataset: Any = open_dataset(tmp_path / "data")
    assert dataset.trajectories.lengths.tolist() == [6] * 4
