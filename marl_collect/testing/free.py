"""A PettingZoo environment that costs nothing, to measure everything around it."""

from typing import Any, final

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from pettingzoo import ParallelEnv

Array = NDArray[np.float32]


@final
class FreeEnv(ParallelEnv[str, Array, Array]):
    """Agents ``agent_0``, ``agent_1``, ... that see the same constants for ever.

    Every dictionary is built once and handed out again and again, so that a step is
    one function call. Observations are ``Box(size)``, actions ``Box(n_actions)`` in
    [-1, 1], rewards 1.
    """

    metadata = {"name": "free_v0", "render_modes": []}  # noqa: RUF012 - PettingZoo's
    render_mode = None

    def __init__(
        self,
        n_agents: int = 3,
        size: int = 31,
        n_actions: int = 4,
        max_cycles: int | None = None,
    ) -> None:
        """Build the constants.

        Args:
            n_agents: how many agents.
            size: numbers in an observation.
            n_actions: numbers in an action.
            max_cycles: steps after which everyone is truncated; never if None.
        """
        self.possible_agents = [f"agent_{i}" for i in range(n_agents)]
        self.agents = self.possible_agents[:]
        self._observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self._action_space = spaces.Box(-1.0, 1.0, (n_actions,), np.float32)
        self._max_cycles = max_cycles
        self._steps = 0
        names = self.possible_agents
        self._observations = {
            name: np.full(size, i, dtype=np.float32) for i, name in enumerate(names)
        }
        self._rewards = dict.fromkeys(names, 1.0)
        self._no = dict.fromkeys(names, False)
        self._yes = dict.fromkeys(names, True)
        self._infos: dict[str, dict[str, Any]] = {name: {} for name in names}

    def observation_space(self, agent: str) -> spaces.Box:  # noqa: ARG002
        """Return the space that all agents share."""
        return self._observation_space

    def action_space(self, agent: str) -> spaces.Box:  # noqa: ARG002
        """Return the space that all agents share."""
        return self._action_space

    def reset(
        self,
        seed: int | None = None,  # noqa: ARG002 - nothing is random here
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """Begin an episode."""
        self.agents = self.possible_agents[:]
        self._steps = 0
        return self._observations, self._infos

    def step(
        self,
        actions: dict[str, Array],  # noqa: ARG002 - nothing depends on them
    ) -> tuple[
        dict[str, Array],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        """Hand out the constants."""
        if self._max_cycles is None:
            return (
                self._observations,
                self._rewards,
                self._no,
                self._no,
                self._infos,
            )
        self._steps += 1
        over = self._steps >= self._max_cycles
        if over:
            self.agents = []
        truncations = self._yes if over else self._no
        return self._observations, self._rewards, self._no, truncations, self._infos

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
