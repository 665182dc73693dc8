"""Task provider of Lab2d: an entry point of ``marl_collect.tasks``."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from marl_collect.envs.common import defaults_of
from marl_collect.envs.errors import UnknownTaskError
from marl_collect.errors import MissingPackageError, install_command

priority = -1
"""Below MeltingPot's: some of its substrates have the same names as levels."""

_FAMILY = "lab2d"


def packages() -> tuple[str, ...]:
    """Return the distributions whose versions determine the data."""
    return ("dmlab2d",)


def available_tasks() -> dict[str, str]:
    """Map each level, ``"lab2d/<level>"``, to the command that completes it, if any."""
    if importlib.util.find_spec("dmlab2d") is None:
        return {f"{_FAMILY}/...": install_command("dmlab2d")}
    return {f"{_FAMILY}/{level}": "" for level in _levels()}


def find_task(task: str) -> Callable[..., Any]:
    """Return a callable that builds the environment of ``task``.

    Raises:
        UnknownTaskError: if dmlab2d has no level of this name.
        MissingPackageError: if dmlab2d is missing; names the extra to install.
    """
    family, _, level = task.rpartition("/")
    if family == _FAMILY and importlib.util.find_spec("dmlab2d") is None:
        raise MissingPackageError(f"{task} needs: {install_command('dmlab2d')}")
    if family not in ("", _FAMILY) or level not in _levels():
        raise UnknownTaskError
    return partial(_build, level)


def settings(task: str) -> dict[str, Any]:
    """Return the keyword arguments of ``Lab2dEnv`` and their defaults."""
    from marl_collect.envs.lab2d.env import Lab2dEnv

    del task  # They are the same for every level.
    return defaults_of(Lab2dEnv)


def _build(level: str, **kwargs: Any) -> Any:
    from marl_collect.envs.lab2d.env import Lab2dEnv

    return Lab2dEnv(level, **kwargs)


def _levels() -> list[str]:
    """List dmlab2d's level folders: it has no function that lists its levels."""
    spec = importlib.util.find_spec("dmlab2d")
    folders = (spec.submodule_search_locations if spec else None) or []
    return sorted(
        path.parent.name
        for folder in folders
        for path in Path(folder, "lib", "game_scripts", "levels").glob("*/init.lua")
    )
