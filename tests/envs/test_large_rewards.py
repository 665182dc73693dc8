"""A reward that is too large for a float is an error that names the agent."""

from functools import partial
from typing import Any

import pytest
from workloads.free import FreeEnv

from marl_collect import Collector
from marl_collect.envs import PettingZooWrapper


def paying(reward: float, agents: int) -> Any:
    env = FreeEnv(3, 2)
    vars(env)["_rewards"] = {f"agent_{i}": 1.0 for i in range(agents)}
    vars(env)["_rewards"]["agent_1"] = reward
    return PettingZooWrapper(env)


@pytest.mark.parametrize("agents", [2, 3])
def test_the_agent_with_too_large_a_reward_is_named(agents: int) -> None:
    factory = partial(paying, 10**400, agents)
    with (
        Collector(factory, frames_per_batch=4) as collector,
        pytest.raises(ValueError, match="reward of agent agent_1 must be a number"),
    ):
        collector.next()
