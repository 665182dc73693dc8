"""What commands play: a task and a policy, which a run of ``compare`` may give."""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_collect.cli.consoles import user_errors
from marl_collect.cli.environment_errors import environment_errors
from marl_collect.cli.file_tasks import checked_task
from marl_collect.cli.policies import MLP, RANDOM, PolicyRequest
from marl_collect.cli.tasks import find_factory, is_own, is_task, parse_settings
from marl_collect.processes.launcher import COLLECTOR_MODULES, start_server

if TYPE_CHECKING:
    from marl_collect.core.description import EnvDescription


@dataclass(frozen=True)
class Play:
    """What a command plays.

    Attributes:
        task: name of the task.
        env_kwargs: keyword arguments of the environment.
        policy: that acts; its source has been checked.
        max_frames_per_traj: limit of an episode; None for the environment's own.
    """

    task: str
    env_kwargs: dict[str, Any]
    policy: PolicyRequest
    max_frames_per_traj: int | None


def what_to_play(
    task: str,
    policy: PolicyRequest,
    env: list[str] | None,
    max_frames_per_traj: int | None,
) -> Play:
    """Return what a command plays, with the settings of a run where there is one.

    Args:
        task: name of a task, or the folder of a run. A folder with the name of a task
            is given as ``./NAME``.
        policy: without a source it is the run's, or random. With the policy of a
            run of the same task, the run's settings apply.
        env: settings that replace the run's, as ``KEY=VALUE``. The run's are checked,
            and its task too, because its folder may come from anybody.
        max_frames_per_traj: replaces the run's; None leaves it.

    Raises:
        UntrustedTaskError: if the run names code, or a setting that is not safe.
        ValueError: if a setting has no value, the folder's configuration is damaged, or
            the policy's source or the task of a run with settings is unknown.
        ImportError: if the task of a run with settings needs a missing package.
        FileNotFoundError: if the folder has no run, or several.
    """
    settings = parse_settings(env or [])
    config, source = None, policy.source
    typed_task: str | None = task
    if not is_own(task) and Path(task).is_dir() and not is_task(task):
        config, typed_task = _config(Path(task)), None
        source = source or task
    elif source not in ("", MLP, RANDOM) and Path(source).exists():
        run_config = _config_of(Path(source))
        if run_config is not None and run_config.task == task:
            config = run_config
    if config is not None:
        task, settings = checked_task(
            str(config.path),
            config.task,
            config.env_kwargs,
            settings,
            typed_task=typed_task,
            how=lambda name: (
                f"pass {name} as TASK, with --policy {shlex.quote(source)}"
            ),
        )
        max_frames_per_traj = max_frames_per_traj or config.max_frames_per_traj
    policy = replace(policy, source=source or RANDOM)
    policy.check()
    return Play(task, settings, policy, max_frames_per_traj)


@contextmanager
def playing(
    task: str,
    policy: PolicyRequest,
    env: list[str] | None,
    max_frames_per_traj: int | None,
    *,
    pictures: bool = False,
) -> "Iterator[tuple[Play, Callable[[], Any], EnvDescription, Any]]":
    """Prepare what a command plays, and report errors of preparing and playing it.

    Args:
        task: as for ``what_to_play``, like the next three.
        policy: as for ``what_to_play``.
        env: settings of the environment.
        max_frames_per_traj: limit of an episode.
        pictures: as for ``find_factory``.

    Yields:
        What to play, the environment's factory and description, and the policy.

    Raises:
        typer.Exit: after an error, which has been printed.
    """
    with user_errors(ValueError, ImportError, OSError):
        play = what_to_play(task, policy, env, max_frames_per_traj)
        factory = find_factory(play.task, play.env_kwargs, pictures=pictures)
    start_server(COLLECTOR_MODULES)  # It imports torch while this process does.
    with environment_errors(play.task, play.env_kwargs):
        from marl_collect.parallel_env.describe import describe

        description = describe(factory)
        yield play, factory, description, play.policy.build(description)


@dataclass(frozen=True)
class _Config:
    """What the configuration of a run says; nobody has checked the task."""

    path: Path
    task: Any
    env_kwargs: Any
    max_frames_per_traj: int | None


def _config_of(policy: Path) -> _Config | None:
    """Return the configuration of the run that a policy is of; None without a run."""
    if policy.is_dir():
        return _config(policy)
    if policy.parent.name == "checkpoints":  # RUN/checkpoints/last.pt
        return _config(policy.parent.parent)
    return None


def _config(folder: Path) -> _Config:
    saved = import_module("marl_collect.models.saved_policy")
    path = saved.policy_file(folder).parent.parent / saved.CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
        limit = config["options"].get("max_frames_per_traj")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_frames_per_traj is {limit!r}")
        return _Config(path, config["task"], config["env_kwargs"], limit)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}.") from error
