"""Writes observations and rewards to their memory, and reports what does not fit.

Values, including lists and float64 arrays, are cast to the dtype of the space. Values
must have the shape of the space.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Key, Row
from marl_collect.envs.pettingzoo.groups import AgentSpec, Space, parts_of, summary

Writer: TypeAlias = Callable[[Any], None]
Array: TypeAlias = NDArray[Any]


def unknown_agent(agent: Any, agents: Iterable[Any]) -> ValueError:
    """Return the error for data of an agent that is not in ``possible_agents``."""
    return ValueError(
        f"The environment returned data of {agent!r}, which is not one of its "
        f"possible_agents {list(agents)}."
    )


def observation_writer(row: Row, key: Key, space: Space, spec: AgentSpec) -> Writer:
    """Return a function that writes an observation of ``space`` to an agent's row."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = [
            (name, observation_writer(row, (*key, str(name)), part, spec))
            for name, part in parts_of(space)
        ]
        return _nested(parts, spec, key)
    view = row[key][spec.row, ...]
    shape = tuple(space.shape or ())
    if len(shape) == 1 and view.shape != shape:
        view = view[: shape[0]]  # the agent's identity follows
    return _leaf(view, spec.name, "/".join(key))


def _nested(parts: list[tuple[Any, Writer]], spec: AgentSpec, key: Key) -> Writer:
    def write(value: Any) -> None:
        for name, part in parts:
            try:
                entry = value[name]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"The observation of agent {spec.name} must have the entry "
                    f"{name!r} in {'/'.join(key)}, but found {summary(value)}."
                ) from error
            part(entry)

    return write


def _leaf(view: Array, agent: str, where: str) -> Writer:
    shape = view.shape
    ndarray = np.ndarray
    vector = len(shape) == 1 and view.size > 0
    # For a vector of the same dtype, assigning to a memoryview takes half of NumPy's
    # time and checks the shape. Memoryviews cannot assign other shapes.
    memory: Any = memoryview(view) if vector else None  # type: ignore[arg-type]
    same = view.dtype if vector else None
    trusted = view.dtype

    def write(value: Any) -> None:
        nonlocal trusted
        if value.__class__ is ndarray:
            dtype = value.dtype
            if dtype is same:
                try:
                    memory[:] = value
                except ValueError:  # wrong shape; fill() raises the error
                    pass
                else:
                    return
            elif dtype is trusted and value.shape == shape:
                view[...] = value
                return
        fill(view, value, agent, where)
        if value.__class__ is ndarray and _holds(view.dtype, value.dtype):
            trusted = value.dtype

    return write


def fill(view: Array, value: Any, agent: object, where: str) -> None:
    """Write ``value`` to ``view``, cast to its dtype.

    Args:
        view: the memory.
        value: numbers of the same shape; any type that NumPy converts.
        agent: agent that the value belongs to, for messages; None if it belongs to
            none.
        where: description of the value, for messages.

    Raises:
        ValueError: if ``value`` is not numeric, has another shape, or cannot be
            represented in the dtype (as 0.5 or 200 in int8); names agent and key.
    """
    whose = where if agent is None else f"{where} of agent {agent}"
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{whose} must be an array of numbers of shape {view.shape}, but the "
            f"environment returned {summary(value)}."
        )
    if array.shape != view.shape:
        raise ValueError(
            f"{whose} must have the shape {view.shape}, but the "
            f"environment returned the shape {array.shape}."
        )
    if not _holds(view.dtype, array.dtype):
        with np.errstate(invalid="ignore"):
            cast = array.astype(view.dtype)
        if not (cast == array).all():
            lost = array[cast != array].flat[0]
            raise ValueError(
                f"{whose} must fit the dtype {view.dtype} of its space, but the "
                f"environment returned the value {lost} of dtype {array.dtype}."
            )
    view[...] = array


def _holds(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether ``dtype`` can hold all values of ``other``, apart from rounding."""
    # "same_kind" would allow int64 to int8, where numbers wrap around.
    return np.can_cast(other, dtype, "same_kind" if dtype.kind == "f" else "safe")


@final
class Rewards:
    """Writes the rewards of one environment's agents."""

    def __init__(
        self, row: Row, description: EnvDescription, specs: Sequence[AgentSpec]
    ) -> None:
        """Write float32 rewards to ``row``."""
        groups = description.groups
        self._rows = [row[group, "reward"] for group in groups]
        # Assigning a number to a memoryview takes a third of NumPy's time.
        memory: dict[str, Any] = {
            group: memoryview(row[group, "reward"][:, 0])  # type: ignore[arg-type]
            for group in groups
        }
        self._specs = {spec.agent: (memory[spec.group], spec.row) for spec in specs}
        # A single call writes all rewards if their memory is in agent order.
        self._memory = next(iter(memory.values()))
        self._agents = [spec.agent for spec in sorted(specs, key=lambda p: p.row)]
        self._in_order = len(groups) == 1 and self._memory.contiguous
        self._pack = struct.Struct(f"{len(specs)}f").pack_into
        self._totals: list[tuple[Array, Array, Array]] = [
            (
                row[group, "reward"],
                row[group, "episode_reward"],
                np.zeros((g.n_agents, 1)),
            )
            for group, g in groups.items()
            if g.episode_reward
        ]

    def begin(self) -> None:
        """Reset the sums for a new episode."""
        for _, _, total in self._totals:
            total.fill(0)

    def write(self, rewards: Mapping[Any, Any], absent: Collection[Any]) -> None:
        """Write the rewards of this step; agents without a reward get 0.

        Args:
            rewards: agent to reward.
            absent: agents whose rewards are ignored.

        Raises:
            ValueError: if an agent is unknown or its reward is not a number; names the
                agent.
        """
        if not absent and self._in_order and [*rewards] == self._agents:
            try:
                self._pack(self._memory, 0, *rewards.values())
            except (struct.error, TypeError, ValueError, OverflowError):
                self._write_each(
                    rewards, absent
                )  # raises an error that names the agent
        else:
            self._write_each(rewards, absent)
        for step, total_row, total in self._totals:
            total += step
            total_row[...] = total

    def by_agent(self) -> Iterator[tuple[Any, float]]:
        """Yield each agent and its reward of this step, as written."""
        for agent, (memory, index) in self._specs.items():
            yield agent, float(memory[index])

    def clear(self) -> None:
        """Write zeros."""
        for row in self._rows:
            row.fill(0)

    def _write_each(self, rewards: Mapping[Any, Any], absent: Collection[Any]) -> None:
        if absent or len(rewards) < len(self._agents):
            self.clear()
        for agent, reward in rewards.items():
            if agent not in absent:
                if agent not in self._specs:
                    raise unknown_agent(agent, self._specs)
                memory, index = self._specs[agent]
                try:
                    memory[index] = reward
                except (TypeError, ValueError, OverflowError) as error:
                    raise ValueError(
                        f"The reward of agent {agent} must be a number, but is "
                        f"{reward!r}. If each objective has a reward of its own, sum "
                        "them in a wrapper of the raw environment."
                    ) from error
