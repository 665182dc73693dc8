"""Names that papers give to tasks of level-based foraging.

Source: Papoudakis et al., "Benchmarking Multi-Agent Deep Reinforcement Learning
Algorithms in Cooperative Tasks", arXiv 2006.07869, and the README of EPyMARL.
"""

from collections.abc import Mapping
from typing import Any, Final

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
"""The registered task of each name, and the arguments that make it the paper's."""


def registered_task(task: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name in Gymnasium's registry and the arguments of a task."""
    return ALIASES.get(task, (task, {}))
