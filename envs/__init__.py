"""PettingZoo, MeltingPot and Lab2d environments, behind one contract.

Names are imported when they are used, and each only imports its own library.
"""

import importlib
from typing import TYPE_CHECKING

if __name__ != "marl_collect.envs":
    raise ImportError(
        f"Import marl_collect.envs, not {__name__}: it would exist twice."
    )

if TYPE_CHECKING:
    from marl_collect.envs.lab2d import Lab2dEnv as Lab2dEnv
    from marl_collect.envs.meltingpot import MeltingpotEnv as MeltingpotEnv
    from marl_collect.envs.meltingpot import MeltingpotWrapper as MeltingpotWrapper
    from marl_collect.envs.pettingzoo import PettingZooEnv as PettingZooEnv
    from marl_collect.envs.pettingzoo import PettingZooWrapper as PettingZooWrapper
    from marl_collect.envs.tasks import MissingPackageError as MissingPackageError
    from marl_collect.envs.tasks import UnknownTaskError as UnknownTaskError
    from marl_collect.envs.tasks import available_envs as available_envs

_HOMES = {
    "Lab2dEnv": "lab2d",
    "MeltingpotEnv": "meltingpot",
    "MeltingpotWrapper": "meltingpot",
    "PettingZooEnv": "pettingzoo",
    "PettingZooWrapper": "pettingzoo",
    "MissingPackageError": "tasks",
    "UnknownTaskError": "tasks",
    "available_envs": "tasks",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names above, once


def __getattr__(name: str) -> object:
    """Import what is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_HOMES)
