"""From a level to the description of its environment: groups, spaces, actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gymnasium import spaces

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.groups import GroupMap, MarlGroupMapType
from marl_collect.envs.lab2d.actions import Table
from marl_collect.envs.lab2d.group_actions import (
    GroupActions,
    Members,
    PartActions,
    TableChoices,
)
from marl_collect.envs.lab2d.level import LevelSpec
from marl_collect.envs.lab2d.players import group_players, player_of, space_of
from marl_collect.envs.lab2d.world import Lab2dWorld


@dataclass(frozen=True)
class Lab2dOptions:
    """What is wanted of a level; see ``Lab2dEnv``."""

    observations: Sequence[str] | None
    actions: Table | None
    group_map: GroupMap | MarlGroupMapType | None
    max_steps: int | None
    categorical_actions: bool

    def __post_init__(self) -> None:
        """Check what can be checked alone."""
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, but is {self.max_steps}.")
        if isinstance(self.observations, str):
            raise TypeError(
                f"observations is a sequence of names, such as [{self.observations!r}]."
            )


def act(
    world: Lab2dWorld, level: LevelSpec, options: Lab2dOptions
) -> dict[str, GroupActions]:
    """Return what tells Lab2d the actions of each group.

    Raises:
        ValueError: if a group map, a table or the players of a group do not fit.
    """
    actions: dict[str, GroupActions] = {}
    groups = group_players(options.group_map, len(level.prefixes), ())
    for group, agents in groups.items():
        prefixes = tuple(level.prefixes[player_of(agent)] for agent in agents)
        one_hot = not options.categorical_actions
        members = Members(group, agents, prefixes, one_hot=one_hot)
        actions[group] = (
            PartActions(world, members)
            if options.actions is None
            else TableChoices(options.actions, members)
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
    """Return groups, spaces and promises.

    Raises:
        ValueError: for an observation that a group's players do not have.
    """
    asked = options.observations
    if asked is not None:
        level.check_asked(asked)
    of_world = level.of_world(asked)
    groups = {}
    agents_of = group_players(options.group_map, len(level.prefixes), ())
    for group, agents in agents_of.items():
        fields = level.of_group([player_of(agent) for agent in agents], asked)
        missing = [n for n in asked or () if n not in fields and n not in of_world]
        if missing or not fields:
            raise ValueError(
                f"The agents {list(agents)} of group {group!r} do not all have the "
                f"observations {missing or 'asked for'} in one shape: found "
                f"{list(fields)}. An agent needs at least one, and agents who differ "
                "need different groups, see group_map."
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
