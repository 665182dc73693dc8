"""Overcooked-AI's kitchens."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.overcooked.env import OvercookedEnv as OvercookedEnv

__getattr__, __dir__ = lazy.attach(__name__)
