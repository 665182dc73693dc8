"""What it costs to give every agent weights of its own, in each of the ways.

Eight environments are collected in one process, with one network for all agents, and
with a network per agent.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

from harness.turns import Alternative

from cases.case import Case, collecting
from marl_collect import Collector, MarlGroupMapType
from marl_collect.envs import MeltingpotEnv, PettingZooEnv
from marl_collect.models import make_policy

# The network of examples/population_matrix_game.py, for pictures.
_SMALL: dict[str, Any] = {
    "num_cells": (64,),
    "conv": {"num_cells": (16, 32), "kernel_sizes": (8, 3), "strides": (8, 1)},
}
NETWORKS: dict[str, dict[str, Any]] = {
    "simple_spread_v3": {},
    "coins": _SMALL,
    "commons_harvest__open": _SMALL,
}
"""Tasks with 3, 2 and 7 agents, and their networks."""
ENVS = 8


def build(stack: ExitStack, task: str) -> dict[str, Alternative]:
    """Return collectors with one network for all agents, and with one per agent."""
    env_class: Any = PettingZooEnv if "_v" in task else MeltingpotEnv
    make = partial(env_class, task)
    make_separate = partial(make, group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)
    env = make()
    agents = [agent for members in env.group_map.values() for agent in members]
    env.close()
    network = NETWORKS[task]
    shared = make_policy(make, **network)
    unshared = make_policy(make, share_params=False, **network)
    separate = make_policy(make_separate, **network)
    policies = {agent: make_policy(make, **network) for agent in agents}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "one shared network": (make, {"policy": shared}),
        "share_params=False": (make, {"policy": unshared}),
        "one group per agent": (make_separate, {"policy": separate}),
        "policies=": (make, {"policies": policies, "assign": themselves}),
    }
    alternatives = {}
    for name, (factory, acting) in ways.items():
        collector = Collector(
            [factory] * ENVS, frames_per_batch=100 * ENVS, seed=0, **acting
        )
        alternatives[name] = collecting(stack.enter_context(collector))
    return alternatives


def themselves(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    """Give each agent the policy of its name."""
    del seed
    return {agent: agent for agent in agents}


def cases() -> list[Case]:
    """Return a row per task."""
    return [
        Case(f"{task}, a network per agent", partial(build, task=task), "frame")
        for task in NETWORKS
    ]
