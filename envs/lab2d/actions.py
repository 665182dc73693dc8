"""Actions of Lab2d by name: their bounds, and tables in which each is one choice."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.envs.lab2d.world import Lab2dWorld

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
