"""Reads MeltingPot's configuration of a substrate into plain data."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from marl_collect.core.description import Field
from marl_collect.envs.family import folders_of
from marl_collect.envs.lab2d.world import import_dmlab2d
from marl_collect.envs.meltingpot.imports import meltingpot_modules
from marl_collect.options import did_you_mean, nearest

COLLECTIVE_REWARD = "COLLECTIVE_REWARD"
WORLD_IMAGE = "WORLD.RGB"
INSTALL_BOTS = "python scripts/install_meltingpot.py --force"
LogLevel = Literal["INFO", "WARN", "ERROR", "NEVER"]
"""Lab2d prints messages of this level and of the levels after it."""

_NO_OPERATION = "noop_bot"
"""The only bot that has no trained weights."""


@dataclass(frozen=True)
class WorldSpec:
    """The players, observations and actions of a substrate or scenario.

    Attributes:
        name: name of the substrate or scenario.
        roles: role of each player; empty if unknown.
        n_players: number of players.
        n_actions: number of actions of each player.
        observations: name of each observation of a player to its shape and dtype.
        world_image: shape and dtype of the image of the whole world, if any.
        time_limit: frames after which the substrate ends an episode, if known.
    """

    name: str
    roles: tuple[str, ...]
    n_players: int
    n_actions: int
    observations: Mapping[str, Field]
    world_image: Field | None
    time_limit: int | None


@dataclass(frozen=True)
class SubstrateSettings:
    """The settings for building and stepping a substrate's Lab2d.

    Attributes:
        lab2d: Lab2d's flat settings.
        actions: action table; row ``i`` holds the values that action ``i`` sets.
        shared: names of observations that are the same for every player.
        usual_players: number of players that the configuration describes. For other
            numbers, some observations have another shape.
    """

    lab2d: Mapping[str, str]
    actions: Sequence[Mapping[str, float]]
    shared: frozenset[str]
    usual_players: int


def substrates() -> list[str]:
    """Return the names of all substrates, sorted."""
    with meltingpot_modules():
        from meltingpot.configs import substrates as configs

        return sorted(configs.SUBSTRATES)


def scenarios() -> list[str]:
    """Return the names of all scenarios, sorted."""
    with meltingpot_modules():
        from meltingpot.configs import scenarios as configs

        return sorted(configs.SCENARIO_CONFIGS)


def lacks_bots(scenario: str) -> bool:
    """Return whether a scenario needs trained bots that are not installed."""
    with meltingpot_modules():
        from meltingpot.configs import scenarios as configs

        roles = configs.SCENARIO_CONFIGS[scenario].bots_by_role
    bots = {bot for role in roles.values() for bot in role}
    if bots <= {_NO_OPERATION}:
        return False
    folders = folders_of("meltingpot")
    return not any((f / "assets" / "saved_models").is_dir() for f in folders)


def read_substrate(
    substrate: Any, roles: Sequence[str] | None, log_level: LogLevel = "ERROR"
) -> tuple[WorldSpec, SubstrateSettings]:
    """Read a substrate's configuration without building anything.

    Args:
        substrate: name, or a custom configuration.
        roles: role of each player; None for the substrate's default roles.
        log_level: the messages of Lua code that Lab2d prints.

    Raises:
        ImportError: if MeltingPot is missing.
        ValueError: for an unknown name, level or role, or a number of players that the
            substrate does not support.
    """
    if log_level not in get_args(LogLevel):
        raise ValueError(
            f"log_level must be one of {get_args(LogLevel)}, but is {log_level!r}."
        )
    with meltingpot_modules():
        import_dmlab2d()
        from meltingpot.configs import substrates as configs

        config = substrate
        if isinstance(substrate, str):
            if substrate not in configs.SUBSTRATES:
                raise unknown_name(substrate, configs.SUBSTRATES)
            config = configs.get_config(substrate)
        if not hasattr(config, "default_player_roles"):
            raise TypeError(
                "substrate must be a name, or a configuration from "
                f"meltingpot.substrate.get_config, but is {substrate!r:.100}."
            )
        chosen = tuple(config.default_player_roles if roles is None else roles)
        if not chosen or not set(chosen) <= set(config.valid_roles):
            raise ValueError(
                "roles must contain a role for each player, at least one, out of "
                f"{sorted(config.valid_roles)}, but is {list(chosen)}."
            )
        lab2d = _flatten(_build_settings(config, chosen))
        lab2d["logLevel"] = log_level
        specs = config.timestep_spec.observation
        shared = frozenset(config.global_observation_names) - {WORLD_IMAGE}
        names = sorted({*config.individual_observation_names, *shared})
        observations = {n: Field(specs[n].shape, specs[n].dtype) for n in names}
        observations[COLLECTIVE_REWARD] = Field((), np.dtype(np.float64))
        image = specs.get(WORLD_IMAGE)
        limit = lab2d.get("maxEpisodeLengthFrames")
        level = lab2d["levelName"].rpartition("/")[2]
        spec = WorldSpec(
            name=substrate if isinstance(substrate, str) else level,
            roles=chosen,
            n_players=len(chosen),
            n_actions=len(config.action_set),
            observations=observations,
            world_image=None if image is None else Field(image.shape, image.dtype),
            time_limit=None if limit is None else int(limit),
        )
        actions = [dict(row) for row in config.action_set]
        usual = len(config.default_player_roles)
        return spec, SubstrateSettings(lab2d, actions, shared, usual)


def unknown_name(name: str, known: Iterable[str]) -> ValueError:
    """Return the error for an unknown name of a substrate or scenario."""
    hint = did_you_mean(nearest(name, known))
    return ValueError(
        f"MeltingPot has no substrate or scenario {name!r}.{hint} "
        "`marl-collect envs meltingpot` lists all."
    )


def _build_settings(config: Any, roles: tuple[str, ...]) -> Any:
    try:
        return config.lab2d_settings_builder(config=config, roles=roles)
    except Exception as error:
        usual = len(config.default_player_roles)
        if len(roles) == usual:
            raise
        raise ValueError(
            f"The substrate does not support {len(roles)} players: by default it has "
            f"{usual}. Its settings raised {type(error).__name__}: {error}."
        ) from error


def _flatten(settings: Any) -> dict[str, str]:
    """Convert MeltingPot's settings to Lab2d's flat settings.

    The steps are those of ``meltingpot.utils.substrates.builder.builder`` (2.4), except
    for building.
    """
    from meltingpot.utils.substrates import builder
    from ml_collections import config_dict

    copied = config_dict.ConfigDict(copy.deepcopy(settings)).unlock()
    builder.apply_prefab_overrides(copied)
    builder.maybe_build_and_add_avatar_objects(copied)
    builder.locate_and_overwrite_level_directory(copied)
    flat: dict[str, str] = builder.parse_python_settings_for_dmlab2d(copied)
    return flat
