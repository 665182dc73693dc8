"""Lab2d's named actions: bounds, and tables of discrete actions."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

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
            ValueError: if the table is empty, or its rows set different actions.
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
