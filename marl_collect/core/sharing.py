"""Finds simulators that several environments of one process share."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

_SPACES = ("action_space", "action_spaces", "action_spec", "possible_agents")
"""Attributes by which a simulator is known, besides ``reset`` and ``step``."""
_FEW = 100
"""Entries of a list that may hold simulators; longer ones hold data."""


def simulators(env: Any) -> Iterator[Any]:
    """Yield ``env`` and all simulators inside, the innermost last.

    Simulators are found through the attributes of ``env`` and of the wrappers inside,
    and through ``unwrapped``.
    """
    known = {id(env)}
    pending = [env]
    while pending:
        outer = pending.pop(0)
        yield outer
        for value in _held(outer):
            if id(value) not in known and _is_simulator(value):
                known.add(id(value))
                pending.append(value)


def attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, without those of its class."""
    values = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots: Any = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            with suppress(AttributeError):
                values[name] = object.__getattribute__(thing, name)
    return values


def _held(thing: Any) -> Iterator[Any]:
    """Yield what the attributes of ``thing`` hold, also in lists and dicts."""
    values = list(attributes(thing).values())
    # A property of an unfinished wrapper may fail in any way.
    with suppress(Exception):
        values.append(thing.unwrapped)
    for value in values:
        yield value
        if isinstance(value, (dict, list, tuple)) and len(value) <= _FEW:
            yield from value.values() if isinstance(value, dict) else value


def _is_simulator(thing: Any) -> bool:
    """Return whether ``thing`` is an environment that keeps its state itself.

    A function of a state and actions, as in JAX, may be shared.
    """
    if isinstance(thing, (type, ModuleType)):
        return False
    kind = type(thing)
    if not (callable(getattr(kind, "reset", None)) and hasattr(kind, "step")):
        return False
    known = getattr(thing, "__dict__", {}).keys()
    if not any(name in known or hasattr(kind, name) for name in _SPACES):
        return False
    try:
        inspect.signature(kind.step).bind(thing, None)
    except TypeError:
        return False
    except ValueError:  # A compiled method may have no signature.
        return True
    return True
