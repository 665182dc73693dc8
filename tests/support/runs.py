"""Training runs: short ones, ones that stop, and folders written without training."""

import json
from pathlib import Path
from typing import Any

from marl_collect.training.options import TrainingOptions
from marl_collect.training.run_folder import RunFolder
from marl_collect.training.trainer import Watcher

SHORT: dict[str, Any] = {
    "frames_per_batch": 40,
    "envs_per_worker": 2,
    "eval_interval": 40,
    "eval_episodes": 2,
    "final_episodes": 2,
    "num_cells": [8],
}
"""Settings of runs that take a second, which all algorithms read."""


def short(settings: dict[str, Any]) -> TrainingOptions:
    """Return the options of a run of two batches, changed by more settings."""
    few = {"frames": 80, "workers": 1} | SHORT
    return TrainingOptions().with_settings(few | settings)


def flags(settings: dict[str, Any]) -> list[str]:
    """Return the arguments of ``marl-collect compare`` with these settings."""
    return [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]


def evaluation(frames: int) -> dict[str, Any]:
    return {
        "frames": frames,
        "n_agents": 2,
        "team_returns": [frames / 10, frames / 20],
        "lengths": [25, 25],
    }


def write_run(
    comparison: Path, setup: str = "ippo", seed: int = 0, frames: int = 200
) -> RunFolder:
    """Write what a run of 400 frames has written after some of them."""
    run = RunFolder(comparison / setup / f"seed_{seed}")
    config = {
        "task": "<script>alert(1)</script>",
        "env_kwargs": {},
        "setup": setup,
        "seed": seed,
        "options": {"frames": 400},
    }
    run.write_json("config.json", config)
    for done in range(100, frames + 1, 100):
        run.add_row({"frames": done, "episodes": 4, "return_team": 1.5, "loss": 0.5})
    evaluated = range(0, frames + 1, 100)
    run.write_json("evaluations.json", [evaluation(at) for at in evaluated])
    return run


class StopError(Exception):
    """Raised in a run that ``StopAt`` ends."""


class StopAt(Watcher):
    """Ends a run after a batch was trained on: its checkpoint is older."""

    def __init__(self, frames: int) -> None:
        self.frames = frames

    def progress(self, frames: int, row: Any) -> None:
        if frames >= self.frames:
            raise StopError

    def failed(self, error: Any) -> None:
        raise AssertionError from error

    def interrupted(self) -> None:
        raise AssertionError
