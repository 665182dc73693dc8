"""Task provider of level-based foraging: an entry point of ``marl_collect.tasks``.

Source of the papers' names: Papoudakis et al., "Benchmarking Multi-Agent Deep
Reinforcement Learning Algorithms in Cooperative Tasks", arXiv 2006.07869, and the
README of EPyMARL.
"""

from collections.abc import Mapping
from typing import Any, Final

from marl_collect.envs import registered
from marl_collect.envs.family import Family

ALIASES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "8x8-2p-2f-coop": ("Foraging-8x8-2p-2f-coop-v3", {}),
    "8x8-2p-2f-2s-coop": ("Foraging-2s-8x8-2p-2f-coop-v3", {}),
    "10x10-3p-3f": ("Foraging-10x10-3p-3f-v3", {}),
    "10x10-3p-3f-2s": ("Foraging-2s-10x10-3p-3f-v3", {}),
    # lbforaging 2.0.0 registers no task of these sizes with five foods.
    "15x15-3p-5f": ("Foraging-15x15-3p-4f-v3", {"max_num_food": 5}),
    "15x15-4p-3f": ("Foraging-15x15-4p-3f-v3", {}),
    "15x15-4p-5f": ("Foraging-15x15-4p-4f-v3", {"max_num_food": 5}),
}
"""The registered task of each paper's name, and the arguments that complete it."""
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


def registered_task(task: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name in Gymnasium's registry and the arguments of a task."""
    return ALIASES.get(task, (task, {}))


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
