"""The rules for done flags, per agent and for the whole environment.

Environments call ``Flags`` instead of setting flags themselves, so that all
environments follow the same rules:

- An agent's ``done`` is ``terminated or truncated``. Once an agent is done, its three
  flags keep the values of that step. If the agent returns, all three are False from the
  step after which it acts again.
- The root's flags follow from the agents' flags. With ``done_on_any`` each is ``any``
  over agents; otherwise ``done = all(done)``, ``terminated = all(terminated)``
  and ``truncated = done and not terminated``.
- When the root is done, agents that are still alive become truncated and done.
- No agent acts after that: masks are False, and all actions are legal.

In a step in which no agent ends, an environment need not call anything here.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import FLAGS, EnvDescription, Row

Bools = NDArray[np.bool_]


class Flags:
    """Writes the done flags of one environment, or of K worlds at once."""

    def __init__(self, memory: Row, description: EnvDescription) -> None:
        """Write flags and masks in place.

        Args:
            memory: of one environment; ``[K, ...]`` of worlds.
            description: of each environment.
        """
        self._any = description.done_on_any
        self._root: list[NDArray[Any]] = [memory[flag,] for flag in FLAGS]
        groups = description.groups
        self._groups: dict[str, list[NDArray[Any]]] = {
            name: [memory[name, flag] for flag in FLAGS] for name in groups
        }
        # With their values for agents that do not act.
        self._masks: dict[str, list[tuple[NDArray[Any], bool]]] = {
            name: [
                *([(memory[name, "mask"], False)] if group.mask else []),
                *([(memory[name, "action_mask"], True)] if group.action_mask else []),
            ]
            for name, group in groups.items()
        }
        self.some = True
        """False only if no agent is done; kept by ``end_worlds``."""

    def clear(self, rows: Any = ...) -> None:
        """Clear all flags at the beginning of episodes.

        Args:
            rows: index of the worlds that begin; by default all.
        """
        for arrays in (self._root, *self._groups.values()):
            for array in arrays:
                array[rows] = False

    def truncate(self, rows: Any = ...) -> None:
        """End episodes because a limit of frames is reached.

        Args:
            rows: index of the worlds that end; by default all.
        """
        self.some = True
        done, _, truncated = self._root
        done[rows] = truncated[rows] = True
        self._over(rows)

    # One environment

    def end(self, group: str, agent: int, *, terminated: bool, truncated: bool) -> None:
        """Set the flags of row ``agent`` of ``group``, which ended in this step.

        Later calls have no effect until the agent is revived.
        """
        done, terminations, truncations = self._groups[group]
        if not done[agent, 0]:
            terminations[agent, 0] = terminated
            truncations[agent, 0] = truncated
            done[agent, 0] = terminated or truncated

    def revive(self, group: str, agent: int) -> None:
        """Clear the flags of row ``agent`` of ``group``, which acts again."""
        for array in self._groups[group]:
            array[agent, 0] = False

    def end_all(self, *, terminated: bool, truncated: bool) -> None:
        """End the episode for every agent that is still alive."""
        for done, terminations, truncations in self._groups.values():
            alive = ~done
            terminations |= alive & terminated
            truncations |= alive & truncated
            done |= terminations | truncations
        self.settle()

    def settle(self) -> bool:
        """Compute the root's flags from the agents' flags; return the root's done."""
        done, terminated, truncated = self._root
        groups = self._groups.values()
        if self._any:
            done[0] = any(group[0].any() for group in groups)
            terminated[0] = any(group[1].any() for group in groups)
            truncated[0] = any(group[2].any() for group in groups)
        else:
            done[0] = all(group[0].all() for group in groups)
            terminated[0] = all(group[1].all() for group in groups)
            truncated[0] = done[0] and not terminated[0]
        if done[0]:
            self._over(...)
        return bool(done[0])

    # Worlds

    def end_worlds(
        self, terminated: Sequence[Bools] | None, truncated: Sequence[Bools] | None
    ) -> None:
        """End the agents with these flags, except those that were done before.

        Args:
            terminated: for each group, ``[K, n, 1]``; None for no agent.
            truncated: the same.
        """
        ends = terminated is not None or truncated is not None
        if not ends:
            groups = self._groups.values()
            self.some = self.some and any(group[0].any() for group in groups)
            if not self.some:
                return
        self.some = True
        for index, (name, flags) in enumerate(self._groups.items()):
            done, terminations, truncations = flags
            alive = ~done.astype(np.bool_, copy=False)
            if terminated is not None:
                terminations |= alive & terminated[index]
            if truncated is not None:
                truncations |= alive & truncated[index]
            np.logical_or(terminations, truncations, out=done)
            self._stop(name, done[..., 0].astype(np.bool_, copy=False))
        if ends:
            self._settle_worlds()

    def _settle_worlds(self) -> None:
        done, terminated, truncated = self._root
        groups = self._groups.values()
        combine = np.logical_or if self._any else np.logical_and
        for root, index in ((done, 0), (terminated, 1)):
            # Faster than a reduction over few agents.
            by_agent = (group[index].swapaxes(0, 1) for group in groups)
            root[...] = reduce(combine, chain(*by_agent))
        over = np.flatnonzero(done)
        if not len(over):
            return
        if self._any:
            truncated[...] = False
            for group in groups:
                np.logical_or(truncated, group[2].any(1), out=truncated)
        else:
            np.greater(done, terminated, out=truncated)
        self._over(over)

    def _over(self, rows: Any) -> None:
        for name, (done, _, truncations) in self._groups.items():
            truncations[rows] |= ~done[rows].astype(np.bool_)
            done[rows] = True
            self._stop(name, rows)

    def _stop(self, group: str, where: Any) -> None:
        for mask, value in self._masks[group]:
            mask[where] = value
