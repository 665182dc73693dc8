"""Runs of ``marl-collect compare`` as what other commands play: task and settings."""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from marl_collect.cli.policies import MLP, RANDOM
from marl_collect.cli.tasks import is_own, is_task, parse_settings


@dataclass(frozen=True)
class Play:
    """What a command plays.

    Attributes:
        task: name of the task.
        env_kwargs: keyword arguments of the environment.
        policy: as for ``PolicyRequest``.
        max_frames_per_traj: limit of an episode; None for the environment's own.
    """

    task: str
    env_kwargs: dict[str, Any]
    policy: str
    max_frames_per_traj: int | None


def what_to_play(
    task: str,
    policy: str | None,
    env: list[str] | None,
    max_frames_per_traj: int | None,
    *,
    default: str,
) -> Play:
    """Return what a command plays, with the settings of a run where there is one.

    Args:
        task: name of a task, or the folder of a run. A folder with the name of a task
            is given as ``./NAME``.
        policy: as for ``PolicyRequest``; None is the run's, or the default. With the
            policy of a run of the same task, the run's settings apply.
        env: settings that replace the run's, as ``KEY=VALUE``.
        max_frames_per_traj: replaces the run's; None leaves it.
        default: policy without a run.

    Raises:
        ValueError: if a setting has no value, or the folder's configuration is damaged.
        FileNotFoundError: if the folder has no run, or several.
    """
    settings = parse_settings(env or [])
    config = None
    if not is_own(task) and Path(task).is_dir() and not is_task(task):
        config = _config(Path(task))
        policy, task = policy or task, config["task"]
    elif policy not in (None, MLP, RANDOM) and Path(policy).exists():
        run_config = _config_of(Path(policy))
        config = run_config if run_config and run_config["task"] == task else None
    if config is not None:
        settings = config["env_kwargs"] | settings
        limit = config["options"].get("max_frames_per_traj")
        max_frames_per_traj = max_frames_per_traj or limit
    return Play(task, settings, policy or default, max_frames_per_traj)


def _config_of(policy: Path) -> dict[str, Any] | None:
    """Return the configuration of the run that a policy is of; None without a run."""
    if policy.is_dir():
        return _config(policy)
    if policy.parent.name == "checkpoints":  # RUN/checkpoints/last.pt
        return _config(policy.parent.parent)
    return None


def _config(folder: Path) -> dict[str, Any]:
    saved = import_module("marl_collect.models.saved_policy")
    path = saved.policy_file(folder).parent.parent / saved.CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
        config["task"], config["env_kwargs"], config["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}.") from error
    checked: dict[str, Any] = config
    return checked
