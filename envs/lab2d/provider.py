"""Task provider of Lab2d: an entry point of ``marl_collect.tasks``."""

from typing import Final

from marl_collect.envs.family import Family, folders_of


def _levels() -> list[str]:
    """List dmlab2d's level folders: it has no function that lists its levels."""
    return sorted(
        path.parent.name
        for folder in folders_of("dmlab2d")
        for path in folder.glob("lib/game_scripts/levels/*/init.lua")
    )


_SAFE = (
    *("observations", "actions", "group_map", "max_steps", "categorical_actions"),
    "rebuild",
    *(
        f"settings.{name}"
        for name in (
            *("avatars", "env_seed", "episodeLengthFrames", "foe", "food"),
            *("gridShape", "logLevel", "mapName", "maxEpisodeLengthFrames"),
            *("numBoxes", "numPlayers", "pill", "roomSteps", "simulation"),
            *("spriteSize", "stepCost", "topology"),
        )
    ),
)
"""Without ``settings.levelDirectory``, from which Lab2d runs Lua.

The settings are those of dmlab2d's levels, which only look them up in tables.
"""

FAMILY: Final = Family(
    name="lab2d",
    extra="dmlab2d",
    modules=("dmlab2d",),
    distributions=("dmlab2d",),
    listed=_levels,
    known=lambda level: level in _levels(),
    env="marl_collect.envs.lab2d.env:Lab2dEnv",
    pettingzoo=False,
    safe=_SAFE,
    needs_prefix=False,
    priority=-1,  # Some substrates of MeltingPot have the same names as levels.
)
