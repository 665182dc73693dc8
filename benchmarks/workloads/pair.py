"""Two agents that act once. The best return of each setup can be derived by hand.

=====================  ==========  ==========
setup                  same        crossed
=====================  ==========  ==========
local, shared          0.5         0.5
local, own             1           0.5
centralised, shared    0.5         0.75
centralised, own       1           1
=====================  ==========  ==========

The table has the highest mean reward per agent. With continuous actions, which are
rewarded by one minus the squared error, it is half as far from 1. With the agents'
identities as inputs, local shared networks reach the values of local own networks. If
inputs, outputs, agents or groups are mixed up, results are lower, or higher than
possible.
"""

from typing import Any, Literal, final

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from workloads.free import Array, Stepped


@final
class PairEnv(ParallelEnv[str, Array, Any]):
    """One step per episode; each agent is rewarded for one of two actions.

    Args:
        task: ``"same"`` shows both agents the same observation and rewards agent i for
            action i. ``"crossed"`` shows each agent a random bit and rewards it for the
            action that equals the other agent's bit.
        continuous: whether actions are numbers from 0 to 1.
    """

    metadata = {"name": "pair_v0", "render_modes": []}  # noqa: RUF012 - PettingZoo's
    render_mode = None

    def __init__(
        self,
        task: Literal["same", "crossed"] = "crossed",
        *,
        continuous: bool = False,
    ) -> None:
        """Build the spaces."""
        if task not in ("same", "crossed"):
            raise ValueError(f"task must be same or crossed, but is {task!r}.")
        self.possible_agents = ["agent_0", "agent_1"]
        self.agents: list[str] = []
        self._crossed = task == "crossed"
        self._continuous = continuous
        self._rng = np.random.default_rng()
        self._wanted = {"agent_0": 0, "agent_1": 1}

    def observation_space(self, agent: str) -> spaces.Box:  # noqa: ARG002
        """Return the space of one number."""
        return spaces.Box(0.0, 1.0, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:  # noqa: ARG002
        """Return the space of two actions, or of those between them."""
        if self._continuous:
            return spaces.Box(0.0, 1.0, (1,), np.float32)
        return spaces.Discrete(2)

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        """Sample the bits."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents = self.possible_agents[:]
        shown = [1, 1]
        if self._crossed:
            shown = [int(bit) for bit in self._rng.integers(2, size=2)]
            self._wanted = {"agent_0": shown[1], "agent_1": shown[0]}
        observations = {
            name: np.array([bit], np.float32)
            for name, bit in zip(self.agents, shown, strict=True)
        }
        return observations, {name: {} for name in self.agents}

    def step(self, actions: dict[str, Any]) -> Stepped:
        """Return rewards and end the episode."""
        names = self.possible_agents
        # The squared error of a wrong action out of two is 1.
        errors = {
            name: float(np.squeeze(actions[name])) - self._wanted[name]
            for name in names
        }
        rewards = {name: 1.0 - error**2 for name, error in errors.items()}
        self.agents = []
        return (
            {name: np.zeros(1, np.float32) for name in names},
            rewards,
            dict.fromkeys(names, True),
            dict.fromkeys(names, False),
            {name: {} for name in names},
        )

    def close(self) -> None:
        """Do nothing."""
