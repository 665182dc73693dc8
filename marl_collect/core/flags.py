"""How an episode's end is written down, per agent and for the whole environment.

Environments call ``Flags`` instead of setting flags themselves, so that the
rules are in one place:

- an agent's ``done`` is ``terminated or truncated``; once done, its three flags
  stay as they were in the step of its end, until the agent comes back, if it does:
  from the step after which it acts again, all three are False;
- the root's flags follow from the agents': with ``done_on_any`` each is ``any``
  over agents; otherwise ``done = all(done)``, ``terminated = all(terminated)``
  and ``truncated = done and not terminated``;
- where the root is done, an agent still alive becomes truncated and done;
- nobody acts after that, whoever ended it: masks are False, all actions legal.

Most steps end nothing, and then nothing here needs to run: flags stay False.
"""

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import FLAGS, EnvDescription, Row

Bools = NDArray[np.bool_]


class Flags:
    """Writes the done flags of one environment's row."""

    def __init__(self, row: Row, description: EnvDescription) -> None:
        """Take the arrays of flags and masks of ``row``; they are written in place."""
        self._any = description.done_on_any
        self._root: tuple[Bools, Bools, Bools] = tuple(row[flag,] for flag in FLAGS)  # type: ignore[assignment]
        self._groups: dict[str, tuple[Bools, Bools, Bools]] = {
            name: tuple(row[name, flag] for flag in FLAGS)  # type: ignore[misc]
            for name in description.groups
        }
        self._all = [
            *self._root,
            *(a for group in self._groups.values() for a in group),
        ]
        names = description.groups
        self._masks = [row[g, "mask"] for g in names if (g, "mask") in row]
        self._legal = [
            row[g, "action_mask"] for g in names if (g, "action_mask") in row
        ]

    def clear(self) -> None:
        """Write that an episode begins: nobody is done."""
        for array in self._all:
            array.fill(False)

    def end(self, group: str, agent: int, *, terminated: bool, truncated: bool) -> None:
        """Write that row ``agent`` of ``group`` ended in this step.

        The first call counts; later ones change nothing until the agent revives.
        """
        done, terminations, truncations = self._groups[group]
        if not done[agent, 0]:
            terminations[agent, 0] = terminated
            truncations[agent, 0] = truncated
            done[agent, 0] = terminated or truncated

    def revive(self, group: str, agent: int) -> None:
        """Write that row ``agent`` of ``group``, which was done, acts again."""
        for array in self._groups[group]:
            array[agent, 0] = False

    def end_all(self, *, terminated: bool, truncated: bool) -> None:
        """Write that the episode ended for every agent still in it."""
        for done, terminations, truncations in self._groups.values():
            alive = ~done
            terminations |= alive & terminated
            truncations |= alive & truncated
            done |= terminations | truncations
        self.settle()

    def settle(self) -> bool:
        """Write the root's flags from the agents'; return whether it is done."""
        done, terminated, truncated = self._root
        groups = self._groups.values()
        if self._any:
            done[0] = any(group[0].any() for group in groups)
            terminated[0] = any(group[1].any() for group in groups)
            truncated[0] = any(group[2].any() for group in groups)
        else:
            done[0] = all(group[0].all() for group in groups)
            terminated[0] = done[0] and all(group[1].all() for group in groups)
            truncated[0] = done[0] and not terminated[0]
        if done[0]:
            self._over()
        return bool(done[0])

    def truncate(self) -> None:
        """Write that a time limit of ours ends the episode here."""
        done, _, truncated = self._root
        done[0] = truncated[0] = True
        self._over()

    def _over(self) -> None:
        for done, _, truncations in self._groups.values():
            truncations |= ~done
            done.fill(True)
        for mask in self._masks:
            mask.fill(False)
        for legal in self._legal:
            legal.fill(True)
