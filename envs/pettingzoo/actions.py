"""Converts a row's actions to what a PettingZoo environment accepts.

Box actions are copied in every step, because the environment may keep the array that it
receives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import Key, Row
from marl_collect.envs.common import OneHot
from marl_collect.envs.pettingzoo.groups import AgentSpec, Space, parts_of

_FEW = 32
"""Up to this many numbers, Python checks them faster than NumPy."""
_PYTHON_READS = "?bBhHiIlLqQfd"
"""Number formats that a memoryview reads; float16 is not one of them."""

Reader = Callable[[], list[Any]]
"""Returns an action per row of one group."""

Plan = Sequence[tuple[Any, int]]
"""Agents, and the index of each agent's action among the actions of all groups."""


@final
class Actions:
    """The actions of one environment."""

    def __init__(self, row: Row, specs: Iterable[AgentSpec], *, one_hot: bool) -> None:
        """Read from ``row``."""
        self._specs = {spec.agent: spec for spec in specs}
        groups: dict[str, list[AgentSpec]] = {}
        for spec in self._specs.values():
            groups.setdefault(spec.group, []).append(spec)
        self._acting: dict[str, set[int]] = {group: set() for group in groups}
        readers = [
            _reader(row, (group, "action"), mine, self._acting[group], one_hot=one_hot)
            for group, mine in groups.items()
        ]
        self._read_all = readers[0] if len(readers) == 1 else _concatenated(readers)
        sizes = [len(mine) for mine in groups.values()]
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self._first = dict(zip(groups, starts, strict=True))

    def plan(self, agents: Iterable[Any]) -> Plan:
        """Return the plan with which ``read`` returns these agents' actions."""
        chosen = [self._specs[agent] for agent in agents]
        for acting in self._acting.values():
            acting.clear()
        for spec in chosen:
            self._acting[spec.group].add(spec.row)
        return [(spec.agent, self._first[spec.group] + spec.row) for spec in chosen]

    def read(self, plan: Plan) -> dict[Any, Any]:
        """Map each agent of the plan to its action.

        Raises:
            ValueError: if an action is NaN or out of range, or is not one-hot although
                it must be; names group and agent.
        """
        actions = self._read_all()
        return {agent: actions[index] for agent, index in plan}


def _concatenated(readers: Sequence[Reader]) -> Reader:
    return lambda: [action for read in readers for action in read()]


def _reader(
    row: Row,
    key: Key,
    specs: Sequence[AgentSpec],
    acting: set[int],
    *,
    one_hot: bool,
) -> Reader:
    """Return the reader of a group.

    Args:
        row: the memory.
        key: of the actions.
        specs: of the group's agents.
        acting: rows of the agents that act; the caller changes it.
        one_hot: whether Discrete actions are stored one-hot.
    """
    agents = [spec.name for spec in sorted(specs, key=lambda spec: spec.row)]

    def read_space(key: Key, space: Space) -> Reader:
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            parts = {
                name: read_space((*key, str(name)), part)
                for name, part in parts_of(space)
            }
            return _nested(parts, len(agents), named=isinstance(space, spaces.Dict))
        rows = _Rows(row[key], key, agents, acting)
        if isinstance(space, spaces.Discrete):
            # One-hot actions are not nested.
            return (
                _one_hot(rows, space)
                if one_hot and len(key) == 2
                else _discrete(rows, space)
            )
        if isinstance(space, spaces.Box):
            return _box(rows, space)
        return _integers(rows, space)

    return read_space(key, specs[0].action)


@final
@dataclass(frozen=True)
class _Rows:
    """The actions of one group, or one entry of nested actions.

    Attributes:
        array: ``[n, ...]``.
        key: of the array.
        agents: name of the agent in each row.
        acting: rows of the agents that act, at present.
    """

    array: NDArray[Any]
    key: Key
    agents: Sequence[str]
    acting: set[int]

    def raise_if(self, bad: NDArray[np.bool_], problem: str) -> None:
        """Raise if ``bad``, shaped like the array, is True for an agent that acts."""
        for row in sorted(self.acting):
            if bad[row].any():
                raise ValueError(
                    f"The action {self.array[row].tolist()} of agent "
                    f"{self.agents[row]} in {'/'.join(self.key)} {problem}."
                )


