"""The players of a Lab2d level: agents, groups, rows, and what they may observe."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from gymnasium import spaces

from marl_collect.core.description import Field, GroupDescription
from marl_collect.core.groups import (
    GroupMap,
    MarlGroupMapType,
    check_groups,
    explicit_groups,
)
from marl_collect.envs.common import unbounded
from marl_collect.envs.lab2d.world import Lab2dWorld
from marl_collect.options import Option, require

BY_ROLE = "role"
REWARD = "REWARD"
_OF_PLAYER = re.compile(r"(\d+)\.(.+)")


@dataclass(frozen=True)
class LevelSpec:
    """The structure of a level, derived from the names it uses.

    A level whose actions are called ``"<i>.NAME"`` has numbered players; observations
    without such a prefix belong to no player. Any other level has a single player, who
    owns all actions and observations.

    Attributes:
        prefixes: prefix of each player's names, such as ``("1.", "2.")``; ``("",)`` for
            a level without numbered players.
        fields: full name of each observation to its shape and dtype.
    """

    prefixes: tuple[str, ...]
    fields: Mapping[str, Field]

    @classmethod
    def read(cls, world: Lab2dWorld) -> "LevelSpec":
        """Read the structure from a level that is built.

        Raises:
            ValueError: if only some of the actions belong to numbered players, or if
                the numbers have gaps.
        """
        actions = [*world.discrete_index, *world.continuous_index]
        players = {name: _OF_PLAYER.fullmatch(name) for name in actions}
        numbers = {int(match[1]) for match in players.values() if match}
        common = sorted(name for name, match in players.items() if not match)
        if numbers and common:
            raise ValueError(
                f"The actions {common} have no player prefix, but other actions do: "
                'expected names such as "1.move" for all actions or for none.'
            )
        if numbers and numbers != set(range(1, len(numbers) + 1)):
            raise ValueError(
                "The level must number its players 1, 2, ... without gaps, but the "
                f"numbers are {sorted(numbers)}."
            )
        prefixes = tuple(f"{number}." for number in sorted(numbers)) or ("",)
        return cls(prefixes, world.fields())

    @property
    def has_rewards(self) -> bool:
        """Whether each player has a reward; otherwise one reward is for all."""
        return all(prefix + REWARD in self.fields for prefix in self.prefixes)

    def of_group(
        self, players: Sequence[int], requested: Sequence[str] | None
    ) -> dict[str, Field]:
        """Return the observations that all players of a group have in the same shape.

        Args:
            players: indices of the players, from 0.
            requested: observation names; None for all that can be stored, without
                rewards.

        Returns:
            Name without the player's prefix to shape and dtype.
        """
        prefixes = [self.prefixes[player] for player in players]
        names = self._names_of(prefixes[0]) if requested is None else requested
        common: dict[str, Field] = {}
        for name in names:
            fields = [self.fields.get(prefix + name) for prefix in prefixes]
            first = fields[0]
            if first is not None and all(field == first for field in fields):
                common[name] = first
        return common

    def of_world(self, requested: Sequence[str] | None) -> dict[str, Field]:
        """Return the requested observations that belong to no player."""
        if self.prefixes == ("",) or requested is None:
            return {}
        return {
            name: self.fields[name]
            for name in requested
            if name in self.fields and not _OF_PLAYER.fullmatch(name)
        }

    def check_requested(self, requested: Sequence[str]) -> None:
        """Check that each requested observation exists and can be stored.

        Raises:
            ValueError: if one does not; lists the observations of the level.
        """
        for name in requested:
            full = [name, *(prefix + name for prefix in self.prefixes)]
            fields = [self.fields[key] for key in full if key in self.fields]
            if not fields:
                raise ValueError(
                    f"The level has no observation {name!r}: expected one of "
                    f"{self._names_of(self.prefixes[0])}, which each player has, or "
                    f"one of {sorted(self.fields)}."
                )
            if not all(storable(field) for field in fields):
                raise ValueError(
                    f"The observation {name!r} has dtype {fields[0].dtype} and shape "
                    f"{fields[0].shape}. Only numbers of a fixed shape can be stored "
                    "(dtype object means text, a 0 in the shape a variable size)."
                )

    def _names_of(self, prefix: str) -> list[str]:
        return sorted(
            name.removeprefix(prefix)
            for name, field in self.fields.items()
            if name.startswith(prefix) and storable(field) and name != prefix + REWARD
        )


def storable(field: Field) -> bool:
    """Return whether the observation consists of numbers and has a fixed shape."""
    return field.dtype != object and 0 not in field.shape


@dataclass(frozen=True)
class LevelOptions:
    """Options of all environments that are based on Lab2d."""

    observations: Sequence[str] | None
    group_map: GroupMap | MarlGroupMapType | str | None
    max_steps: int | None
    categorical_actions: bool

    def __post_init__(self) -> None:
        """Check the options that do not depend on the level."""
        require("max_steps", self.max_steps, int | None, Option("", at_least=1))
        for entry in fields(self):
            if entry.type is bool:
                require(entry.name, getattr(self, entry.name), bool, Option(""))
        if isinstance(self.observations, str):
            raise TypeError(
                "observations must be a sequence of names, but is a string: pass "
                f"[{self.observations!r}]."
            )


@dataclass(frozen=True)
class PlayerRow:
    """The row of one player.

    Attributes:
        player: index of the player, from 0. Lab2d's own names count from 1.
        group: name of the player's group.
        index: index of the row in the group.
    """

    player: int
    group: str
    index: int


def agent_name(player: int) -> str:
    """Return the agent name of a player, counted from 0."""
    return f"player_{player}"


def player_of(agent: str) -> int:
    """Return the player, counted from 0, of an agent name."""
    return int(agent.removeprefix("player_"))


def group_players(
    group_map: GroupMap | MarlGroupMapType | str | None,
    n_players: int,
    roles: Sequence[str],
) -> dict[str, tuple[str, ...]]:
    """Return the agents of each group.

    Args:
        group_map: group name to agent names, or a ``MarlGroupMapType``; ``"role"`` for
            one group per role (``"agents"`` if there is only one role), or the value
            of a ``MarlGroupMapType``; None for all agents in one group.
        n_players: number of players.
        roles: role of each player; empty if players have no roles.

    Raises:
        ValueError: if a map does not name every agent exactly once, or if ``"role"`` is
            requested and players have no roles.
        TypeError: if ``group_map`` has another type.
    """
    agents = [agent_name(player) for player in range(n_players)]
    if group_map is None:
        group_map = MarlGroupMapType.ALL_IN_ONE_GROUP
    if group_map == BY_ROLE:
        groups = _by_role(agents, roles)
    else:
        groups = explicit_groups(group_map, agents, [BY_ROLE])
    check_groups(groups, agents)
    return {name: tuple(names) for name, names in groups.items()}


def _by_role(agents: Sequence[str], roles: Sequence[str]) -> dict[str, list[str]]:
    if not roles:
        raise ValueError(
            f"group_map={BY_ROLE!r} needs the role of each player, but these players "
            "have no known roles. Pass a mapping or a MarlGroupMapType instead."
        )
    if len(set(roles)) == 1:
        return {"agents": list(agents)}
    groups: dict[str, list[str]] = {}
    for agent, role in zip(agents, roles, strict=True):
        groups.setdefault(role, []).append(agent)
    return groups


def player_rows(groups: Mapping[str, Sequence[str]]) -> Iterator[PlayerRow]:
    """Yield the row of every player, group by group, in row order."""
    for group, agents in groups.items():
        for index, agent in enumerate(agents):
            yield PlayerRow(player_of(agent), group, index)


def observed_names(group: GroupDescription) -> list[str]:
    """Return the names of a group's observations."""
    assert isinstance(group.observation, spaces.Dict)
    return list(group.observation.spaces)


def space_of(field: Field) -> spaces.Box:
    """Return the space of an observation with its dtype; scalars get shape ``(1,)``."""
    return unbounded(field.shape or (1,), field.dtype)
