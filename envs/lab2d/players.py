"""Maps Lab2d's players to agents: names, groups, spaces and rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from marl_collect.core.description import Field, GroupDescription
from marl_collect.core.groups import (
    GroupMap,
    MarlGroupMapType,
    check_groups,
    explicit_groups,
)

BY_ROLE = "role"


@dataclass(frozen=True)
class LevelOptions:
    """Options of all environments that are based on Lab2d."""

    observations: Sequence[str] | None
    group_map: GroupMap | MarlGroupMapType | str | None
    max_steps: int | None
    categorical_actions: bool

    def __post_init__(self) -> None:
        """Check the options that do not depend on the level."""
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, but is {self.max_steps}.")
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

    @property
    def agent(self) -> str:
        """Name of the agent."""
        return agent_name(self.player)


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
            one group per role (``"agents"`` if there is only one role); None for all
            agents in one group.
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
    if isinstance(group_map, str):
        groups = _by_role(group_map, agents, roles)
    else:
        groups = explicit_groups(group_map, agents)
    check_groups(groups, agents)
    return {name: tuple(names) for name, names in groups.items()}


def _by_role(
    group_map: str, agents: Sequence[str], roles: Sequence[str]
) -> dict[str, list[str]]:
    if group_map != BY_ROLE:
        raise ValueError(
            f"group_map must be a mapping, a MarlGroupMapType or {BY_ROLE!r}, but is "
            f"{group_map!r}."
        )
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
    shape = field.shape or (1,)
    dtype = field.dtype.type
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)  # type: ignore[type-var]
        return spaces.Box(info.min, info.max, shape, dtype)  # type: ignore[arg-type]
    return spaces.Box(-np.inf, np.inf, shape, dtype)  # type: ignore[arg-type]
