"""A PettingZoo environment with negligible cost, to measure the cost of collection."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

Array = NDArray[np.float32]
Stepped = tuple[
    dict[str, Array],
    dict[str, float],
    dict[str, bool],
    dict[str, bool],
    dict[str, dict[str, Any]],
]
"""Observations, rewards, terminations, truncations and infos, by agent."""


class FreeEnv(ParallelEnv[str, Array, Array]):
    """Agents ``agent_0``, ``agent_1``, ... with constant observations and rewards.

    All dictionaries are built once and returned by every step, so a step is one
    function call. Observations are ``Box(size)``, actions ``Box(4)`` in [-1, 1],
    rewards 1.
    """

    metadata = {"name": "free_v0", "render_modes": []}  # noqa: RUF012 - PettingZoo's
    render_mode = None

    def __init__(self, n_agents: int = 3, size: int = 31) -> None:
        """Build the constants.

        Args:
            n_agents: number of agents.
            size: length of an observation.
        """
        self.possible_agents = [f"agent_{i}" for i in range(n_agents)]
        self.agents = self.possible_agents[:]
        self._observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self._action_space: spaces.Space[Any]
        self._action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        names = self.possible_agents
        self._observations = {
            name: np.full(size, i, dtype=np.float32) for i, name in enumerate(names)
        }
        self._rewards = dict.fromkeys(names, 1.0)
        self._no = dict.fromkeys(names, False)
        self._infos: dict[str, dict[str, Any]] = {name: {} for name in names}

    def observation_space(self, agent: str) -> spaces.Box:  # noqa: ARG002
        """Return the space that all agents share."""
        return self._observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """Return the space that all agents share."""
        return self._action_space

    def reset(
        self,
        seed: int | None = None,  # noqa: ARG002 - nothing is random
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """Begin an episode."""
        return self._observations, self._infos

    def step(self, actions: dict[str, Array]) -> Stepped:  # noqa: ARG002 - no effect
        """Return the constants."""
        return self._observations, self._rewards, self._no, self._no, self._infos

    def close(self) -> None:
        """Do nothing."""
