"""Task provider of MeltingPot: an entry point of ``marl_collect.tasks``."""

from typing import Final

from marl_collect.envs.family import Family


def _listed() -> dict[str, str]:
    """Map substrates, then scenarios, to the command that completes them."""
    from marl_collect.envs.meltingpot.imports import meltingpot_modules
    from marl_collect.envs.meltingpot.settings import (
        INSTALL_BOTS,
        lacks_bots,
        scenarios,
        substrates,
    )

    command = f"{INSTALL_BOTS} (downloads the bots)"
    with meltingpot_modules():  # Once, instead of for each scenario.
        bots = {name: command if lacks_bots(name) else "" for name in scenarios()}
        return dict.fromkeys(substrates(), "") | bots


def _known(name: str) -> bool:
    from marl_collect.envs.meltingpot.settings import scenarios, substrates

    return name in substrates() or name in scenarios()


FAMILY: Final = Family(
    name="meltingpot",
    extra="meltingpot",
    modules=("meltingpot",),
    distributions=("dm-meltingpot", "dmlab2d"),
    listed=_listed,
    known=_known,
    env="marl_collect.envs.meltingpot.env:MeltingpotEnv",
    pettingzoo=False,
    safe=(
        *("roles", "max_steps", "categorical_actions", "group_map", "observations"),
        *("world_rgb", "truncate_without_reset", "episode_reward", "log_level"),
    ),
    needs_prefix=False,
)
