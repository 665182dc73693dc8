"""How one group's row of actions becomes what Lab2d is told."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import Key, Row
from marl_collect.envs.lab2d.actions import Table, TableActions, bounds, check_chosen
from marl_collect.envs.lab2d.world import Lab2dWorld
from marl_collect.envs.one_hot import OneHot


@dataclass(frozen=True)
class Members:
    """The players of one group.

    Attributes:
        group: its name.
        agents: their names as agents, in the order of the rows.
        prefixes: of their names in Lab2d, such as ``"1."``.
        one_hot: whether Discrete actions are stored one-hot.
    """

    group: str
    agents: tuple[str, ...]
    prefixes: tuple[str, ...]
    one_hot: bool


@dataclass(frozen=True)
class Parts:
    """The actions of Lab2d that one player sets, without its prefix, sorted by name.

    Attributes:
        discrete: name, least and greatest value of each.
        continuous: the same.
    """

    discrete: tuple[tuple[str, float, float], ...]
    continuous: tuple[tuple[str, float, float], ...]

    @classmethod
    def read(cls, world: Lab2dWorld, prefix: str) -> "Parts":
        """Ask the level what the player with this prefix can do."""
        found = [
            tuple(
                (name.removeprefix(prefix), *bounds(world, name))
                for name in sorted(index)
                if name.startswith(prefix)
            )
            for index in (world.discrete_index, world.continuous_index)
        ]
        return cls(*found)

    def space(self) -> spaces.Space[Any]:
        """Return Discrete, MultiDiscrete or Box; a Dict of these if there are both."""
        both: dict[str, spaces.Space[Any]] = {}
        if self.discrete:
            counts = self.counts()
            both["discrete"] = (
                spaces.Discrete(int(counts[0]))
                if len(counts) == 1
                else spaces.MultiDiscrete(counts)
            )
        if self.continuous:
            low, high = np.array([part[1:] for part in self.continuous], np.float32).T
            both["continuous"] = spaces.Box(low, high, dtype=np.float32)
        if len(both) == 1:
            return next(iter(both.values()))
        return spaces.Dict(both)

    def counts(self) -> NDArray[np.int64]:
        """How many values each discrete action has, ``[k]``."""
        return np.array([high - low + 1 for _, low, high in self.discrete], np.int64)


class GroupActions(abc.ABC):
    """Tells Lab2d what the players of a group do."""

    @property
    @abc.abstractmethod
    def space(self) -> spaces.Space[Any]:
        """The actions of one player."""

    @abc.abstractmethod
    def attach(self, world: Lab2dWorld) -> None:
        """Look up where ``world`` keeps each action; once per build."""

    @abc.abstractmethod
    def write(self, row: Row) -> None:
        """Tell the world what the row says.

        Raises:
            ValueError: if a discrete action does not exist, is not one-hot where that
                is due, or a continuous one is NaN; continuous ones are clipped.
        """


@final
class TableChoices(GroupActions):
    """Every player picks a row of the same table."""

    def __init__(self, table: Table, members: Members) -> None:
        """Serve ``members``; for the table see ``TableActions``."""
        self._table = TableActions(table, members.prefixes)
        self._count = len(table)
        self._members = members
        key = (members.group, "action")
        self._one_hot = OneHot(key, members.agents, len(table))

    @property
    def space(self) -> spaces.Space[Any]:
        """The rows."""
        return spaces.Discrete(self._count)

    def attach(self, world: Lab2dWorld) -> None:
        """Look up where ``world`` keeps each action; once per build."""
        self._table.attach(world)

    def write(self, row: Row) -> None:
        """Tell the world what the chosen rows say."""
        chosen: NDArray[Any] = row[self._members.group, "action"]
        if self._members.one_hot:
            chosen = self._one_hot.numbers(chosen)
        check_chosen(chosen, self._count, self._members.agents)
        self._table.write(chosen)


@final
class PartActions(GroupActions):
    """Every player sets each of its actions itself."""

    def __init__(self, world: Lab2dWorld, members: Members) -> None:
        """Ask the level what the members can do.

        Raises:
            ValueError: if they cannot all do the same.
        """
        read = [Parts.read(world, prefix) for prefix in members.prefixes]
        for agent, parts in zip(members.agents, read, strict=True):
            if parts != read[0]:
                raise ValueError(
                    f"{agent} of group {members.group!r} has the actions {parts}, but "
                    f"{members.agents[0]} has {read[0]}: players who differ need "
                    "different groups, see group_map."
                )
        self._parts = read[0]
        self._members = members
        self._counts = self._parts.counts()
        self._least = np.array([low for _, low, _ in self._parts.discrete], np.int64)
        limits = np.array([part[1:] for part in self._parts.continuous]).reshape(-1, 2)
        self._low, self._high = limits[:, 0], limits[:, 1]
        both = bool(self._parts.discrete and self._parts.continuous)
        key = (members.group, "action")
        self._one_hot: OneHot | None = None
        if members.one_hot and isinstance(self.space, spaces.Discrete):
            self._one_hot = OneHot(key, members.agents, int(self.space.n))
        self._discrete_key: Key = (*key, "discrete") if both else key
        self._continuous_key: Key = (*key, "continuous") if both else key

    @property
    def space(self) -> spaces.Space[Any]:
        """Discrete, MultiDiscrete or Box; a Dict of these if there are both."""
        return self._parts.space()

    def attach(self, world: Lab2dWorld) -> None:
        """Look up where ``world`` keeps each action; once per build."""
        self._world = world
        self._discrete = self._places(self._parts.discrete, world.discrete_index)
        self._continuous = self._places(self._parts.continuous, world.continuous_index)

    def write(self, row: Row) -> None:
        """Tell the world what the row says."""
        if self._discrete.size:
            chosen = row[self._discrete_key]
            if self._one_hot is not None:
                chosen = self._one_hot.numbers(chosen)
            chosen = chosen.reshape(self._discrete.shape)
            check_chosen(chosen, self._counts, self._members.agents)
            self._world.discrete[self._discrete] = chosen + self._least  # type: ignore[operator]
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
                f"The action {values[index]} of agent {self._members.agents[index]!r} "
                "holds NaN: expected numbers, which are clipped to "
                f"{list(zip(self._low, self._high, strict=True))}."
            )

    def _places(
        self, parts: tuple[tuple[str, float, float], ...], index: Mapping[str, int]
    ) -> NDArray[np.intp]:
        prefixes: Sequence[str] = self._members.prefixes
        places = [[index[prefix + part[0]] for part in parts] for prefix in prefixes]
        return np.array(places, np.intp).reshape(len(prefixes), len(parts))
