"""The multi-robot warehouse (RWARE)."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.rware.env import RwareEnv as RwareEnv

__getattr__, __dir__ = lazy.attach(__name__)
