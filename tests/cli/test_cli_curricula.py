"""Commands tell environments the tasks of a curriculum of the user's."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from marl_collect import open_dataset
from marl_collect.cli.main import app

pytestmark = pytest.mark.processes

STAIRS = """
import numpy as np
from support.zoo import Script, ScriptedEnv


def make(render_mode=None):
    env = ScriptedEnv(Script(max_cycles=1), render_mode)
    begin = env.reset

    def reset(seed=None, options=None):
        if options:
            env.script = Script(max_cycles=options["height"])
        return begin(seed)

    def render():
        return np.full((8, 8, 3), 20 * env.script.max_cycles + env.steps, np.uint8)

    env.reset, env.render = reset, render
    return env


def tasks(seed, episode, level):
    return {"height": 2 + level}


def short(seed):
    return {}


number = 3
"""
LEARNS = ("--curriculum", "stairs:tasks")


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stairs.py").write_text(STAIRS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    # The first test of a process imports it; no folder but that of a run may appear.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    return result.exit_code, " ".join(result.output.split())


def collected(level: int) -> Any:
    size = ("--episodes", "3", "--workers", "1", "--seed", "0", "--out", "data")
    code, text = run("collect", "stairs:make", *LEARNS, "--level", str(level), *size)
    assert code == 0, text
    return open_dataset("data")


def test_a_dataset_has_the_levels() -> None:
    dataset = collected(3)
    assert dataset.trajectories.lengths.tolist() == [5] * 3
    assert (dataset.transitions[:]["collector", "level"] == 3).all()


def test_episodes_of_a_level_are_played() -> None:
    level = (*LEARNS, "--level", "2", "--episodes", "1")
    code, text = run("play", "stairs:make", *level)
    assert code == 0, text
    assert re.search(r"│ 0 │ 4 │", text), text


def test_episodes_of_a_level_are_rendered() -> None:
    imageio = pytest.importorskip("imageio.v2", reason="needs the extra video")
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    options = ("--level", "4", "--episodes", "2", "--no-overlay", "--out", "stairs.gif")
    code, text = run("render", "stairs:make", *LEARNS, *options)
    assert code == 0, text
    pictures = [int(p.max()) for p in imageio.mimread("stairs.gif", memtest=False)]
    assert pictures == [120 + at for at in range(7)] * 2


def test_recorded_episodes_are_drawn_with_their_tasks() -> None:
    collected(1)
    save = ("data", "--save", "x.html", "--task", "stairs:make")
    code, text = run("view", *save, *LEARNS, "--episode", "1")
    assert code == 0, text
    page = Path("x.html").read_text()
    (saved,) = re.findall(r'<script id="saved"[^>]*>(.*?)</script>', page, re.DOTALL)
    pictures = [request for request in json.loads(saved) if "picture" in request]
    assert len(pictures) == 3
    code, text = run("view", *save)
    assert code == 2
    assert "data was recorded with a curriculum" in text
    assert "add --curriculum MODULE:FUNCTION" in text
    code, text = run("view", "data", "--save", "x.html")
    assert code == 0, text
    assert "add --curriculum MODULE:FUNCTION" in Path("x.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--level", "2"], "--level 2 is that of a curriculum: add --curriculum"),
        (["--curriculum", "stairs:none"], "has no attribute 'none'"),
        (["--curriculum", "tasks"], "tasks must be module:name of a callable"),
        (["--curriculum", ":tasks"], ":tasks must be module:name of a callable"),
        (["--curriculum", "stairs:number"], "callable, but is 3"),
        (["--curriculum", "stairs:short"], "must take three arguments"),
    ],
)
@pytest.mark.parametrize("command", ["collect", "play", "render"])
def test_bad_curricula_refused(command: str, options: list[str], message: str) -> None:
    code, text = run(command, "workloads.counting:CountingEnv", *options)
    assert code == 2
    assert message in text
    assert sorted(path.name for path in Path().iterdir()) == ["stairs.py"]


def test_data_without_levels_are_drawn_without_a_curriculum() -> None:
    size = ("--episodes", "1", "--out", "data")
    code, text = run("collect", "workloads.counting:CountingEnv", *size)
    assert code == 0, text
    code, text = run("view", "data", "--save", "x.html", *LEARNS)
    assert code == 2
    assert "data was recorded without a curriculum: omit --curriculum" in text
