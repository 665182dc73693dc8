"""An environment whose step is a fixed amount of work, with discrete actions.

Work is counted in loop iterations, not in time: a process that waits for a processor
does not get it for free. Zero iterations make it an environment that costs nothing.
"""

from typing import Any, final

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


def spins_per_microsecond() -> float:
    """Return how many iterations a microsecond holds, on this machine, now."""
    import time

    count = 200_000
    best = min(_timed(count, time.perf_counter) for _ in range(7))
    return count / (best * 1e6)


def _timed(count: int, clock: Any) -> float:
    begin = clock()
    burn(count)
    return float(clock() - begin)


def burn(spins: int) -> None:
    """Do nothing, that often."""
    for _ in range(spins):
        pass


@final
class BurningEnv(ParallelEnv):
    """Three agents that see the same constants for ever and choose among five."""

    metadata = {"name": "burning_v0", "render_modes": []}  # noqa: RUF012 - PettingZoo's
    render_mode = None

    def __init__(
        self, spins: int = 0, *, empty_infos: bool = True, n_agents: int = 3
    ) -> None:
        """Build the constants.

        Args:
            spins: iterations of a step.
            empty_infos: hand out ``{agent: {}}``, as PettingZoo's environments do,
                instead of nothing.
            n_agents: how many agents.
        """
        self.possible_agents = [f"agent_{i}" for i in range(n_agents)]
        self.agents = self.possible_agents[:]
        self._spins = spins
        self._observation = spaces.Box(-1.0, 1e6, (31,), np.float32)
        self._action = spaces.Discrete(5)
        names = self.possible_agents
        self._observations = {
            name: np.full(31, i, dtype=np.float32) for i, name in enumerate(names)
        }
        self._rewards = dict.fromkeys(names, 1.0)
        self._no = dict.fromkeys(names, False)
        self._infos: Any = {name: {} for name in names} if empty_infos else {}

    def observation_space(self, agent: str) -> Any:
        """Return the space that all agents share."""
        del agent
        return self._observation

    def action_space(self, agent: str) -> Any:
        """Return the space that all agents share."""
        del agent
        return self._action

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode, which never ends."""
        del seed, options
        self.agents = self.possible_agents[:]
        return self._observations, self._infos

    def step(self, actions: Any) -> Any:
        """Work, and hand out the constants."""
        del actions
        burn(self._spins)
        return self._observations, self._rewards, self._no, self._no, self._infos

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
