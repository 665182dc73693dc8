"""Says once that episodes end with the first agent although others could go on."""

from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any, final

from marl_collect.core.description import EnvDescription, Key
from marl_collect.errors import warn


@final
class FirstEnds:
    """Looks for episodes that the end of one agent cut for the others.

    Agents that are still alive when the episode ends are truncated, so the last frame
    of such an episode has terminated agents beside others.
    """

    def __init__(self, description: EnvDescription) -> None:
        """Look for them if ``done_on_any`` is set."""
        self._name = description.name
        self._groups = list(description.groups)
        self._due = description.done_on_any

    def look(self, flag: Callable[[Key], Any]) -> None:
        """Warn if there is one, unless there was a warning already.

        Args:
            flag: returns the array or tensor at a key after the step, such as
                ``("done",)``, ``[*B, 1]``, or ``("walker", "terminated")``,
                ``[*B, n, 1]``.
        """
        if not self._due:
            return
        ended = [flag((group, "terminated")) != 0 for group in self._groups]
        some = reduce(or_, [agents.any(-2) for agents in ended])
        every = reduce(and_, [agents.all(-2) for agents in ended])
        if ((flag(("done",)) != 0) & some & ~every).any():
            self._due = False
            warn(
                f"{self._name}: an episode ended when the first agent was done, and "
                "the others were truncated. Parallel environments do so by default. "
                "Pass done_on_any=False to let the others play on; on the command "
                "line: --env done_on_any=false."
            )
