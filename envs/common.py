"""Helpers that all environment families use."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import Key

Array = NDArray[Any]
OptionsT = TypeVar("OptionsT")


@contextmanager
def closed_on_error(built: Any) -> Iterator[None]:
    """Close ``built`` if the block raises an error.

    Constructors use it, because nobody else can close what they built.
    """
    try:
        yield
    except BaseException:
        built.close()
        raise


def unbounded(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    """Return the space of all arrays of a shape and a dtype."""
    dtype = np.dtype(dtype)
    low: Any = -np.inf
    high: Any = np.inf
    if dtype.kind == "b":
        low, high = 0, 1
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return spaces.Box(low, high, shape, dtype)


def options_of(kind: type[OptionsT], arguments: Mapping[str, Any]) -> OptionsT:
    """Build the options dataclass ``kind`` from the arguments of a constructor.

    Constructors list their keywords explicitly, for readers and type checkers, and pass
    ``locals()``. A field without a matching keyword raises ``KeyError``.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: arguments[name] for name in names})


def defaults_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword arguments of a callable that have a default."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):  # Some compiled callables have no signature.
        return {}
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not inspect.Parameter.empty
    }


def task_setter(env: Any) -> Callable[[Any], None] | None:
    """Return the method ``set_task`` of an environment or of what it wraps, if any.

    Wrappers of Gymnasium do not pass it on, so each of them is asked.
    """
    layer = env
    while layer is not None:
        setter: Callable[[Any], None] | None = getattr(layer, "set_task", None)
        if setter is not None:
            return setter
        layer = getattr(layer, "env", None)
    return getattr(getattr(env, "unwrapped", env), "set_task", None)


def reset_options(env: Any, task: Any) -> dict[str, Any]:
    """Return a task as the ``options`` of ``env.reset``.

    Raises:
        TypeError: the task is no mapping, or ``reset`` takes no options.
    """
    inner = getattr(env, "unwrapped", env)
    parameters = inspect.signature(inner.reset).parameters.values()
    if not any(p.name == "options" or p.kind == p.VAR_KEYWORD for p in parameters):
        raise TypeError(
            f"{type(inner).__name__} takes no tasks: it needs a method set_task(task), "
            "or a reset(seed, options)."
        )
    if not isinstance(task, Mapping):
        raise TypeError(
            f"{type(inner).__name__} has no method set_task(task), so a task must be a "
            f"mapping, for reset(seed, options=task), but is {task!r:.100}."
        )
    return dict(task)


def is_safe_number(value: Any, default: Any) -> bool:
    """Return whether a number from a file may replace the default of an argument.

    A number, a switch or a list of these names no code, no file and no folder where the
    argument is one by default.
    """
    return _is_number(default) and (value is None or _is_number(value))


def _is_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_number, value))
    return isinstance(value, (bool, int, float)) and not isinstance(value, Enum)


@final
class OneHot:
    """Converts the one-hot actions of one group to action numbers."""

    def __init__(self, key: Key, agents: Sequence[str], n_actions: int) -> None:
        """Prepare for arrays ``[n_agents, n_actions]``.

        Args:
            key: key of the actions, for messages.
            agents: agent names in row order, for messages.
            n_actions: number of actions.
        """
        self._key = key
        self._agents = agents
        self._n_actions = n_actions
        self._starts = np.arange(len(agents)) * n_actions
        self._ones = [1] * len(agents)

    def numbers(self, array: Array, acting: Iterable[int] | None = None) -> Array:
        """Return the action number of each row, int64 ``[n_agents]``.

        Args:
            array: one-hot rows.
            acting: rows to check; the others may contain anything. None: all rows.

        Raises:
            ValueError: if a row is not one-hot; names group and agent.
        """
        flat = array.reshape(-1)
        positions = flat.nonzero()[0]
        if len(positions) == len(self._ones) and flat[positions].tolist() == self._ones:
            numbers: Array = positions - self._starts
            values = numbers.tolist()
            if min(values) >= 0 and max(values) < self._n_actions:
                return numbers
        bad = ((array != 0).sum(-1) != 1) | (array.max(-1) != 1)
        for row in range(len(bad)) if acting is None else sorted(acting):
            if bad[row]:
                raise ValueError(
                    f"The action {array[row].tolist()} of agent {self._agents[row]} in "
                    f"{'/'.join(self._key)} is not one-hot: expected {self._n_actions} "
                    "numbers, a single 1 and zeros. To use action numbers instead, "
                    "build the environment with categorical_actions=True."
                )
        return array.argmax(-1)
