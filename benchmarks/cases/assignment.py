"""What it costs to assign several policies to agents.

One policy acts for all agents, or several policies are assigned to agents at random in
each episode, in one process. All networks of a row have the same kind: shared by all
agents, shared with identities of the agents, or one per agent.
"""

import random
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness.turns import Alternative

from cases.case import Case
from marl_collect import Collector
from marl_collect.envs import MeltingpotEnv, PettingZooEnv
from marl_collect.models import make_policy

TASKS = ("simple_spread_v3", "multiwalker_v9", "connect_four_v3", "coins")
COUNTS = (2, 7)
ENVS = 8
NETWORKS: dict[str, dict[str, Any]] = {
    "shared": {},
    "ids": {"agent_ids": True},
    "own": {"share_params": False},
    # The network of examples/population_matrix_game.py, for pictures.
    "small": {
        "num_cells": (64,),
        "conv": {"num_cells": (16, 32), "kernel_sizes": (8, 3), "strides": (8, 1)},
    },
}


def assign(
    seed: int, agents: tuple[str, ...], *, names: tuple[str, ...]
) -> dict[str, str]:
    """Give each agent one of the policies."""
    rng = random.Random(seed)
    return {agent: rng.choice(names) for agent in agents}


def factory(task: str) -> Any:
    """Return a factory of the task's environment."""
    if "_v" not in task:
        return partial(MeltingpotEnv, task)
    return partial(PettingZooEnv, task, parallel=task != "connect_four_v3")


def build(
    stack: ExitStack, task: str, network: str, count: int
) -> dict[str, Alternative]:
    """Return a collector with one policy, and one with ``count`` policies."""
    make = factory(task)
    one, *others = (make_policy(make, **NETWORKS[network]) for _ in range(count + 1))
    policies = {f"policy_{number}": other for number, other in enumerate(others)}
    settings: dict[str, Any] = {"frames_per_batch": 100 * ENVS, "seed": 0}
    chosen = partial(assign, names=tuple(policies))
    single = Collector([make] * ENVS, one, **settings)
    stack.callback(single.shutdown)
    several = Collector([make] * ENVS, policies=policies, assign=chosen, **settings)
    stack.callback(several.shutdown)
    return {"one policy": collecting(single), f"{count} policies": collecting(several)}


def collecting(collector: Collector) -> Alternative:
    """Return the call that collects a batch and drops it."""
    return Alternative(lambda: float(collector.next().numel()))


def cases() -> list[Case]:
    """Return a row per task and kind of network, with two and with seven policies."""
    return [
        Case(
            f"{task}, {network}, {count} policies",
            partial(build, task=task, network=network, count=count),
            "frame",
        )
        for task in TASKS
        for network in NETWORKS
        for count in COUNTS
        if network != "small" or task == "coins"
    ]
