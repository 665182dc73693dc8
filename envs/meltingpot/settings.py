"""A substrate as plain data: what MeltingPot's configuration of it says."""

import copy
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marl_collect.core.description import Field
from marl_collect.envs.lab2d.world import import_dmlab2d
from marl_collect.envs.meltingpot.imports import meltingpot_modules

COLLECTIVE_REWARD = "COLLECTIVE_REWARD"
WORLD_IMAGE = "WORLD.RGB"


@dataclass(frozen=True)
class WorldSpec:
    """What players see and do, whoever steps the world.

    Attributes:
        name: of the substrate or scenario.
        roles: of each player; empty if they are not known.
        n_players: how many there are.
        n_actions: how many actions each of them has.
        observations: of one player, name to shape and dtype.
        world_image: shape and dtype of the picture of the whole world, if there is one.
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
    """What it takes to build and step a substrate's Lab2d.

    Attributes:
        lab2d: flat, as Lab2d takes them.
        actions: row ``i`` is what action ``i`` sets.
        shared: observations that are the same for every player.
        usual_players: how many players the configuration describes; with more or
            fewer, some observations have another shape.
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


def read_substrate(
    substrate: Any, roles: Sequence[str] | None
) -> tuple[WorldSpec, SubstrateSettings]:
    """Read a substrate's configuration; nothing is built.

    Args:
        substrate: name, or a configuration that was changed by hand.
        roles: of each player; None for the substrate's own.

    Raises:
        ImportError: if MeltingPot is missing.
        ValueError: for a name or role that does not exist, or players that the
            substrate has no place for.
    """
    import_dmlab2d()
    with meltingpot_modules():
        from meltingpot.configs import substrates as configs

        if isinstance(substrate, str):
            config = _config(configs, substrate)
        else:
            config = substrate
        chosen = tuple(config.default_player_roles if roles is None else roles)
        _check_roles(chosen, config.valid_roles)
        lab2d = _flatten(_build_settings(config, chosen))
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
    """Return the error for a name that is neither a substrate nor a scenario."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3) or sorted(names)
    return ValueError(
        f"MeltingPot has no substrate or scenario {name!r}: did you mean one of {near}?"
    )


def _config(configs: Any, name: str) -> Any:
    if name not in configs.SUBSTRATES:
        raise unknown_name(name, configs.SUBSTRATES)
    return configs.get_config(name)


def _check_roles(roles: Sequence[str], valid: Iterable[str]) -> None:
    if not roles or not set(roles) <= set(valid):
        raise ValueError(
            "roles must name the role of each player, one player or more, out of "
            f"{sorted(valid)}, but is {list(roles)}."
        )


def _build_settings(config: Any, roles: tuple[str, ...]) -> Any:
    try:
        return config.lab2d_settings_builder(config=config, roles=roles)
    except Exception as error:
        usual = len(config.default_player_roles)
        if len(roles) == usual:
            raise
        raise ValueError(
            f"The substrate cannot be had with {len(roles)} players, its own number is "
            f"{usual}. Its settings raised {type(error).__name__}: {error}."
        ) from error


def _flatten(settings: Any) -> dict[str, str]:
    """Return MeltingPot's settings as Lab2d takes them.

    The steps are those of ``meltingpot.utils.substrates.builder.builder`` (2.4), which
    goes on to build.
    """
    from meltingpot.utils.substrates import builder
    from ml_collections import config_dict

    copied = config_dict.ConfigDict(copy.deepcopy(settings)).unlock()
    builder.apply_prefab_overrides(copied)
    builder.maybe_build_and_add_avatar_objects(copied)
    builder.locate_and_overwrite_level_directory(copied)
    flat: dict[str, str] = builder.parse_python_settings_for_dmlab2d(copied)
    return flat
