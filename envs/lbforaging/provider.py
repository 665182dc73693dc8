"""Task provider of level-based foraging: an entry point of ``marl_collect.tasks``."""

from typing import Any, Final

from marl_collect.envs import registered
from marl_collect.envs.family import Family
from marl_collect.envs.lbforaging.names import ALIASES, registered_task

_LISTED = (
    "Foraging-8x8-2p-2f-coop-v3",
    "Foraging-2s-8x8-2p-2f-coop-v3",
    "Foraging-8x8-2p-3f-v3",
    "Foraging-10x10-3p-3f-v3",
    "Foraging-2s-10x10-3p-3f-v3",
    "Foraging-15x15-3p-4f-v3",
    "Foraging-15x15-4p-3f-v3",
)
"""Tasks of papers. The library registers 1,920."""


def _known(task: str) -> bool:
    return registered.is_registered("lbforaging", registered_task(task)[0])


def _defaults(task: str) -> dict[str, Any]:
    name, variant = registered_task(task)
    return {**registered.defaults("lbforaging", name), **variant}


FAMILY: Final = Family(
    name="lbforaging",
    extra="lbforaging",
    modules=("lbforaging", "pettingzoo"),
    distributions=("lbforaging",),
    listed=lambda: (*_LISTED, *ALIASES),
    known=_known,
    env="marl_collect.envs.lbforaging.env:LbForagingEnv",
    defaults=_defaults,
    safe=("render_mode", "max_food_level", "min_food_level", "max_player_level"),
)
