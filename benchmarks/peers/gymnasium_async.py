"""Runner: Gymnasium's AsyncVectorEnv, one process per environment."""

from functools import partial
from typing import Any

from gymnasium.vector import AsyncVectorEnv
from harness.served import System
from harness.windows import Measure

from peers.joint import JointEnv
from peers.storing import measure_steps


def build(system: System) -> Measure:
    """Start the processes and return what measures them."""
    count = system.options["environments"]
    make = partial(JointEnv, system.workload)
    env: Any = AsyncVectorEnv([make] * count, shared_memory=True, copy=False)
    env.reset(seed=0)
    env.action_space.seed(0)

    def step(actions: Any) -> tuple[dict[str, Any], int]:
        observation, reward, terminated, truncated, _ = env.step(actions)
        arrays = {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        return arrays, int((terminated | truncated).sum())

    return measure_steps(step, env.action_space.sample, count)
