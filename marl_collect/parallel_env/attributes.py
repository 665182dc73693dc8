"""Attributes and methods of the environments in a batch, as lists.

``batch.name`` is the list of every environment's ``name``. If that is a method,
``batch.name(...)`` is the list of its results. A ``View`` covers some environments.
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
"""Methods that would change an environment's state without the batch noticing."""


def dispatch(kind: str, name: str, asker: Asker) -> Any:
    """Return the attribute of all environments, or a function that calls theirs.

    Args:
        kind: class of the batch, for error messages.
        name: of the attribute.
        asker: asks every environment.

    Raises:
        AttributeError: the name is private, or the environments do not have it.
    """
    if name.startswith("_"):
        # Includes what copy, pickle and notebooks look up on the batch itself.
        raise AttributeError(f"{kind} has no attribute {name!r}")
    if name in _STEPPING:
        raise AttributeError(
            f"{name!r} cannot be called on single environments of a {kind}. To step or "
            'reset some of them, set "_step" or "_reset", bool [N], in the TensorDict '
            "that is passed to step() or reset() of the batch."
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
    """Return one environment's answer to a question."""
    value = getattr(env, question.name)
    if question.call:
        return value(*question.args, **question.kwargs)
    return IsMethod() if callable(value) else value


@final
class View:
    """The current attributes of one or several environments of a batch."""

    def __init__(
        self,
        kind: str,
        size: int,
        index: Any,
        ask_some: Callable[[Ask, Sequence[int]], list[Any]],
    ) -> None:
        """Select ``index`` of ``size`` environments.

        Args:
            kind: class of the batch, for error messages.
            size: number of environments.
            index: an integer, a slice, or a list or tensor of integers.
            ask_some: asks environments by their indices.
        """
        chosen = chosen_of(index, size)
        single = isinstance(chosen, int)
        indices = [chosen] if isinstance(chosen, int) else chosen
        # Plain assignment would call __setattr__, which raises.
        vars(self).update(
            _kind=kind, _single=single, _indices=indices, _ask_some=ask_some
        )

    def __len__(self) -> int:
        """Return the number of environments in this view."""
        return len(self._indices)

    @property
    def num_workers(self) -> int:
        """The same, as in TorchRL."""
        return len(self)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute, or a function that calls it there."""
        state = vars(self)
        indices: list[int] = state["_indices"]
        values = dispatch(
            f"{state['_kind']}[{state['_indices']}]",
            name,
            lambda question: state["_ask_some"](question, indices),
        )
        if not state["_single"]:
            return values
        if not callable(values):
            return values[0]

        def call(*args: Any, **kwargs: Any) -> Any:
            return values(*args, **kwargs)[0]

        return call

    def __setattr__(self, name: str, value: object) -> None:
        """Raise an error: an assignment would not reach the environments."""
        raise AttributeError(
            f"{name!r} cannot be set through a view: add a method that sets it to the "
            "environments, and call that method."
        )

    def __repr__(self) -> str:
        """Name the environments of this view."""
        return f"<environments {self._indices} of {self._kind}>"


def chosen_of(index: Any, size: int) -> int | list[int]:
    """Return which of ``size`` environments an index selects.

    Raises:
        IndexError: there is no environment of that index.
        TypeError: the index is a mask of booleans, or no index at all.
    """
    if isinstance(index, slice):
        return list(range(size))[index]
    # Converts arrays and tensors, including scalars, to plain integers or lists.
    numbers = index.tolist() if hasattr(index, "tolist") else index
    if isinstance(numbers, int) and not isinstance(numbers, bool):
        return range(size)[numbers]
    if not isinstance(numbers, (list, tuple)) or any(
        isinstance(n, bool) or not isinstance(n, int) for n in numbers
    ):
        raise TypeError(
            "Environments are selected by an integer, a slice, or a list or tensor of "
            f"integers, but found {index!r}. For a mask, pass its nonzero() indices."
        )
    return [range(size)[n] for n in numbers]
