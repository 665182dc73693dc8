"""Training runs: short ones, and ones that stop."""

import json
from typing import Any

from marl_collect.training.options import TrainingOptions
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
