"""Task provider of Overcooked-AI: an entry point of ``marl_collect.tasks``."""

from pathlib import Path
from typing import Final

from marl_collect.envs.family import Family, folders_of


def _listed() -> list[str]:
    """List the layouts of two players; the library encodes only their states."""
    layouts = [
        layout
        for folder in folders_of("overcooked_ai_py")
        for layout in folder.glob("data/layouts/*.layout")
    ]
    return sorted(layout.stem for layout in layouts if _has_two_players(layout))


def _has_two_players(layout: Path) -> bool:
    _, grid, *_ = layout.read_text(encoding="utf-8").split('"""')
    return "2" in grid and "3" not in grid


FAMILY: Final = Family(
    name="overcooked",
    extra="overcooked",
    modules=("overcooked_ai_py", "pettingzoo"),
    distributions=("overcooked-ai",),
    listed=_listed,
    known=lambda layout: layout in _listed(),
    env="marl_collect.envs.overcooked.env:OvercookedEnv",
    safe=(
        *("cook_time", "delivery_reward", "num_items_for_soup", "old_dynamics"),
        *("onion_time", "onion_value", "order_bonus", "rew_shaping_params"),
        *("start_all_orders", "start_bonus_orders", "tomato_time", "tomato_value"),
    ),
)
