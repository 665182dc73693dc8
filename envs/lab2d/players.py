"""Lab2d's players as agents: their names, groups, spaces and rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium import spaces

from marl_collect.core.description import Field
from marl_collect.core.groups import (
    GroupMap,
    MarlGroupMapType,
    check_groups,
    explicit_groups,
)

BY_ROLE = "role"


@dataclass(frozen=True)
class PlayerRow:
    """Where one player's values stand.

    Attributes:
        player: counted from 0; Lab2d's own names count from 1.
        group: of the player.
        index: of the player's row in the group.
    """

    player: int
    group: str
    index: int

    @property
    def agent(self) -> str:
        """The player's name as an agent."""
        return agent_name(self.player)


def agent_name(player: int) -> str:
    """Return the agent that the player, counted from 0, is."""
    return f"player_{player}"


def player_of(agent: str) -> int:
    """Return the player, counted from 0, that the agent is."""
    return int(agent.removeprefix("player_"))


def group_players(
    group_map: GroupMap | MarlGroupMapType | str | None,
    n_players: int,
    roles: Sequence[str],
) -> dict[str, tuple[str, ...]]:
    """Return the agents of each group.

    Args:
        group_map: group name to agent names; one of the two maps that need none;
            ``"role"``, one group per role, ``"agents"`` if there is only one role; or
            None for all agents in one group.
        n_players: how many there are.
        roles: of each player; empty where players have none.

    Raises:
        ValueError: if a map does not name every agent exactly once, or there are no
            roles to group by.
        TypeError: if it is no map.
    """
    agents = [agent_name(player) for player in range(n_players)]
    if group_map is None:
        group_map = MarlGroupMapType.ALL_IN_ONE_GROUP
    if isinstance(group_map, str):
        groups = _by_role(group_map, agents, roles)
    else:
        groups = explicit_groups(group_map, agents)
    check_groups(groups, agents)
    return {name: tuple(members) for name, members in groups.items()}


def _by_role(
    group_map: str, agents: Sequence[str], roles: Sequence[str]
) -> dict[str, list[str]]:
    if group_map != BY_ROLE:
        raise ValueError(
            f"group_map must be a mapping, a MarlGroupMapType or {BY_ROLE!r}, but is "
            f"{group_map!r}."
        )
    if not roles:
        raise ValueError("group_map is 'role', but these players have no known roles.")
    if len(set(roles)) == 1:
        return {"agents": list(agents)}
    groups: dict[str, list[str]] = {}
    for agent, role in zip(agents, roles, strict=True):
        groups.setdefault(role, []).append(agent)
    return groups


def player_rows(groups: Mapping[str, Sequence[str]]) -> Iterator[PlayerRow]:
    """Yield every player's row, group by group, in the order of the rows."""
    for group, agents in groups.items():
        for index, agent in enumerate(agents):
            yield PlayerRow(player_of(agent), group, index)


def space_of(field: Field) -> spaces.Box:
    """Return the space of an observation, in its own dtype; a scalar gets ``(1,)``."""
    shape = field.shape or (1,)
    dtype = field.dtype.type
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)  # type: ignore[type-var]
        return spaces.Box(info.min, info.max, shape, dtype)  # type: ignore[arg-type]
    return spaces.Box(-np.inf, np.inf, shape, dtype)  # type: ignore[arg-type]
