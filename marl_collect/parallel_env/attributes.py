"""Attributes and methods of single environments of a batch, used where they live."""

from collections.abc import Mapping, Sequence
from typing import Any

_STEPPING = frozenset(
    {
        "bind",
        "close",
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
STEPPING_SOME = (
    'To step or reset some environments, set "_step" or "_reset", bool [N], in the '
    "TensorDict that is passed to step() or reset() of the batch."
)


def check_name(batch: str, name: str) -> None:
    """Check that environments may be asked for an attribute.

    Args:
        batch: class of the batch, for error messages.
        name: of the attribute.

    Raises:
        AttributeError: the name is private, or that of a method that steps.
    """
    if name.startswith("_"):
        # Includes what copy, pickle and notebooks look up on the batch itself.
        raise AttributeError(f"{batch} has no attribute {name!r}")
    if name in _STEPPING:
        raise AttributeError(
            f"{name!r} cannot be used on single environments of a {batch}. "
            f"{STEPPING_SOME}"
        )


def value_of(env: Any, name: str) -> Any:
    """Return an attribute of an environment.

    Raises:
        AttributeError: there is none, or it is a method.
    """
    attribute = getattr(env, name)
    if callable(attribute):
        raise AttributeError(  # noqa: TRY004 - `hasattr` is False
            f"{name!r} is a method, not a value: env.call({name!r}, ...) calls it in "
            "every environment, and returns the list of results."
        )
    return attribute


def call_method(
    env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a method of an environment."""
    return getattr(env, name)(*args, **kwargs)
