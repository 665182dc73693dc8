"""Builds the environment description of a level: groups, spaces, actions."""

from collections.abc import Mapping
from dataclasses import dataclass

from gymnasium import spaces

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.envs.lab2d.actions import Table
from marl_collect.envs.lab2d.group_actions import (
    GroupActions,
    NativeGroupActions,
    PlayerGroup,
    TableGroupActions,
)
from marl_collect.envs.lab2d.level import LevelSpec
from marl_collect.envs.lab2d.players import (
    LevelOptions,
    group_players,
    player_of,
    space_of,
)
from marl_collect.envs.lab2d.world import Lab2dWorld


@dataclass(frozen=True)
class Lab2dOptions(LevelOptions):
    """Options of ``Lab2dEnv``, documented there."""

    actions: Table | None


def build_actions(
    world: Lab2dWorld, level: LevelSpec, options: Lab2dOptions
) -> dict[str, GroupActions]:
    """Return the action writer of each group.

    Raises:
        ValueError: if the group map or the action table does not fit the level, or if
            players of a group have different actions.
    """
    actions: dict[str, GroupActions] = {}
    groups = group_players(options.group_map, len(level.prefixes), ())
    for group, agents in groups.items():
        prefixes = tuple(level.prefixes[player_of(agent)] for agent in agents)
        one_hot = not options.categorical_actions
        players = PlayerGroup(group, agents, prefixes, one_hot=one_hot)
        actions[group] = (
            NativeGroupActions(world, players)
            if options.actions is None
            else TableGroupActions(options.actions, players)
        )
        actions[group].attach(world)
    return actions


def describe(
    name: str,
    world: Lab2dWorld,
    level: LevelSpec,
    options: Lab2dOptions,
    actions: Mapping[str, GroupActions],
) -> EnvDescription:
    """Return the description of the environment.

    Raises:
        ValueError: if players of a group lack an observation.
    """
    requested = options.observations
    if requested is not None:
        level.check_requested(requested)
    of_world = level.of_world(requested)
    groups = {}
    agents_of = group_players(options.group_map, len(level.prefixes), ())
    for group, agents in agents_of.items():
        fields = level.of_group([player_of(agent) for agent in agents], requested)
        missing = [n for n in requested or () if n not in fields and n not in of_world]
        if missing or not fields:
            raise ValueError(
                f"Group {group!r} must have at least one observation, with the same "
                f"shape for all of its agents {list(agents)}. Found "
                f"{list(fields)}; missing: {missing}. Put agents with different "
                "observations into different groups (group_map)."
            )
        groups[group] = GroupDescription(
            agents=agents,
            observation=spaces.Dict({n: space_of(f) for n, f in fields.items()}),
            action=actions[group].space,
            categorical_actions=options.categorical_actions,
            mask=False,
        )
    limits = [n for n in (options.max_steps, world.time_limit) if n is not None]
    return EnvDescription(
        name=name,
        groups=groups,
        root={name: space_of(field) for name, field in of_world.items()},
        repeats=not world.env_seed,
        time_limit=min(limits, default=None),
    )
