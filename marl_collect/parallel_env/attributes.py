"""Attributes and methods of the environments in a batch, as lists.

``batch.name`` is the list of every environment's ``name``; if that is a method,
``batch.name(...)`` is the list of what it returns. A `View` asks some of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from marl_collect.parallel_env.messages import Ask, IsMethod

Asker = Callable[[Ask], list[Any]]
_STEPPING = frozenset(
    {
        "bind",
        "close",
        "load_state_dict",
        "rand_step",
        "reset",
        "reset_row",
        "rollout",
        "set_seed",
        "step",
        "step_and_maybe_reset",
        "step_row",
    }
)
"""What would leave an environment elsewhere than the batch believes it to be."""


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
    if name in _STEPPING:
        raise AttributeError(
            f"{name!r} of a single environment is not for its users while {kind} has "
            'it: step or reset some environments by writing "_step" or "_reset", bool '
            "[N], into what step() or reset() of the whole is given."
        )
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


@final
class View:
    """One environment of a batch, or some: their attributes, as they are now."""

    def __init__(
        self,
        kind: str,
        size: int,
        index: Any,
        ask_some: Callable[[Ask, Sequence[int]], list[Any]],
    ) -> None:
        """Look at ``index`` of ``size`` environments.

        Args:
            kind: class of the batch, for messages.
            size: how many environments there are.
            index: an integer, a slice, or a list or tensor of integers.
            ask_some: asks environments by their numbers.
        """
        chosen = chosen_of(index, size)
        single = isinstance(chosen, int)
        indices = [chosen] if isinstance(chosen, int) else chosen
        # Not by plain assignment, which views refuse.
        vars(self).update(
            _kind=kind, _single=single, _indices=indices, _ask_some=ask_some
        )

    def __len__(self) -> int:
        """How many environments this view shows."""
        return len(self._indices)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute, or a function that calls it there."""
        own = vars(self)
        indices: list[int] = own["_indices"]
        found = dispatch(
            f"{own['_kind']}[{own['_indices']}]",
            name,
            lambda question: own["_ask_some"](question, indices),
        )
        if not own["_single"]:
            return found
        if not callable(found):
            return found[0]

        def call(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **kwargs)[0]

        return call

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: what is written here would not reach the environments."""
        raise AttributeError(
            f"{name!r} cannot be set through a view: give the environments a method "
            "that sets it, and call that."
        )

    def __repr__(self) -> str:
        """Say which environments these are."""
        return f"<environments {self._indices} of {self._kind}>"


def chosen_of(index: Any, size: int) -> int | list[int]:
    """Return which of ``size`` environments an index means.

    Raises:
        IndexError: if there is no such environment.
        TypeError: for a mask of booleans, or what is no index.
    """
    if isinstance(index, slice):
        return list(range(size))[index]
    # Arrays and tensors, also those of one number, become plain integers or lists.
    numbers = index.tolist() if hasattr(index, "tolist") else index
    if isinstance(numbers, int) and not isinstance(numbers, bool):
        return range(size)[numbers]
    if not isinstance(numbers, (list, tuple)) or any(
        isinstance(n, bool) or not isinstance(n, int) for n in numbers
    ):
        raise TypeError(
            "Environments are chosen by an integer, a slice, or integers in a list or "
            f"tensor, but found {index!r}. For a mask, pass its nonzero() indices."
        )
    return [range(size)[n] for n in numbers]
