"""Clears state that upstream environments leak across episodes.

An episode must follow from its seed and its actions. ``check_env`` found the
environments that break this rule; their leaked state is cleared before every reset.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Cleaner: TypeAlias = Callable[[Any], None]


def _knights_archers_zombies(raw: Any) -> None:
    """Clear the spawn timer, and the agents that died in an unfinished cycle."""
    raw.zombie_spawn_interval.reset()
    raw.kill_list = []


_CLEANERS: Mapping[str, Cleaner] = {
    "pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies": (
        _knights_archers_zombies
    ),
}


def leak_cleaner(raw: Any) -> Cleaner | None:
    """Return what to call with the unwrapped environment ``raw`` before a reset."""
    return _CLEANERS.get(type(raw).__module__)
