"""Attributes and methods of the environments in a batch, as lists.

``batch.name`` is the list of every environment's ``name``; if that is a method,
``batch.name(...)`` is the list of what it returns.
"""

from collections.abc import Callable
from typing import Any

from marl_collect.parallel_env.messages import Ask, IsMethod

Asker = Callable[[Ask], list[Any]]


def dispatch(kind: str, name: str, asker: Asker) -> Any:
    """Return the attribute of all environments, or a function that calls theirs.

    Args:
        kind: class of the batch, for messages.
        name: of the attribute.
        asker: asks every environment.

    Raises:
        AttributeError: for a private name, or one that they do not have.
    """
    if name.startswith("_"):
        # Also what copy, pickle and notebooks look for: never a matter of theirs.
        raise AttributeError(f"{kind} has no attribute {name!r}")
    values = asker(Ask(name))
    if not any(isinstance(value, IsMethod) for value in values):
        return values

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        return asker(Ask(name, call=True, args=args, kwargs=kwargs))

    call.__name__ = name
    call.__doc__ = f"Call {name} of every environment and return the list of results."
    return call


def ask(env: Any, question: Ask) -> Any:
    """Return what one environment says to a question."""
    value = getattr(env, question.name)
    if question.call:
        return value(*question.args, **question.kwargs)
    return IsMethod() if callable(value) else value
