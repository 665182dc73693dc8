"""What the loops act with, and how they are measured."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.served import System
from harness.windows import Measure, measure_parts
from workloads.table import WORKLOADS

from limits.loops import N_ACTIONS, Loop
from limits.minimal import Act, act_for

_PART = 50
"""Steps between two looks at the clock, where nothing else says how many."""


def draw_actions(workload: str) -> list[dict[str, Any]]:
    """Return joint actions, each a dict of group to array ``[n, ...]``."""
    random = np.random.default_rng(int(os.environ.get("MARL_BENCHMARK_COPY", "0")))
    joint: list[dict[str, Any]] = []
    for _ in range(N_ACTIONS):
        actions: dict[str, Any] = {}
        for name, group in WORKLOADS[workload].groups.items():
            n, k = group.agents, group.actions
            if group.discrete:
                actions[name] = random.integers(0, k, n)
            else:
                actions[name] = random.uniform(-1, 1, (n, k)).astype(np.float32)
        joint.append(actions)
    return joint


def acting(system: System) -> dict[str, Act]:
    """Return a forward pass per group, none to act at random."""
    if system.policy == "random":
        return {}
    groups = WORKLOADS[system.workload].groups
    return {name: act_for(group) for name, group in groups.items()}


def measure_loop(
    loop: Loop, part_steps: int = _PART, finish: Callable[[], None] | None = None
) -> Measure:
    """Return a measure of a loop that resets when an episode is over.

    Args:
        loop: what is stepped.
        part_steps: steps between two looks at the clock.
        finish: called after each such part, within its time.
    """
    steps = 0
    episode = 1000 * int(os.environ.get("MARL_BENCHMARK_COPY", "0"))
    loop.reset(episode)

    def part() -> tuple[int, int, bool]:
        nonlocal steps, episode
        episodes = 0
        for _ in range(part_steps):
            if loop.over:
                episode += 1
                episodes += 1
                loop.reset(episode)
            loop.step(steps % N_ACTIONS)
            steps += 1
        if finish is not None:
            finish()
        return part_steps, episodes, episodes > 0

    return measure_parts(part)
