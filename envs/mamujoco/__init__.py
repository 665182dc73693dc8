"""Multi-agent MuJoCo (MaMuJoCo)."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.mamujoco.env import MamujocoEnv as MamujocoEnv

__getattr__, __dir__ = lazy.attach(__name__)
