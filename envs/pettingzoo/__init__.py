"""PettingZoo environments, parallel and AEC, by task name or custom."""

from typing import TYPE_CHECKING

from marl_collect import lazy

if TYPE_CHECKING:
    from marl_collect.envs.pettingzoo.env import PettingZooEnv as PettingZooEnv
    from marl_collect.envs.pettingzoo.env import PettingZooWrapper as PettingZooWrapper

__getattr__, __dir__ = lazy.attach(__name__)
