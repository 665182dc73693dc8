"""Converts the actions in a group's row to Lab2d's named actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import Key, Row
from marl_collect.envs.common import OneHot
from marl_collect.envs.lab2d.world import Lab2dWorld

Table = Sequence[Mapping[str, float]]
"""Row ``i`` maps the names of Lab2d's actions to the values that action ``i`` sets."""


def check_chosen(chosen: NDArray[Any], counts: Any, agents: Sequence[str]) -> None:
    """Check that each agent's discrete actions are in ``[0, counts)``.

    Args:
        chosen: actions, ``[n_agents]`` or ``[n_agents, k]``.
        counts: number of actions, a scalar or ``[k]``.
        agents: agent names, for the message.

    Raises:
        ValueError: if an action is out of range; names the first such agent.
    """
    wrong = (chosen < 0) | (chosen >= counts)
    if wrong.any():
        row = int(wrong.reshape(len(agents), -1).any(1).argmax())
        raise ValueError(
            f"The action {chosen[row]} of agent {agents[row]!r} is out of range: "
            f"expected an integer from 0 to {np.asarray(counts) - 1}."
        )


@final
class TableActions:
    """Writes the actions of players who each choose a row of the same table."""

    def __init__(self, table: Table, prefixes: Sequence[str]) -> None:
        """Check the table.

        Args:
            table: action names without the player's prefix; the same in every row.
            prefixes: the prefix of each player, such as ``"1."``.

        Raises:
            TypeError: if it is no list of mappings.
            ValueError: if the table is empty, or its rows set different actions.
        """
        if not isinstance(table, Sequence) or not all(
            isinstance(row, Mapping) for row in table
        ):
            raise TypeError(
                "The action table must be a list of mappings from names of actions to "
                f"numbers, but is {table!r:.200}."
            )
        names = sorted(table[0]) if table else []
        if not names or any(sorted(row) != names for row in table):
            raise ValueError(
                "Every row of the action table must set the same actions, at least "
                f"one, but found {[sorted(row) for row in table]}."
            )
        self._names = names
        self._prefixes = prefixes
        self._table = table

    def attach(self, world: Lab2dWorld) -> None:
        """Look up the index of each action in ``world``. Call this after every build.

        Raises:
            ValueError: if the level lacks an action or does not allow a value.
        """
        for name in self._names:
            self._check_values(world, name)
        self._world = world
        self._discrete = self._lookup(world.discrete_index, np.int32)
        self._continuous = self._lookup(world.continuous_index, np.float64)

    def write(self, chosen: NDArray[np.int64]) -> None:
        """Write the table rows ``chosen``, ``[n_players]``, as the next actions."""
        indices, values = self._discrete
        if indices.size:
            self._world.discrete[indices] = values[chosen]
        indices, values = self._continuous
        if indices.size:
            self._world.continuous[indices] = values[chosen]

    def _lookup(
        self, index: Mapping[str, int], dtype: type[np.number[Any]]
    ) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """Return indices, ``[n_players, k]``, and the table's values, ``[rows, k]``."""
        names = [name for name in self._names if self._prefixes[0] + name in index]
        indices = [
            [index[prefix + name] for name in names] for prefix in self._prefixes
        ]
        values = [[row[name] for name in names] for row in self._table]
        return np.array(indices, np.intp), np.array(values, dtype)

    def _check_values(self, world: Lab2dWorld, name: str) -> None:
        values = [row[name] for row in self._table]
        for prefix in self._prefixes:
            low, high = bounds(world, prefix + name)
            whole = prefix + name in world.discrete_index
            if not all(
                low <= value <= high and not (whole and value % 1) for value in values
            ):
                raise ValueError(
                    f"The action table sets {prefix + name} to {values}, but the level "
                    f"accepts only {'integers from ' if whole else ''}{low} to {high}."
                )


def bounds(world: Lab2dWorld, name: str) -> tuple[float, float]:
    """Return the minimum and the maximum of an action.

    Raises:
        ValueError: if the level has no such action.
    """
    if name in world.discrete_index:
        spec = world.lab.action_discrete_spec(name)
    elif name in world.continuous_index:
        spec = world.lab.action_continuous_spec(name)
    else:
        known = sorted(world.discrete_index) + sorted(world.continuous_index)
        raise ValueError(f"The level has no action {name!r}: expected one of {known}.")
    return spec["min"], spec["max"]


@dataclass(frozen=True)
class PlayerGroup:
    """The players of one group.

    Attributes:
        group: name of the group.
        agents: agent names in row order.
        prefixes: prefix of each player's names in Lab2d, such as ``"1."``.
        one_hot: whether Discrete actions are stored one-hot.
    """

    group: str
    agents: tuple[str, ...]
    prefixes: tuple[str, ...]
    one_hot: bool


