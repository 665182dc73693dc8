"""Lab2d levels: those that dmlab2d ships, and custom ones."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.lab2d.env import Lab2dEnv as Lab2dEnv

__getattr__, __dir__ = lazy.attach(__name__)
