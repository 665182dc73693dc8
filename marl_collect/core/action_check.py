"""Checks every action of a policy before an environment executes it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.errors import PolicyError

ActionCheck = Callable[[int], None]
_Wrong = Callable[[NDArray[Any]], NDArray[np.bool_]]


def action_check(description: EnvDescription, memory: Row) -> ActionCheck:
    """Return a function that checks a frame's actions in ``memory``.

    Numbers must be finite. Discrete actions must exist and, where there is an action
    mask, be legal. One-hot rows must have a single 1. Rows that do not act (``mask``)
    are not checked. The function gets the frame's index, and raises a `PolicyError`
    that names group, agent and action.
    """
    checks = [
        _group_check(name, group, memory) for name, group in description.groups.items()
    ]

    def check(frame: int) -> None:
        for check_group in checks:
            check_group(frame)

    return check


def _group_check(name: str, group: GroupDescription, memory: Row) -> ActionCheck:
    actions = memory[name, "action"]
    acts = memory.get((name, "mask"))
    legal = memory.get((name, "action_mask")) if group.action_mask else None
    find, expected = action_rule(group.action, one_hot=group.one_hot)

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


def action_rule(space: spaces.Space[Any], *, one_hot: bool) -> tuple[_Wrong, str]:
    """Return a function that finds wrong rows ``[K, n]``, and what is expected."""
    if one_hot:
        return _not_one_hot, "a row with a single 1 and otherwise 0, legal"
    if isinstance(space, spaces.Discrete):
        n = int(space.n)
        return (lambda a: (a < 0) | (a >= n)), f"an integer from 0 to {n - 1}, legal"
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        top = space.nvec if isinstance(space, spaces.MultiDiscrete) else 2
        return _outside(top), f"integers from 0, below {np.asarray(top).tolist()}"
    return (
        lambda a: ~np.isfinite(a.reshape(*a.shape[:2], -1)).all(-1)
    ), "finite numbers"


def _not_one_hot(actions: NDArray[Any]) -> NDArray[np.bool_]:
    ones = (actions == 1).sum(-1)
    zeros = (actions == 0).sum(-1)
    return (ones != 1) | (zeros != actions.shape[-1] - 1)


def _outside(top: Any) -> _Wrong:
    def find(a: NDArray[Any]) -> NDArray[np.bool_]:
        wrong = (a < 0) | (a >= top)
        return wrong.reshape(*a.shape[:2], -1).any(-1)

    return find


def _illegal(
    actions: NDArray[Any], legal: NDArray[Any], *, one_hot: bool
) -> NDArray[np.bool_]:
    """Return which rows are illegal; those that name no action at all may be, too."""
    n_actions = legal.shape[-1]
    chosen = actions.argmax(-1) if one_hot else actions.clip(0, n_actions - 1)
    return ~np.take_along_axis(legal, chosen[..., None], -1)[..., 0].astype(np.bool_)
