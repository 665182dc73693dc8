"""A runner that checks every action before an environment executes it."""

from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, GroupDescription, Row
from marl_collect.core.signature import PolicySignature
from marl_collect.errors import PolicyError
from marl_collect.policies.runner import Generators, PolicyRunner

_Wrong = Callable[[NDArray[Any]], NDArray[np.bool_]]


@final
class CheckedRunner(PolicyRunner):
    """Runs another runner and raises an error for invalid actions.

    Numbers must be finite. Discrete actions must exist and, where there is an action
    mask, be legal. One-hot rows must have a single 1. Rows that do not act (``mask``)
    are not checked.
    """

    def __init__(self, inner: PolicyRunner, description: EnvDescription) -> None:
        """Check the actions of ``inner``, for environments of ``description``."""
        self._inner = inner
        self._description = description
        self._looks: list[Callable[[int], None]] = []

    @property
    def signature(self) -> PolicySignature:
        """Signature of the other runner."""
        return self._inner.signature

    @property
    def must_observe(self) -> bool:
        """Whether the other runner needs observations of a reset."""
        return self._inner.must_observe

    def probe(self, memory: Row) -> None:
        """Probe the other runner's policy."""
        self._inner.probe(memory)

    @property
    def remembers(self) -> bool:
        """Whether the other runner remembers the previous frame."""
        return self._inner.remembers

    def remember(self, *, whether: bool) -> None:
        """Forward to the other runner."""
        self._inner.remember(whether=whether)

    def bind(self, memory: Row) -> None:
        """Bind the other runner to ``memory``, and check actions there."""
        self._inner.bind(memory)
        self._looks = [
            self._look_at(name, group, memory)
            for name, group in self._description.groups.items()
        ]

    def begin_episodes(self, seeds: Mapping[int, int]) -> None:
        """Forward to the other runner."""
        self._inner.begin_episodes(seeds)

    def assigned(self) -> Any:
        """Return the other runner's."""
        return self._inner.assigned()

    def assign(self, assigned: Any) -> None:
        """Forward to the other runner."""
        self._inner.assign(assigned)

    def begin(self, frames: int, generators: Generators) -> None:
        """Prepare the other runner."""
        self._inner.begin(frames, generators)

    def act(self, frame: int) -> None:
        """Act and check the actions.

        Raises:
            PolicyError: if an action is invalid; names group, agent and action.
        """
        self._inner.act(frame)
        for look in self._looks:
            look(frame)

    def explain(self) -> str:
        """Return the other runner's explanation, and that actions are checked."""
        return f"{self._inner.explain()} Actions are checked in every frame."

    def _look_at(
        self, name: str, group: GroupDescription, memory: Row
    ) -> Callable[[int], None]:
        actions = memory[name, "action"]
        acts = memory.get((name, "mask"))
        legal = memory.get((name, "action_mask")) if group.action_mask else None
        find, expected = _rule(group)

        def look(frame: int) -> None:
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

        return look


def _rule(group: GroupDescription) -> tuple[_Wrong, str]:
    """Return a function that finds wrong rows ``[K, n]``, and what is expected."""
    space = group.action
    if group.one_hot:
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
