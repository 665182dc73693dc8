"""Environments of other libraries as ``MultiAgentEnv``.

Each name is imported on first use and loads only its own library.
"""

from typing import TYPE_CHECKING

from marl_collect import lazy

if __name__ != "marl_collect.envs":
    raise ImportError(
        f"Import marl_collect.envs, not {__name__}: it would exist twice."
    )

if TYPE_CHECKING:
    from marl_collect.envs.agent_lists import AgentLists as AgentLists
    from marl_collect.envs.family import UnknownTaskError as UnknownTaskError
    from marl_collect.envs.frame_stack import FrameStack as FrameStack
    from marl_collect.envs.gymnasium_vector import (
        GymnasiumVectorEnv as GymnasiumVectorEnv,
    )
    from marl_collect.envs.jaxmarl.env import JaxMarlEnv as JaxMarlEnv
    from marl_collect.envs.lab2d.env import Lab2dEnv as Lab2dEnv
    from marl_collect.envs.lbforaging.env import LbForagingEnv as LbForagingEnv
    from marl_collect.envs.mamujoco.env import MamujocoEnv as MamujocoEnv
    from marl_collect.envs.matrix.env import MatrixGameEnv as MatrixGameEnv
    from marl_collect.envs.meltingpot.env import MeltingpotEnv as MeltingpotEnv
    from marl_collect.envs.meltingpot.env import MeltingpotWrapper as MeltingpotWrapper
    from marl_collect.envs.openspiel.env import OpenSpielEnv as OpenSpielEnv
    from marl_collect.envs.overcooked.env import OvercookedEnv as OvercookedEnv
    from marl_collect.envs.pettingzoo.env import PettingZooEnv as PettingZooEnv
    from marl_collect.envs.pettingzoo.env import PettingZooWrapper as PettingZooWrapper
    from marl_collect.envs.pettingzoo.tasks import available_envs as available_envs
    from marl_collect.envs.rware.env import RwareEnv as RwareEnv
    from marl_collect.envs.vmas.env import VmasEnv as VmasEnv
    from marl_collect.errors import MissingPackageError as MissingPackageError


def _extra_of(module: str) -> str:
    """Return the extra of a module, that of the task provider in its folder."""
    from importlib import import_module

    folder = module.rpartition(".")[0]
    if folder in (__name__, f"{__name__}.pettingzoo"):
        return "pettingzoo"
    extra: str = import_module(f"{folder}.provider").FAMILY.extra
    return extra


__getattr__, __dir__ = lazy.attach(__name__, _extra_of)
