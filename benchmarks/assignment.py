"""Measures what it costs to assign several policies to agents.

Collects with one policy for all agents, and with several policies that are assigned to
agents at random in each episode, in turns in one process. Prints frames per second of
processor time, the fastest round of each, and the ratio. All networks of a row have the
same kind: shared by all agents, shared with identities of the agents, or one per agent.

    python benchmarks/assignment.py
    python benchmarks/assignment.py --tasks coins --networks ids own --rounds 5
    python benchmarks/assignment.py --tasks coins --networks small --policies 7
"""

import argparse
import random
import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from marl_collect import Collector
from marl_collect.envs import MeltingpotEnv, PettingZooEnv
from marl_collect.models import make_policy

TASKS = ["simple_spread_v3", "multiwalker_v9", "connect_four_v3"]
if find_spec("meltingpot"):
    TASKS.append("coins")
NETWORKS: dict[str, dict[str, Any]] = {
    "shared": {},
    "ids": {"agent_ids": True},
    "own": {"share_params": False},
    # That of examples/population_matrix_game.py, for pictures.
    "small": {
        "num_cells": (64,),
        "conv": {"num_cells": (16, 32), "kernel_sizes": (8, 3), "strides": (8, 1)},
    },
}
USUAL = ["shared", "ids", "own"]


def assign(
    seed: int, agents: tuple[str, ...], *, names: tuple[str, ...]
) -> dict[str, str]:
    """Give each agent one of the policies."""
    rng = random.Random(seed)
    return {agent: rng.choice(names) for agent in agents}


def factory(task: str) -> Any:
    """Return a factory of the task's environment."""
    if task.endswith("__repeated") or "_v" not in task:
        return partial(MeltingpotEnv, task)
    return partial(PettingZooEnv, task, parallel=task != "connect_four_v3")


def rate(collector: Collector, frames: int) -> float:
    """Return the frames per second of processor time."""
    collected, begin = 0, time.process_time()
    while collected < frames:
        batch = collector.next()
        collected += batch.numel()
        del batch
    return collected / (time.process_time() - begin)


def measure(
    task: str, network: str, count: int, envs: int, frames: int, rounds: int
) -> tuple[float, float]:
    """Return the best frames per second with one policy and with several."""
    build = factory(task)
    one, *others = (make_policy(build, **NETWORKS[network]) for _ in range(count + 1))
    given: dict[str, Any] = {"frames_per_batch": 100 * envs, "seed": 0}
    policies = {f"policy_{number}": other for number, other in enumerate(others)}
    chosen = partial(assign, names=tuple(policies))
    factories = [build] * envs
    with (
        Collector(factories, one, **given) as single,
        Collector(factories, policies=policies, assign=chosen, **given) as several,
    ):
        best = [0.0, 0.0]
        for _ in range(rounds + 1):  # The first warms up; it is the slowest.
            for index, collector in enumerate((single, several)):
                best[index] = max(best[index], rate(collector, frames))
        return best[0], best[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=USUAL)
    parser.add_argument("--policies", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--frames", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    several = f"{asked.policies} policies"
    table = Table("task", "network", "one policy", several, "ratio")
    for task in asked.tasks:
        for network in asked.networks:
            sizes = asked.policies, asked.envs, asked.frames, asked.rounds
            one, some = measure(task, network, *sizes)
            rates = f"{one:,.0f}", f"{some:,.0f}", f"{some / one:.2f}"
            table.add_row(task, network, *rates)
    Console().print(table)


if __name__ == "__main__":
    main()
