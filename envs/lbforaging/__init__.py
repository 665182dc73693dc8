"""Level-based foraging (LBF)."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.lbforaging.env import LbForagingEnv as LbForagingEnv

__getattr__, __dir__ = lazy.attach(__name__)
