"""Converts a row's actions to what a PettingZoo environment accepts.

Box actions are copied in every step, because the environment may keep the array that it
receives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.action_check import refusal, suspicion
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

    def rows_that_act() -> NDArray[np.bool_]:
        return np.isin(range(len(agents)), list(acting))

    def read_space(key: Key, space: Space) -> Reader:
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            parts = {
                name: read_space((*key, str(name)), part)
                for name, part in parts_of(space)
            }
            return _nested(parts, len(agents), named=isinstance(space, spaces.Dict))
        array = row[key]
        # One-hot actions are not nested.
        if one_hot and isinstance(space, spaces.Discrete) and len(key) == 2:
            return _one_hot(array, space, OneHot(key, agents, int(space.n)), acting)
        refuse = refusal(key, space, array, agents, rows_that_act)
        if isinstance(space, spaces.Discrete):
            return _discrete(array, space, refuse)
        if isinstance(space, spaces.Box):
            return _box(array, space, refuse)
        return _integers(array, space, refuse)

    return read_space(key, specs[0].action)


def _discrete(
    array: NDArray[Any], space: spaces.Discrete, refuse: Callable[[], None]
) -> Reader:
    n, start = int(space.n), int(space.start)
    plain = start == 0 and array.dtype == space.dtype

    def read() -> list[Any]:
        numbers = array.tolist()
        if min(numbers) < 0 or max(numbers) >= n:
            refuse()
        # NumPy integers, as from action_space.sample(), which environments expect.
        return list(array) if plain else list((array + start).astype(space.dtype))

    return read


def _one_hot(
    array: NDArray[Any], space: spaces.Discrete, one_hot: OneHot, acting: set[int]
) -> Reader:
    start = int(space.start)

    def read() -> list[Any]:
        numbers = one_hot.numbers(array, acting) + start
        return list(numbers.astype(space.dtype, copy=False))

    return read


def _integers(array: NDArray[Any], space: Any, refuse: Callable[[], None]) -> Reader:
    """Read MultiDiscrete and MultiBinary actions."""
    start = space.start if isinstance(space, spaces.MultiDiscrete) else 0
    is_suspicious = suspicion(array, space)

    def read() -> list[Any]:
        if is_suspicious():
            refuse()
        return list((array + start).astype(space.dtype))

    return read


def _box(array: NDArray[Any], space: spaces.Box, refuse: Callable[[], None]) -> Reader:
    low = np.tile(space.low.ravel(), len(array))
    high = np.tile(space.high.ravel(), len(array))
    small = array.dtype == np.float16  # Its squares may be infinite.

    def read() -> list[Any]:
        clipped = np.maximum(array.ravel(), low)
        np.minimum(clipped, high, out=clipped)
        numbers = clipped.astype(np.float32) if small else clipped
        square = numbers.dot(numbers)  # NaN if and only if one of them is
        if square != square:  # noqa: PLR0124 - a tenth of the cost of np.isnan
            refuse()
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
