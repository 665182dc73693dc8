"""Task provider of the warehouse (RWARE): an entry point of ``marl_collect.tasks``."""

from functools import partial
from typing import Final

from marl_collect.envs import registered
from marl_collect.envs.family import Family

_LISTED = tuple(
    f"rware-{size}-{agents}ag{difficulty}-v2"
    for size in ("tiny", "small", "medium", "large")
    for agents in (2, 4)
    for difficulty in ("-easy", "", "-hard")
)
"""Tasks of papers. The library registers 228."""


FAMILY: Final = Family(
    name="rware",
    extra="rware",
    modules=("rware", "pettingzoo"),
    distributions=("rware",),
    listed=lambda: _LISTED,
    known=partial(registered.is_registered, "rware"),
    env="marl_collect.envs.rware.env:RwareEnv",
    defaults=partial(registered.defaults, "rware"),
    safe=(
        *("layout", "observation_type", "image_observation_layers", "reward_type"),
        *("render_mode", "max_inactivity_steps"),
    ),
)
