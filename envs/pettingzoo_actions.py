"""Reads a row's actions and makes them what a PettingZoo environment accepts.

Every step makes new arrays for Box actions: an environment may keep the action that
it was given, and memory that is used again would change it behind its back.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.description import Key, Row
from marl_collect.envs.pettingzoo_description import Place, Space

Plan = Sequence[tuple[Any, int, int]]
"""Agent, index of its group's reader, index of its row."""


@final
class Actions:
    """The actions of one environment."""

    def __init__(self, row: Row, places: Iterable[Place], *, one_hot: bool) -> None:
        """Read from ``row``."""
        self._places = {place.agent: place for place in places}
        members: dict[str, list[Place]] = {}
        for place in self._places.values():
            members.setdefault(place.group, []).append(place)
        self._numbers = {group: k for k, group in enumerate(members)}
        self._readers = [
            _reader(row, (group, "action"), rows[0].action, rows, one_hot=one_hot)
            for group, rows in members.items()
        ]

    def plan(self, agents: Iterable[Any]) -> Plan:
        """Return the plan by which :meth:`read` reads these agents' actions."""
        chosen = [self._places[agent] for agent in agents]
        for reader in self._readers:
            reader.acting.clear()
        for place in chosen:
            self._readers[self._numbers[place.group]].acting.add(place.row)
        return [(p.agent, self._numbers[p.group], p.row) for p in chosen]

    def read(self, plan: Plan) -> dict[Any, Any]:
        """Return agent to action.

        Raises:
            ValueError: naming group and agent, for NaN and for a number that no
                Discrete action has.
        """
        groups = [reader.read() for reader in self._readers]
        return {agent: groups[group][row] for agent, group, row in plan}


class _Reader(ABC):
    """Actions of one space of one group."""

    def __init__(self, array: NDArray[Any], key: Key, places: Sequence[Place]) -> None:
        self.acting: set[int] = set()
        self._array = array
        self._key = key
        self._agents = [place.name for place in sorted(places, key=lambda p: p.row)]

    @abstractmethod
    def read(self) -> Sequence[Any]:
        """Return an action per row."""

    def _blame(self, bad: NDArray[np.bool_], problem: str) -> None:
        """Raise if an agent that acts is among the ``bad`` rows."""
        for row in np.flatnonzero(bad):
            if int(row) in self.acting:
                raise ValueError(
                    f"The action {self._array[row].tolist()} of agent "
                    f"{self._agents[row]} in {'/'.join(self._key)} {problem}."
                )


@final
class _Discrete(_Reader):
    def __init__(
        self, array: NDArray[Any], key: Key, places: Sequence[Place], space: Any
    ) -> None:
        super().__init__(array, key, places)
        self._n = int(space.n)
        self._start = int(space.start)

    def read(self) -> Sequence[Any]:
        numbers = self._array.tolist()
        if min(numbers) < 0 or max(numbers) >= self._n:
            bad = (self._array < 0) | (self._array >= self._n)
            self._blame(bad, f"is outside 0 to {self._n - 1}")
        # NumPy integers, as action_space.sample() returns: what environments expect.
        if self._start:
            return list(self._array + self._start)
        return list(self._array)


@final
class _OneHot(_Reader):
    def __init__(
        self, array: NDArray[Any], key: Key, places: Sequence[Place], space: Any
    ) -> None:
        super().__init__(array, key, places)
        self._start = int(space.start)

    def read(self) -> Sequence[Any]:
        return list(self._array.argmax(-1) + self._start)


@final
class _Integers(_Reader):
    """MultiDiscrete and MultiBinary."""

    def __init__(
        self, array: NDArray[Any], key: Key, places: Sequence[Place], space: Any
    ) -> None:
        super().__init__(array, key, places)
        discrete = isinstance(space, spaces.MultiDiscrete)
        self._n = space.nvec if discrete else 2
        self._start = space.start if discrete else 0
        self._dtype = space.dtype

    def read(self) -> Sequence[Any]:
        bad = (self._array < 0) | (self._array >= self._n)
        if bad.any():
            axes = tuple(range(1, bad.ndim))
            self._blame(bad.any(axes), f"is outside 0 to {np.asarray(self._n) - 1}")
        actions: Sequence[Any] = (self._array + self._start).astype(self._dtype)
        return actions


@final
class _Box(_Reader):
    def __init__(
        self, array: NDArray[Any], key: Key, places: Sequence[Place], space: Any
    ) -> None:
        super().__init__(array, key, places)
        self._low = space.low
        self._high = space.high

    def read(self) -> Sequence[Any]:
        clipped = np.maximum(self._array, self._low)
        np.minimum(clipped, self._high, out=clipped)
        flat = clipped.reshape(-1)
        square = flat.dot(flat)  # NaN if and only if one of them is
        if square != square:  # noqa: PLR0124 - a tenth of the cost of np.isnan
            bad = np.isnan(self._array)
            self._blame(bad.any(tuple(range(1, bad.ndim))), "is not a number")
        actions: Sequence[Any] = clipped
        return actions


@final
class _Nested(_Reader):
    """Dict and Tuple, from the readers of what they hold."""

    def __init__(
        self, parts: dict[str, _Reader], places: Sequence[Place], *, named: bool
    ) -> None:
        super().__init__(np.empty(0), (), places)
        self._parts = parts
        self._named = named

    def read(self) -> Sequence[Any]:
        for part in self._parts.values():
            part.acting = self.acting
        read = {name: part.read() for name, part in self._parts.items()}
        rows = range(len(self._agents))
        if self._named:
            return [{name: values[i] for name, values in read.items()} for i in rows]
        return [tuple(values[i] for values in read.values()) for i in rows]


def _reader(
    row: Row, key: Key, space: Space, places: Sequence[Place], *, one_hot: bool
) -> _Reader:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        named = isinstance(space, spaces.Dict)
        inner = space.spaces.items() if named else enumerate(space.spaces)  # type: ignore[union-attr]
        parts = {
            str(name): _reader(row, (*key, str(name)), part, places, one_hot=False)
            for name, part in inner
        }
        return _Nested(parts, places, named=named)
    array = row[key]
    if isinstance(space, spaces.Discrete):
        kind: type[_Reader] = _OneHot if one_hot else _Discrete
        return kind(array, key, places, space)  # type: ignore[call-arg]
    if isinstance(space, spaces.Box):
        return _Box(array, key, places, space)
    return _Integers(array, key, places, space)
