"""Runner: AgileRL's AsyncPettingZooVecEnv, one process per environment."""

from typing import Any

import numpy as np
from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv
from harness.served import System
from harness.windows import Measure
from workloads.table import WORKLOADS

from peers.storing import measure_steps


def build(system: System) -> Measure:
    """Start the processes and return what measures them."""
    count = system.options["environments"]
    workload = WORKLOADS[system.workload]
    env: Any = AsyncPettingZooVecEnv([workload.stock] * count, copy=False)
    env.reset(seed=0)
    sample = workload.stock()
    spaces = {agent: sample.action_space(agent) for agent in sample.possible_agents}

    def step(actions: Any) -> tuple[dict[str, Any], int]:
        observations, rewards, terminated, truncated, _ = env.step(actions)
        arrays: dict[str, Any] = {}
        for agent in spaces:
            arrays[f"observation {agent}"] = observations[agent]
            arrays[f"reward {agent}"] = rewards[agent]
            arrays[f"terminated {agent}"] = terminated[agent]
            arrays[f"truncated {agent}"] = truncated[agent]
        first = next(iter(spaces))
        ended = np.nan_to_num(terminated[first]) + np.nan_to_num(truncated[first])
        return arrays, int((ended > 0).sum())

    def draw() -> Any:
        return {
            agent: np.stack([space.sample() for _ in range(count)])
            for agent, space in spaces.items()
        }

    return measure_steps(step, draw, count)
