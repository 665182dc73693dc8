"""VMAS, a simulator of many worlds."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.vmas.env import VmasEnv as VmasEnv

__getattr__, __dir__ = lazy.attach(__name__)
