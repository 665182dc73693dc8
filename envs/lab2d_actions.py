"""How a row's actions become what Lab2d is told, by the names of its actions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.description import Key, Row
from marl_collect.envs.lab2d_world import Lab2dWorld

Table = Sequence[Mapping[str, float]]
"""``table[i]`` is what action ``i`` sets: name of an action of Lab2d to its value."""


def check_chosen(chosen: NDArray[Any], counts: Any, agents: Sequence[str]) -> None:
    """Check that each agent's discrete actions are in ``[0, counts)``.

    Args:
        chosen: ``[n_agents]`` or ``[n_agents, k]``.
        counts: how many there are, one number or ``[k]``.
        agents: names, for the message.

    Raises:
        ValueError: naming the first agent whose action is not.
    """
    wrong = (chosen < 0) | (chosen >= counts)
    if wrong.any():
        row = int(wrong.reshape(len(agents), -1).any(1).argmax())
        raise ValueError(
            f"The action {chosen[row]} of agent {agents[row]!r} does not exist: "
            f"expected an integer from 0 to {np.asarray(counts) - 1}."
        )


@final
class TableActions:
    """Every player picks one row of the same table."""

    def __init__(self, table: Table, prefixes: Sequence[str]) -> None:
        """Take the table.

        Args:
            table: all rows set the same names, which lack the player's prefix.
            prefixes: of each player, such as ``"1."``.

        Raises:
            ValueError: if there is no row, or rows set different names.
        """
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
        """Look up where ``world`` keeps each action; once per build.

        Raises:
            ValueError: if the level lacks an action or refuses a value.
        """
        for name in self._names:
            self._check_values(world, name)
        self._world = world
        self._discrete = self._lookup(world.discrete_index, np.int32)
        self._continuous = self._lookup(world.continuous_index, np.float64)

    def write(self, chosen: NDArray[np.int64]) -> None:
        """Tell the world what each player does, ``[n_players]``, each in the table."""
        places, values = self._discrete
        if places.size:
            self._world.discrete[places] = values[chosen]
        places, values = self._continuous
        if places.size:
            self._world.continuous[places] = values[chosen]

    def _lookup(
        self, index: Mapping[str, int], dtype: type[np.number[Any]]
    ) -> tuple[NDArray[np.intp], NDArray[Any]]:
        """Return places, ``[n_players, k]``, and the table's values for them."""
        names = [name for name in self._names if self._prefixes[0] + name in index]
        places = [[index[prefix + name] for name in names] for prefix in self._prefixes]
        values = [[row[name] for name in names] for row in self._table]
        return np.array(places, np.intp), np.array(values, dtype)

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
                    f"takes only {'integers from ' if whole else ''}{low} to {high}."
                )


def bounds(world: Lab2dWorld, name: str) -> tuple[float, float]:
    """Return the least and the greatest value of an action.

    Raises:
        ValueError: if the level has no such action.
    """
    if name in world.discrete_index:
        spec = world.lab.action_discrete_spec(name)
    elif name in world.continuous_index:
        spec = world.lab.action_continuous_spec(name)
    else:
        known = sorted(world.discrete_index) + sorted(world.continuous_index)
        raise ValueError(f"The level has no action {name!r}, only {known}.")
    return spec["min"], spec["max"]


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


@final
class PartActions:
    """Every player of a group sets each of its actions itself."""

    def __init__(
        self, parts: Parts, group: str, agents: Sequence[str], prefixes: Sequence[str]
    ) -> None:
        """Serve the players with these prefixes, who are the agents of ``group``."""
        self._parts = parts
        self._agents = agents
        self._prefixes = prefixes
        self._counts = parts.counts()
        least = np.array([low for _, low, _ in parts.discrete], np.int64)
        self._least = least
        limits = np.array([part[1:] for part in parts.continuous]).reshape(-1, 2)
        self._low, self._high = limits[:, 0], limits[:, 1]
        both = bool(parts.discrete and parts.continuous)
        self._discrete_key: Key = (group, "action", *(["discrete"] if both else []))
        self._continuous_key: Key = (group, "action", *(["continuous"] if both else []))

    def attach(self, world: Lab2dWorld) -> None:
        """Look up where ``world`` keeps each action; once per build."""
        self._world = world
        self._discrete = self._places(self._parts.discrete, world.discrete_index)
        self._continuous = self._places(self._parts.continuous, world.continuous_index)

    def write(self, row: Row, *, one_hot: bool) -> None:
        """Tell the world what the row says.

        Raises:
            ValueError: if a discrete action does not exist or a continuous one is NaN;
                continuous ones are clipped.
        """
        if self._discrete.size:
            chosen = row[self._discrete_key]
            if one_hot:
                chosen = chosen.argmax(-1)
            chosen = chosen.reshape(self._discrete.shape)
            check_chosen(chosen, self._counts, self._agents)
            self._world.discrete[self._discrete] = self._least + chosen  # type: ignore[operator]
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
                f"The action {values[index]} of agent {self._agents[index]!r} holds "
                "NaN: expected numbers, which are clipped to "
                f"{list(zip(self._low, self._high, strict=True))}."
            )

    def _places(
        self, parts: tuple[tuple[str, float, float], ...], index: Mapping[str, int]
    ) -> NDArray[np.intp]:
        names = [[prefix + part[0] for part in parts] for prefix in self._prefixes]
        places = [[index[name] for name in row] for row in names]
        return np.array(places, np.intp).reshape(len(places), len(parts))
