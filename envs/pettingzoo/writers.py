"""Copies one agent's observation into its memory, and says what does not fit.

Values are cast to the dtype of the space (a list or float64 array too); shapes must
be those of the space.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import Key, Row
from marl_collect.envs.pettingzoo.groups import AgentSpec, Space, parts_of

Writer: TypeAlias = Callable[[Any], None]
Array: TypeAlias = NDArray[Any]


def unknown(agent: Any, agents: Iterable[Any]) -> ValueError:
    """Return the error for data of an agent that possible_agents does not name."""
    return ValueError(
        f"The environment returned data of {agent!r}, which is not among its "
        f"possible_agents {list(agents)}."
    )


def observation_writer(row: Row, key: Key, space: Space, spec: AgentSpec) -> Writer:
    """Return what writes an observation of ``space`` to the row of ``spec``."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = [
            (name, observation_writer(row, (*key, str(name)), part, spec))
            for name, part in parts_of(space)
        ]
        return _nested(parts, spec, key)
    view = row[key][spec.row, ...]
    shape = tuple(space.shape or ())
    if len(shape) == 1 and view.shape != shape:
        view = view[: shape[0]]  # the rest is the agent's identity
    return _leaf(view, spec.name, "/".join(key))


def _nested(parts: list[tuple[Any, Writer]], spec: AgentSpec, key: Key) -> Writer:
    def write(value: Any) -> None:
        for name, part in parts:
            try:
                entry = value[name]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"The observation of agent {spec.name} lacks {name!r} of "
                    f"{'/'.join(key)}: found {summary(value)}."
                ) from error
            part(entry)

    return write


def _leaf(view: Array, agent: str, where: str) -> Writer:
    shape = view.shape
    ndarray = np.ndarray
    vector = len(shape) == 1 and view.size > 0
    # A vector of the very same dtype is copied in half of the time, and checked, as
    # plain memory. Of other shapes memoryviews cannot assign.
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
                except ValueError:  # It has another shape, as is said below.
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
    """Write ``value``, whatever it is, into ``view``, cast to its dtype.

    Args:
        view: the memory.
        value: of the same shape.
        agent: whose value it is, for messages; None for nobody's.
        where: what it is, for messages.

    Raises:
        ValueError: naming agent and key, if it is not numbers, if its shape differs,
            or if the dtype cannot hold it, as int8 cannot hold 0.5 or 200.
    """
    whose = where if agent is None else f"{where} of agent {agent}"
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{whose} must be numbers of shape {view.shape}, but the "
            f"environment returned {summary(value)}."
        )
    if array.shape != view.shape:
        raise ValueError(
            f"{whose} must have the shape {view.shape}, but the "
            f"environment returned the shape {array.shape}."
        )
    if not _holds(view.dtype, array.dtype):
        with np.errstate(invalid="ignore"):
            kept = array.astype(view.dtype)
        if not np.array_equal(kept, array):
            lost = array[kept != array].flat[0]
            raise ValueError(
                f"{whose} has the dtype {array.dtype} and the value "
                f"{lost}, which its space's dtype {view.dtype} cannot hold."
            )
    view[...] = array


def _holds(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether ``dtype`` has room for all values of ``other``, but for their digits."""
    # "same_kind" lets int64 into int8, where numbers wrap.
    return np.can_cast(other, dtype, "same_kind" if dtype.kind == "f" else "safe")


def summary(value: object) -> str:
    """Return ``value`` in a few words, for messages."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
