"""What it costs to assign several policies to agents.

One policy acts for all agents, or several policies are assigned to agents at random in
each episode, in one process. All networks of a row have the same kind: shared by all
agents, shared with identities of the agents, or one per agent.

Rows "a network per agent" compare the ways of giving every agent weights of its own.
"""

import random
from contextlib import ExitStack
from functools import partial
from typing import Any

from harness.turns import Alternative

from cases.case import Case, collecting
from marl_collect import Collector, MarlGroupMapType
from marl_collect.envs import MeltingpotEnv, PettingZooEnv
from marl_collect.models import make_policy

TASKS = ("simple_spread_v3", "multiwalker_v9", "connect_four_v3", "coins")
COUNTS = (2, 7)
LEARNERS = {
    "simple_spread_v3": "shared",
    "coins": "small",
    "commons_harvest__open": "small",
}
"""Tasks with 3, 2 and 7 agents, and their networks."""
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


def factory(task: str, **options: Any) -> Any:
    """Return a factory of the task's environment."""
    if "_v" not in task:
        return partial(MeltingpotEnv, task, **options)
    return partial(PettingZooEnv, task, parallel=task != "connect_four_v3", **options)


def build(
    stack: ExitStack, task: str, network: str, count: int
) -> dict[str, Alternative]:
    """Return a collector with one policy, and one with ``count`` policies."""
    make = factory(task)
    policy, *learners = (
        make_policy(make, **NETWORKS[network]) for _ in range(count + 1)
    )
    policies = {f"policy_{number}": learner for number, learner in enumerate(learners)}
    settings: dict[str, Any] = {"frames_per_batch": 100 * ENVS, "seed": 0}
    assignment = partial(assign, names=tuple(policies))
    single = Collector([make] * ENVS, policy, **settings)
    stack.callback(single.shutdown)
    several = Collector([make] * ENVS, policies=policies, assign=assignment, **settings)
    stack.callback(several.shutdown)
    return {"one policy": collecting(single), f"{count} policies": collecting(several)}


def build_learners(
    stack: ExitStack, task: str, network: dict[str, Any]
) -> dict[str, Alternative]:
    """Return collectors with one network for all agents, and with one per agent."""
    make = factory(task)
    make_separate = factory(task, group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)
    env = make()
    agents = [agent for members in env.group_map.values() for agent in members]
    env.close()
    settings: dict[str, Any] = {"frames_per_batch": 100 * ENVS, "seed": 0}
    policies = {agent: make_policy(make, **network) for agent in agents}
    collectors = {
        "one shared network": Collector(
            [make] * ENVS, make_policy(make, **network), **settings
        ),
        "share_params=False": Collector(
            [make] * ENVS,
            make_policy(make, share_params=False, **network),
            **settings,
        ),
        "one group per agent": Collector(
            [make_separate] * ENVS, make_policy(make_separate, **network), **settings
        ),
        "policies=": Collector(
            [make] * ENVS, policies=policies, assign=themselves, **settings
        ),
    }
    for collector in collectors.values():
        stack.callback(collector.shutdown)
    return {name: collecting(collector) for name, collector in collectors.items()}


def themselves(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    """Give each agent the policy of its name."""
    del seed
    return {agent: agent for agent in agents}


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
    ] + [
        Case(
            f"{task}, a network per agent",
            partial(build_learners, task=task, network=NETWORKS[network]),
            "frame",
        )
        for task, network in LEARNERS.items()
    ]
