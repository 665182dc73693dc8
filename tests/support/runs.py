"""Folders of training runs, written without training."""

from pathlib import Path
from typing import Any

from marl_collect.training.run_folder import RunFolder


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
