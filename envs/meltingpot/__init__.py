"""MeltingPot substrates and scenarios."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.meltingpot.env import MeltingpotEnv as MeltingpotEnv
    from marl_collect.envs.meltingpot.env import MeltingpotWrapper as MeltingpotWrapper

__getattr__, __dir__ = lazy.attach(__name__)
