"""Task provider of MeltingPot: an entry point of ``marl_collect.tasks``."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from marl_collect.envs.common import defaults_of
from marl_collect.envs.errors import UnknownTaskError
from marl_collect.errors import MissingPackageError, install_command

_FAMILY = "meltingpot"


def packages() -> tuple[str, ...]:
    """Return the distributions whose versions determine the data."""
    return ("dm-meltingpot", "dmlab2d")


def available_tasks() -> dict[str, str]:
    """Map ``"meltingpot/<name>"`` to the command that completes it, if any.

    Substrates come first, then scenarios.
    """
    if importlib.util.find_spec(_FAMILY) is None:
        return {f"{_FAMILY}/...": install_command(_FAMILY)}
    from marl_collect.envs.meltingpot.imports import meltingpot_modules
    from marl_collect.envs.meltingpot.settings import (
        INSTALL_BOTS,
        lacks_bots,
        scenarios,
        substrates,
    )

    command = f"{INSTALL_BOTS} (downloads the bots)"
    with meltingpot_modules():  # Once, instead of for each scenario.
        return {f"{_FAMILY}/{name}": "" for name in substrates()} | {
            f"{_FAMILY}/{name}": command if lacks_bots(name) else ""
            for name in scenarios()
        }


def find_task(task: str) -> Callable[..., Any]:
    """Return a callable that builds the environment of a substrate or scenario.

    Raises:
        UnknownTaskError: if MeltingPot has no substrate or scenario of this name.
        MissingPackageError: if MeltingPot is missing; names the extra to install.
    """
    family, _, name = task.rpartition("/")
    if family not in ("", _FAMILY):
        raise UnknownTaskError
    if importlib.util.find_spec(_FAMILY) is None:
        if family:
            raise MissingPackageError(f"{task} needs: {install_command(_FAMILY)}")
        raise UnknownTaskError
    from marl_collect.envs.meltingpot.settings import scenarios, substrates

    if name not in substrates() and name not in scenarios():
        raise UnknownTaskError
    return partial(_build, name)


def settings(task: str) -> dict[str, Any]:
    """Return the keyword arguments of ``MeltingpotEnv`` and their defaults."""
    from marl_collect.envs.meltingpot.env import MeltingpotEnv

    del task  # They are the same for every substrate.
    return defaults_of(MeltingpotEnv)


def _build(name: str, **kwargs: Any) -> Any:
    from marl_collect.envs.meltingpot.env import MeltingpotEnv

    return MeltingpotEnv(name, **kwargs)
