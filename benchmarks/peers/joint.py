"""A multi-agent environment as one of Gymnasium's, with arrays ``[agents, ...]``."""

from typing import Any, final

import gymnasium
import numpy as np
from gymnasium import spaces
from workloads.table import WORKLOADS


@final
class JointEnv(gymnasium.Env):
    """All agents together; the reward is their sum, as Gymnasium has but one."""

    def __init__(self, workload: str) -> None:
        """Build the environment; agents must be of one kind and act until the end."""
        self._env = WORKLOADS[workload].stock()
        self._agents = list(self._env.possible_agents)
        seen = self._env.observation_space(self._agents[0])
        done = self._env.action_space(self._agents[0])
        n = len(self._agents)
        self.observation_space = spaces.Box(
            -np.inf, np.inf, (n, *seen.shape), seen.dtype
        )
        self._discrete = isinstance(done, spaces.Discrete)
        if isinstance(done, spaces.Discrete):
            self.action_space = spaces.MultiDiscrete([int(done.n)] * n)
        else:
            self.action_space = spaces.Box(-1.0, 1.0, (n, *done.shape), done.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        del options
        observations, _ = self._env.reset(seed=seed)
        return self._stack(observations), {}

    def step(self, action: Any) -> Any:
        """Step all agents."""
        joint = dict(zip(self._agents, action, strict=True))
        observations, rewards, terminated, truncated, _ = self._env.step(joint)
        over = not self._env.agents
        return (
            self._stack(observations),
            float(sum(rewards.values())),
            over and any(terminated.values()),
            over and any(truncated.values()),
            {},
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _stack(self, observations: Any) -> Any:
        return np.stack([observations[agent] for agent in self._agents])
