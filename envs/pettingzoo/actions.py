"""Converts a row's actions to what a PettingZoo environment accepts.

Box actions are copied in every step, because the environment may keep the array that it
receives.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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
        self._readers = {
            group: _reader(
                row, (group, "action"), rows[0].action, rows, one_hot=one_hot
            )
            for group, rows in groups.items()
        }
        readers = list(self._readers.values())
        self._only = readers[0] if len(readers) == 1 else None
        sizes = [len(rows) for rows in groups.values()]
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self._first = dict(zip(groups, starts, strict=True))

    def plan(self, agents: Iterable[Any]) -> Plan:
        """Return the plan with which ``read`` returns these agents' actions."""
        chosen = [self._specs[agent] for agent in agents]
        for group, reader in self._readers.items():
            reader.acting = {spec.row for spec in chosen if spec.group == group}
        return [(spec.agent, self._first[spec.group] + spec.row) for spec in chosen]

    def read(self, plan: Plan) -> dict[Any, Any]:
        """Map each agent of the plan to its action.

        Raises:
            ValueError: if an action is NaN or out of range, or is not one-hot although
                it must be; names group and agent.
        """
        actions: list[Any]
        if self._only is not None:
            actions = self._only.read()
        else:
            actions = []
            for reader in self._readers.values():
                actions += reader.read()
        return {agent: actions[index] for agent, index in plan}


class _ActionReader(ABC):
    """Reads the actions of one group for one action space, which may be nested."""

    def __init__(
        self, array: NDArray[Any], key: Key, specs: Sequence[AgentSpec]
    ) -> None:
        self.acting: set[int] = set()
        self._array = array
        self._key = key
        self._agents = [spec.name for spec in sorted(specs, key=lambda p: p.row)]

    @abstractmethod
    def read(self) -> list[Any]:
        """Return an action per row."""

    def _raise_if(self, bad: NDArray[np.bool_], problem: str) -> None:
        """Raise if ``bad``, shaped like the array, is True for an agent that acts."""
        for row in sorted(self.acting):
            if bad[row].any():
                raise ValueError(
                    f"The action {self._array[row].tolist()} of agent "
                    f"{self._agents[row]} in {'/'.join(self._key)} {problem}."
                )


@final
class _Discrete(_ActionReader):
    def __init__(
        self, array: NDArray[Any], key: Key, specs: Sequence[AgentSpec], space: Any
    ) -> None:
        super().__init__(array, key, specs)
        self._n = int(space.n)
        self._start = int(space.start)

    def read(self) -> list[Any]:
        numbers = self._array.tolist()
        if min(numbers) < 0 or max(numbers) >= self._n:
            bad = (self._array < 0) | (self._array >= self._n)
            self._raise_if(bad, f"is outside 0 to {self._n - 1}")
        # NumPy integers, as from action_space.sample(), which environments expect.
        if self._start:
            return list(self._array + self._start)
        return list(self._array)


@final
class _OneHot(_ActionReader):
    def __init__(
        self, array: NDArray[Any], key: Key, specs: Sequence[AgentSpec], space: Any
    ) -> None:
        super().__init__(array, key, specs)
        self._start = int(space.start)
        self._one_hot = OneHot(key, self._agents, int(space.n))

    def read(self) -> list[Any]:
        return list(self._one_hot.numbers(self._array, self.acting) + self._start)


@final
class _Integers(_ActionReader):
    """MultiDiscrete and MultiBinary."""

    def __init__(
        self, array: NDArray[Any], key: Key, specs: Sequence[AgentSpec], space: Any
    ) -> None:
        super().__init__(array, key, specs)
        discrete = isinstance(space, spaces.MultiDiscrete)
        self._n: NDArray[Any] = np.asarray(space.nvec if discrete else 2)
        self._start = space.start if discrete else 0
        self._dtype = space.dtype

    def read(self) -> list[Any]:
        bad = (self._array < 0) | (self._array >= self._n)
        if bad.any():
            self._raise_if(bad, f"is outside 0 to {self._n - 1}")
        return list((self._array + self._start).astype(self._dtype))


@final
class _Box(_ActionReader):
    def __init__(
        self, array: NDArray[Any], key: Key, specs: Sequence[AgentSpec], space: Any
    ) -> None:
        super().__init__(array, key, specs)
        self._low = np.tile(space.low.ravel(), len(specs))
        self._high = np.tile(space.high.ravel(), len(specs))
        bounds = {*self._low.tolist()}, {*self._high.tolist()}
        few = 0 < array.size <= _FEW and array.flags.c_contiguous
        few = few and array.dtype.char in _PYTHON_READS
        self._small = array.dtype == np.float16  # its squares may be infinite
        self._same = few and all(len(b) == 1 for b in bounds)
        self._least, self._most = (min(b, default=0.0) for b in bounds)
        if self._same:
            # Copying each row is faster than copying all rows and taking views.
            self._copies = [array[row, ...].copy for row in range(len(array))]
            numbers: Any = array.reshape(-1)
            self._numbers = memoryview(numbers).tolist

    def read(self) -> list[Any]:
        if self._same:
            # Usual case: a policy for this space writes actions within its bounds.
            numbers = self._numbers()
            total = sum(numbers)
            numbers.sort()
            within = self._least <= numbers[0] and numbers[-1] <= self._most
            # NaN compares false with everything, but it makes the sum NaN.
            if within and total == total:  # noqa: PLR0124 - faster than math.isnan
                return [copy() for copy in self._copies]
        clipped = np.maximum(self._array.ravel(), self._low)
        np.minimum(clipped, self._high, out=clipped)
        numbers = clipped.astype(np.float32) if self._small else clipped
        square = numbers.dot(numbers)  # NaN if and only if one of them is
        if square != square:  # noqa: PLR0124 - a tenth of the cost of np.isnan
            self._raise_if(np.isnan(self._array), "contains NaN")
        return list(clipped.reshape(self._array.shape))


@final
class _Nested(_ActionReader):
    """Dict and Tuple: combines the readers of their entries."""

    def __init__(
        self,
        parts: dict[str, _ActionReader],
        specs: Sequence[AgentSpec],
        *,
        named: bool,
    ) -> None:
        super().__init__(np.empty(0), (), specs)
        self._parts = parts
        self._named = named

    def read(self) -> list[Any]:
        for part in self._parts.values():
            part.acting = self.acting
        read = {name: part.read() for name, part in self._parts.items()}
        rows = range(len(self._agents))
        if self._named:
            return [{name: values[i] for name, values in read.items()} for i in rows]
        return [tuple(values[i] for values in read.values()) for i in rows]


def _reader(
    row: Row, key: Key, space: Space, specs: Sequence[AgentSpec], *, one_hot: bool
) -> _ActionReader:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = {
            str(name): _reader(row, (*key, str(name)), part, specs, one_hot=False)
            for name, part in parts_of(space)
        }
        return _Nested(parts, specs, named=isinstance(space, spaces.Dict))
    array = row[key]
    if isinstance(space, spaces.Discrete) and one_hot:
        return _OneHot(array, key, specs, space)
    if isinstance(space, spaces.Discrete):
        return _Discrete(array, key, specs, space)
    if isinstance(space, spaces.Box):
        return _Box(array, key, specs, space)
    return _Integers(array, key, specs, space)
