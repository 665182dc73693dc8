"""Commands tell environments the tasks of a curriculum of the user's."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import error_of, output_of

from marl_collect import open_dataset

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


"""
LEARNS = ("--curriculum", "stairs:tasks")


@pytest.fixture(autouse=True)
def own_module(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "stairs.py").write_text(STAIRS)
    monkeypatch.syspath_prepend(here)
    # The first test of a process imports it; no folder but that of a run may appear.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def collected(level: int) -> Any:
    size = ("--episodes", "3", "--workers", "1", "--seed", "0", "--out", "data")
    output_of("collect", "stairs:make", *LEARNS, "--level", str(level), *size)
    return open_dataset("data")


def test_a_dataset_has_the_levels() -> None:
    dataset = collected(3)
    assert dataset.trajectories.lengths.tolist() == [5] * 3
    assert (dataset.transitions[:]["collector", "level"] == 3).all()


def test_episodes_of_a_level_are_played() -> None:
    level = (*LEARNS, "--level", "2", "--episodes", "1")
    text = output_of("play", "stairs:make", *level)
    assert re.search(" 0 4 ", text), text


def test_episodes_of_a_level_are_rendered() -> None:
    imageio = pytest.importorskip("imageio.v2", reason="needs the extra video")
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra video")
    options = ("--level", "4", "--episodes", "2", "--no-overlay", "--out", "stairs.gif")
    output_of("render", "stairs:make", *LEARNS, *options)
    pictures = [int(p.max()) for p in imageio.mimread("stairs.gif", memtest=False)]
    assert pictures == [120 + at for at in range(7)] * 2


def test_recorded_episodes_are_drawn_with_their_tasks() -> None:
    collected(1)
    save = ("data", "--save", "x.html", "--task", "stairs:make")
    text = output_of("view", *save, *LEARNS, "--episode", "1")
    page = Path("x.html").read_text()
    (saved,) = re.findall(r'<script id="saved"[^>]*>(.*?)</script>', page, re.DOTALL)
    pictures = [request for request in json.loads(saved) if "picture" in request]
    assert len(pictures) == 3
    text = error_of("view", *save)
    assert "data was recorded with a curriculum" in text
    assert "add --curriculum MODULE:FUNCTION" in text
    text = output_of("view", "data", "--save", "x.html")
    assert "add --curriculum MODULE:FUNCTION" in Path("x.html").read_text()


def test_data_without_levels_are_drawn_without_a_curriculum() -> None:
    size = ("--episodes", "1", "--out", "data")
    text = output_of("collect", "workloads.counting:CountingEnv", *size)
    text = error_of("view", "data", "--save", "x.html", *LEARNS)
    assert "data was recorded without a curriculum: omit --curriculum" in text
