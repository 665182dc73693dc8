"""Runner: SuperSuit's concatenated vector environments."""

from typing import Any

import numpy as np
import supersuit
from harness.served import System
from harness.windows import Measure
from workloads.table import WORKLOADS

from peers.storing import measure_steps


def build(system: System) -> Measure:
    """Start the processes and return what measures them."""
    count = system.options["environments"]
    workload = WORKLOADS[system.workload]
    agents = supersuit.pettingzoo_env_to_vec_env_v1(workload.stock())
    env: Any = supersuit.concat_vec_envs_v1(
        agents, count, num_cpus=system.workers, base_class="gymnasium"
    )
    env.reset(seed=0)
    rows = count * workload.agents
    space = env.single_action_space if hasattr(env, "single_action_space") else None
    space = space or env.action_space
    space.seed(0)

    def step(actions: Any) -> tuple[dict[str, Any], int]:
        observation, reward, terminated, truncated, _ = env.step(actions)
        arrays = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        ended = np.asarray(terminated) | np.asarray(truncated)
        return arrays, int(ended.sum()) // workload.agents

    def draw() -> Any:
        return np.stack([space.sample() for _ in range(rows)])

    return measure_steps(step, draw, count)
