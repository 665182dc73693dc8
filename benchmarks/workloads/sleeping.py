"""An environment whose step is a pause: many workers on few cores.

The pauses of a worker are drawn beforehand and taken in turn: for the same number they
are the same for everybody, and each worker's mean is exact.
"""

import ctypes
import math
import statistics
from time import sleep  # noqa: TID251 - pausing is what this environment is for
from typing import Any, final

import numpy as np
from gymnasium import spaces

from workloads.free import FreeEnv

MILLISECONDS = 10.0
_DRAWS = 400
_PR_SET_TIMERSLACK = 29


def pauses(worker: int, cv: float, milliseconds: float = MILLISECONDS) -> list[float]:
    """Return a worker's pauses in seconds, with mean and coefficient of variation.

    They are the quantiles of a lognormal distribution in random order.
    """
    if cv == 0:
        return [milliseconds / 1000]
    sigma = math.sqrt(math.log(1 + cv * cv))
    normal = statistics.NormalDist()
    durations = np.exp(
        [sigma * normal.inv_cdf((i + 0.5) / _DRAWS) for i in range(_DRAWS)]
    )
    durations *= milliseconds / 1000 / durations.mean()
    return [float(x) for x in np.random.default_rng(worker).permutation(durations)]


def sleep_precisely() -> None:
    """Ask the kernel not to lengthen the pauses of this thread to save power."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@final
class SleepingEnv(FreeEnv):
    """One agent that sees one number, takes one of two actions, and waits."""

    metadata = {"name": "sleeping_v0", "render_modes": []}  # noqa: RUF012 - PettingZoo's

    def __init__(self, worker: int = 0, cv: float = 0.0) -> None:
        """Draw the pauses of this worker."""
        super().__init__(1, 1)
        sleep_precisely()
        self._action_space = spaces.Discrete(2)
        self._pauses = pauses(worker, cv)

    def step(self, actions: Any) -> Any:
        """Wait."""
        del actions
        sleep(self._pauses[self._steps % len(self._pauses)])
        self._steps += 1
        return self._observations, self._rewards, self._no, self._no, self._infos
