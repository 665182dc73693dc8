"""Converts the actions in a group's row to Lab2d's named actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import Key, Row
from marl_collect.envs.common import OneHot
from marl_collect.envs.lab2d.actions import Table, TableActions, bounds, check_chosen
from marl_collect.envs.lab2d.world import Lab2dWorld


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
    """Every player chooses a row of the same table."""

    def __init__(self, table: Table, players: PlayerGroup) -> None:
        """Use ``table`` for ``players``; see ``TableActions``."""
        self._table = TableActions(table, players.prefixes)
        self._count = len(table)
        self._players = players
        key = (players.group, "action")
        self._one_hot = OneHot(key, players.agents, len(table))

    @property
    def space(self) -> spaces.Space[Any]:
        """The action space of one player."""
        return spaces.Discrete(self._count)

    def attach(self, world: Lab2dWorld) -> None:
        """Look up the index of each action in ``world``. Call it after every build."""
        self._table.attach(world)

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
    """Every player sets each of Lab2d's actions separately."""

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

    @property
    def space(self) -> spaces.Space[Any]:
        """The action space of one player."""
        return self._spec.space()

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
