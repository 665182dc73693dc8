"""Makes environments forget at a reset what they keep by mistake.

An episode has to follow from its seed and its actions. ``check_env`` found who breaks
that; what they keep is put back here, before every reset.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Forget: TypeAlias = Callable[[Any], None]


def _knights_archers_zombies(raw: Any) -> None:
    """Its spawn timer goes on counting, and its dead of an unfinished cycle stay."""
    raw.zombie_spawn_interval.reset()
    raw.kill_list = []


_FORGET: Mapping[str, Forget] = {
    "pettingzoo.butterfly.knights_archers_zombies.knights_archers_zombies": (
        _knights_archers_zombies
    ),
}


def forget_of(raw: Any) -> Forget | None:
    """Return what to call with the unwrapped environment ``raw`` before a reset."""
    return _FORGET.get(type(raw).__module__)
