"""From one-hot actions to numbers, refusing rows that are not one-hot."""

from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.description import Key

Array = NDArray[Any]


@final
class OneHot:
    """Reads the one-hot actions of one group."""

    def __init__(self, key: Key, agents: Sequence[str], n_actions: int) -> None:
        """Read ``[n_agents, n_actions]``.

        Args:
            key: of the actions, for messages.
            agents: names in the order of the rows, for messages.
            n_actions: how many there are.
        """
        self._key = key
        self._agents = agents
        self._n_actions = n_actions
        self._starts = np.arange(len(agents)) * n_actions
        self._ones = [1] * len(agents)

    def numbers(self, array: Array, acting: Iterable[int] | None = None) -> Array:
        """Return the number of each row's action, int64 ``[n_agents]``.

        Args:
            array: a single 1 in each row, and zeros.
            acting: rows that count; what others hold is of no matter. None: all.

        Raises:
            ValueError: naming group and agent, for a row that is not one-hot.
        """
        flat = array.reshape(-1)
        places = flat.nonzero()[0]
        if len(places) == len(self._ones) and flat[places].tolist() == self._ones:
            numbers: Array = places - self._starts
            if self._exist(numbers.tolist()):
                return numbers
        bad = ((array != 0).sum(-1) != 1) | (array.max(-1) != 1)
        for row in range(len(bad)) if acting is None else sorted(acting):
            if bad[row]:
                raise ValueError(
                    f"The action {array[row].tolist()} of agent {self._agents[row]} in "
                    f"{'/'.join(self._key)} is not one-hot: expected a single 1 among "
                    f"{self._n_actions} numbers, and zeros. An environment built with "
                    "categorical_actions=True takes the action's number instead."
                )
        return array.argmax(-1)

    def _exist(self, numbers: list[int]) -> bool:
        return min(numbers) >= 0 and max(numbers) < self._n_actions