@dataclass(frozen=True)
class ActionSpec:
    """The actions of one player, without its prefix, sorted by name.

    Attributes:
        discrete: name, minimum and maximum of each discrete action.
        continuous: name, minimum and maximum of each continuous action.
    """

    discrete: tuple[tuple[str, float, float], ...]
    continuous: tuple[tuple[str, float, float], ...]

    @classmethod
    def read(cls, world: Lab2dWorld, prefix: str) -> "ActionSpec":
        """Return the actions of the player with this prefix."""
        kinds = [
            tuple(
                (name.removeprefix(prefix), *bounds(world, name))
                for name in sorted(index)
                if name.startswith(prefix)
            )
            for index in (world.discrete_index, world.continuous_index)
        ]
        return cls(*kinds)

    def space(self) -> spaces.Space[Any]:
        """Return Discrete, MultiDiscrete or Box; a Dict if there are both kinds."""
        both: dict[str, spaces.Space[Any]] = {}
        if self.discrete:
            counts = self.counts()
            both["discrete"] = (
                spaces.Discrete(int(counts[0]))
                if len(counts) == 1
                else spaces.MultiDiscrete(counts)
            )
        if self.continuous:
            bounds_of = [action[1:] for action in self.continuous]
            low, high = np.array(bounds_of, np.float32).T
            both["continuous"] = spaces.Box(low, high, dtype=np.float32)
        if len(both) == 1:
            return next(iter(both.values()))
        return spaces.Dict(both)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of values of each discrete action, ``[k]``."""
        return np.array([high - low + 1 for _, low, high in self.discrete], np.int64)


@final
class TableGroupActions:
    """Every player chooses a row of the same table.

    Attributes:
        space: the action space of one player.
        attach: looks up the index of each action in a world, after every build.
    """

    def __init__(self, table: Table, players: PlayerGroup) -> None:
        """Use ``table`` for ``players``; see ``TableActions``."""
        self._table = TableActions(table, players.prefixes)
        self.attach = self._table.attach
        self.space: spaces.Space[Any] = spaces.Discrete(len(table))
        self._count = len(table)
        self._players = players
        key = (players.group, "action")
        self._one_hot = OneHot(key, players.agents, len(table))

    def write(self, row: Row) -> None:
        """Write the row's actions to the world.

        Raises:
            ValueError: if an action is out of range, or a row that must be one-hot is
                not.
        """
        chosen: NDArray[Any] = row[self._players.group, "action"]
        if self._players.one_hot:
            chosen = self._one_hot.numbers(chosen)
        check_chosen(chosen, self._count, self._players.agents)
        self._table.write(chosen)


@final
class NativeGroupActions:
    """Every player sets each of Lab2d's actions separately.

    Attributes:
        space: the action space of one player.
    """

    def __init__(self, world: Lab2dWorld, players: PlayerGroup) -> None:
        """Read the players' action specs from the level.

        Raises:
            ValueError: if the players have different actions.
        """
        specs = [ActionSpec.read(world, prefix) for prefix in players.prefixes]
        for agent, spec in zip(players.agents, specs, strict=True):
            if spec != specs[0]:
                raise ValueError(
                    f"{agent} of group {players.group!r} has the actions {spec}, but "
                    f"{players.agents[0]} has {specs[0]}. Put players with different "
                    "actions into different groups (group_map)."
                )
        self._spec = specs[0]
        self.space = self._spec.space()
        self._players = players
        self._counts = self._spec.counts()
        self._minima = np.array([low for _, low, _ in self._spec.discrete], np.int64)
        limits = np.array([action[1:] for action in self._spec.continuous])
        self._low, self._high = limits.reshape(-1, 2).T
        both = bool(self._spec.discrete and self._spec.continuous)
        key = (players.group, "action")
        self._one_hot: OneHot | None = None
        if players.one_hot and isinstance(self.space, spaces.Discrete):
            self._one_hot = OneHot(key, players.agents, int(self.space.n))
        self._discrete_key: Key = (*key, "discrete") if both else key
        self._continuous_key: Key = (*key, "continuous") if both else key

    def attach(self, world: Lab2dWorld) -> None:
        """Look up the index of each action in ``world``. Call it after every build."""
        self._world = world
        self._discrete = self._indices(self._spec.discrete, world.discrete_index)
        self._continuous = self._indices(self._spec.continuous, world.continuous_index)

    def write(self, row: Row) -> None:
        """Write the row's actions to the world. Continuous actions are clipped.

        Raises:
            ValueError: if a discrete action is out of range, a row that must be
                one-hot is not, or a continuous action is NaN.
        """
        if self._discrete.size:
            chosen = row[self._discrete_key]
            if self._one_hot is not None:
                chosen = self._one_hot.numbers(chosen)
            chosen = chosen.reshape(self._discrete.shape)
            check_chosen(chosen, self._counts, self._players.agents)
            self._world.discrete[self._discrete] = chosen + self._minima  # type: ignore[operator]
        if self._continuous.size:
            values = row[self._continuous_key]
            self._check_numbers(values)
            self._world.continuous[self._continuous] = np.clip(
                values, self._low, self._high
            )

    def _check_numbers(self, values: NDArray[Any]) -> None:
        wrong = np.isnan(values).any(-1)
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(
                f"The action {values[index]} of agent {self._players.agents[index]!r} "
                "contains NaN: expected numbers. They are clipped to the bounds "
                f"{list(zip(self._low, self._high, strict=True))}."
            )

    def _indices(
        self, actions: tuple[tuple[str, float, float], ...], index: Mapping[str, int]
    ) -> NDArray[np.intp]:
        """Return the index of each player's actions, ``[n_players, k]``."""
        prefixes: Sequence[str] = self._players.prefixes
        indices = [
            [index[prefix + name] for name, *_ in actions] for prefix in prefixes
        ]
        return np.array(indices, np.intp).reshape(len(prefixes), len(actions))


GroupActions = TableGroupActions | NativeGroupActions
