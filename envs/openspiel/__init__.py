"""OpenSpiel's games."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.openspiel.env import OpenSpielEnv as OpenSpielEnv

__getattr__, __dir__ = lazy.attach(__name__)
