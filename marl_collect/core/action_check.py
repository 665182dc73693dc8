"""The rules that actions fulfil, and the errors for actions that do not."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import (
    EnvDescription,
    GroupDescription,
    Key,
    Row,
    leaf_spaces,
)
from marl_collect.errors import PolicyError

Array = NDArray[Any]
ActionCheck = Callable[[int], None]


def action_check(description: EnvDescription, memory: Row) -> ActionCheck:
    """Return a function that checks a frame's actions in ``memory``, ``[K, ...]``.

    Numbers must be finite. Discrete actions must exist and, where there is an action
    mask, be legal. One-hot rows must have a single 1. Rows that do not act (``mask``)
    are not checked. The function gets the frame's index, and raises a `PolicyError`
    that names group, agent and action.
    """
    checks = [
        _leaf_check(key, space, group, memory)
        for name, group in description.groups.items()
        for key, space in leaf_spaces(group.action, (name, "action"))
    ]

    def check(frame: int) -> None:
        for check_leaf in checks:
            check_leaf(frame)

    return check


def _leaf_check(
    key: Key, space: spaces.Space[Any], group: GroupDescription, memory: Row
) -> ActionCheck:
    name, actions = key[0], memory[key]
    acts = memory.get((name, "mask"))
    legal = memory.get((name, "action_mask")) if group.action_mask else None
    find, expected = _rule(space, one_hot=group.one_hot)
    if legal is not None:
        expected += ", legal"

    def check(frame: int) -> None:
        wrong = find(actions)
        if legal is not None:
            wrong |= _illegal(actions, legal, one_hot=group.one_hot)
        if acts is not None:
            wrong &= acts.astype(np.bool_)
        if wrong.any():
            k, agent = np.argwhere(wrong)[0].tolist()
            raise PolicyError(
                f"The policy's action of agent {group.agents[agent]!r} of group "
                f"{name!r} is {actions[k, agent].tolist()}, in frame {frame} of "
                f"the batch (environment {k} of the {len(actions)} in its batch): "
                f"expected {expected}."
            )

    return check


def refusal(
    key: Key,
    space: spaces.Space[Any],
    actions: Array,
    agents: Sequence[str],
    acting: Callable[[], Any],
    *,
    one_hot: bool = False,
) -> Callable[[], None]:
    """Return a function with which an environment refuses actions that it lacks.

    Infinity is clipped to the bounds of a Box, so it is no error.

    Args:
        key: of the actions.
        space: of an agent's actions.
        actions: ``[n, ...]``, or ``[K, n, ...]`` of K worlds; they change in place.
        agents: names of the n agents.
        acting: returns which rows act; other rows may contain anything.
        one_hot: whether Discrete actions are stored one-hot.

    Returns:
        A function that raises a ValueError if an agent that acts has a wrong action.
    """
    find, expected = _rule(space, one_hot=one_hot, clipped=True)

    def refuse() -> None:
        for *world, agent in np.argwhere(find(actions) & acting()).tolist():
            where = f", in world {world[0]}" if world else ""
            raise ValueError(
                f"The action {actions[*world, agent].tolist()} of agent "
                f"{agents[agent]} in {'/'.join(key)}{where}: expected {expected}."
            )

    return refuse


def suspicion(
    actions: Array, space: spaces.Space[Any], *, one_hot: bool = False
) -> Callable[[], Any]:
    """Return a quick look at actions, which is false only if none can be wrong.

    It takes one reduction, or one per number of a space whose numbers differ in their
    range.
    """
    largest = np.maximum.reduce
    is_box = isinstance(space, spaces.Box)
    if not actions.size or (is_box and actions.dtype.kind != "f"):
        return lambda: False
    if is_box:
        # NaN if one of them is. A sum of float16 or infinities would warn.
        return lambda: np.isnan(largest(actions, None))
    if one_hot:
        return lambda: True
    # As unsigned numbers, those below 0 are the largest.
    unsigned = actions.view(f"u{actions.itemsize}")
    counts = value_counts(space)
    columns = [(unsigned, int(counts.max()))]
    if counts.min() < counts.max():
        columns = [(unsigned[..., *i], int(n)) for i, n in np.ndenumerate(counts)]
    return lambda: any(largest(column, None) >= n for column, n in columns)


def _rule(
    space: spaces.Space[Any], *, one_hot: bool, clipped: bool = False
) -> tuple[Callable[[Array], Any], str]:
    """Return a function that finds wrong rows, bool ``[*B]``, and what they lack."""
    wrong: Callable[[Array], Any]
    if one_hot:
        return not_one_hot, "a row with a single 1 and otherwise 0"
    if isinstance(space, spaces.Box):
        wrong = np.isnan if clipped else (lambda actions: ~np.isfinite(actions))
        expected = "numbers, no NaN" if clipped else "finite numbers"
    else:
        counts = value_counts(space)
        wrong = lambda actions: (actions < 0) | (actions >= counts)  # noqa: E731
        expected = f"integers from 0, below {counts.tolist()}"
        if isinstance(space, spaces.Discrete):
            expected = f"an integer from 0 to {space.n - 1}"
    numbers = tuple(range(-len(space.shape or ()), 0))
    return (lambda actions: wrong(actions).any(numbers)), expected


def value_counts(space: Any) -> Array:
    """Return how many values each number of an action has."""
    if isinstance(space, spaces.MultiBinary):
        return np.array(2)
    return np.asarray(
        space.nvec if isinstance(space, spaces.MultiDiscrete) else space.n
    )


def not_one_hot(actions: Any) -> Any:
    """Return which rows of an array or a tensor do not have a single 1 and else 0."""
    ones = (actions == 1).sum(-1)
    zeros = (actions == 0).sum(-1)
    return (ones != 1) | (zeros != actions.shape[-1] - 1)


def _illegal(actions: Array, legal: Array, *, one_hot: bool) -> NDArray[np.bool_]:
    """Return which rows are illegal; those that name no action at all may be, too."""
    n_actions = legal.shape[-1]
    chosen = actions.argmax(-1) if one_hot else actions.clip(0, n_actions - 1)
    return ~np.take_along_axis(legal, chosen[..., None], -1)[..., 0].astype(np.bool_)