def _discrete(rows: _Rows, space: spaces.Discrete) -> Reader:
    array, n, start = rows.array, int(space.n), int(space.start)
    plain = start == 0 and array.dtype == space.dtype

    def read() -> list[Any]:
        numbers = array.tolist()
        if min(numbers) < 0 or max(numbers) >= n:
            rows.raise_if((array < 0) | (array >= n), f"is outside 0 to {n - 1}")
        # NumPy integers, as from action_space.sample(), which environments expect.
        return list(array) if plain else list((array + start).astype(space.dtype))

    return read


def _one_hot(rows: _Rows, space: spaces.Discrete) -> Reader:
    one_hot = OneHot(rows.key, rows.agents, int(space.n))
    start = int(space.start)

    def read() -> list[Any]:
        numbers = one_hot.numbers(rows.array, rows.acting) + start
        return list(numbers.astype(space.dtype, copy=False))

    return read


def _integers(rows: _Rows, space: Any) -> Reader:
    """Read MultiDiscrete and MultiBinary actions."""
    discrete = isinstance(space, spaces.MultiDiscrete)
    n: NDArray[Any] = np.asarray(space.nvec if discrete else 2)
    start = space.start if discrete else 0
    array = rows.array

    def read() -> list[Any]:
        bad = (array < 0) | (array >= n)
        if bad.any():
            rows.raise_if(bad, f"is outside 0 to {n - 1}")
        return list((array + start).astype(space.dtype))

    return read


def _box(rows: _Rows, space: spaces.Box) -> Reader:
    array = rows.array
    low = np.tile(space.low.ravel(), len(rows.agents))
    high = np.tile(space.high.ravel(), len(rows.agents))

    small = array.dtype == np.float16  # Its squares may be infinite.

    def read() -> list[Any]:
        clipped = np.maximum(array.ravel(), low)
        np.minimum(clipped, high, out=clipped)
        numbers = clipped.astype(np.float32) if small else clipped
        square = numbers.dot(numbers)  # NaN if and only if one of them is
        if square != square:  # noqa: PLR0124 - a tenth of the cost of np.isnan
            rows.raise_if(np.isnan(array), "contains NaN")
        actions = clipped.reshape(array.shape)
        # Rows without a dimension are arrays too, as from action_space.sample().
        return list(actions) if actions.ndim > 1 else [actions[i, ...] for i in indices]

    indices = range(len(array))
    bounds = {*low.tolist()}, {*high.tolist()}
    few = 0 < array.size <= _FEW and array.flags.c_contiguous
    few = few and array.dtype.char in _PYTHON_READS
    if not few or any(len(bound) != 1 for bound in bounds):
        return read
    (least,), (most,) = bounds
    # Copying each row is faster than copying all rows and taking views.
    copies = [array[row, ...].copy for row in range(len(array))]
    flat: Any = array.reshape(-1)
    read_numbers = memoryview(flat).tolist

    def read_few() -> list[Any]:
        # Usual case: a policy for this space writes actions within its bounds.
        numbers = read_numbers()
        total = sum(numbers)
        numbers.sort()
        within = least <= numbers[0] and numbers[-1] <= most
        # NaN compares false with everything, but it makes the sum NaN.
        if within and total == total:  # noqa: PLR0124 - faster than math.isnan
            return [copy() for copy in copies]
        return read()

    return read_few


def _nested(parts: Mapping[Any, Reader], rows: int, *, named: bool) -> Reader:
    """Read Dict and Tuple actions: combine the readers of their entries."""

    def read() -> list[Any]:
        entries = {name: part() for name, part in parts.items()}
        if named:
            return [
                {name: values[i] for name, values in entries.items()}
                for i in range(rows)
            ]
        return [tuple(values[i] for values in entries.values()) for i in range(rows)]

    return read
