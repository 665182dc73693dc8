"""An environment whose step is a fixed amount of work, with discrete actions.

Work is counted in loop iterations, not in time: a process that waits for a processor
does not get it for free. Zero iterations make it an environment that costs nothing.
"""

import timeit
from functools import partial
from typing import Any, final

import numpy as np
from gymnasium import spaces

from workloads.free import FreeEnv


def spins_per_microsecond() -> float:
    """Return how many iterations a microsecond holds, on this machine, now."""
    count = 200_000
    best = min(timeit.repeat(partial(burn, count), number=1, repeat=7))
    return count / (best * 1e6)


def burn(spins: int) -> None:
    """Do nothing, that often."""
    for _ in range(spins):
        pass


@final
class BurningEnv(FreeEnv):
    """Three agents that see the same constants for ever and choose among five."""

    metadata = {"name": "burning_v0", "render_modes": []}  # noqa: RUF012 - PettingZoo's

    def __init__(self, spins: int = 0, *, empty_infos: bool = True) -> None:
        """Build the constants.

        Args:
            spins: iterations of a step.
            empty_infos: hand out ``{agent: {}}``, as PettingZoo's environments do,
                instead of nothing.
        """
        super().__init__()
        self._spins = spins
        self._observation_space = spaces.Box(-1.0, 1e6, (31,), np.float32)
        self._action_space = spaces.Discrete(5)
        if not empty_infos:
            self._infos = {}

    def step(self, actions: Any) -> Any:
        """Work, and hand out the constants."""
        del actions
        burn(self._spins)
        return self._observations, self._rewards, self._no, self._no, self._infos
