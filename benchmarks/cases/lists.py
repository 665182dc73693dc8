"""Environments with lists of agents: a loop over the library, and our collector.

The loop steps the environment of ``gymnasium.make`` without Gymnasium's checker, with
random actions drawn in advance, and stores observations at the root and under ``next``,
actions, rewards and flags.
"""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from harness.turns import Alternative

from cases.case import Case
from marl_collect.collectors import Collector

FRAMES = 2000
TASKS = {
    ("lbforaging", "LbForagingEnv"): (
        "Foraging-5x5-3p-1f-v3",
        "Foraging-8x8-2p-3f-v3",
        "Foraging-15x15-4p-3f-v3",
    ),
    ("rware", "RwareEnv"): ("rware-tiny-2ag-v2", "rware-small-4ag-v2"),
}


def stock_loop(task: str) -> Callable[[], float]:
    """Return a call that stores a batch of the library's environment."""
    env = gymnasium.make(task, disable_env_checker=True)
    observed: Any = env.observation_space
    acted: Any = env.action_space
    shape = (FRAMES, len(acted))
    random = np.random.default_rng(0)
    root = np.zeros((*shape, *observed[0].shape), np.float32)
    following = np.zeros_like(root)
    actions = np.zeros(shape, np.int64)
    rewards = np.zeros(shape, np.float32)
    flags = np.zeros((FRAMES, 2), np.bool_)
    episode = 0
    observation, _ = env.reset(seed=episode)

    def call() -> float:
        nonlocal observation, episode
        drawn = random.integers(0, acted[0].n, shape)
        for frame in range(FRAMES):
            root[frame] = observation
            actions[frame] = drawn[frame]
            observation, reward, *over, _ = env.step(list(drawn[frame]))
            following[frame] = observation
            rewards[frame] = reward
            flags[frame] = over
            if any(over):
                episode += 1
                observation, _ = env.reset(seed=episode)
        return float(FRAMES)

    return call


def build(
    stack: ExitStack, library: str, family: str, task: str
) -> dict[str, Alternative]:
    """Return the loop and the collector."""
    importlib.import_module(library)  # It registers its tasks.
    from marl_collect import envs

    collector = stack.enter_context(
        Collector(
            partial(getattr(envs, family), task),
            None,
            frames_per_batch=FRAMES,
            total_frames=-1,
            seed=0,
        )
    )
    return {
        "stock loop that stores": Alternative(stock_loop(task)),
        "Collector": Alternative(lambda: float(collector.next().numel())),
    }


def cases() -> list[Case]:
    """Return a row per task."""
    return [
        Case(task, partial(build, library=library, family=name, task=task), "frame")
        for (library, name), tasks in TASKS.items()
        for task in tasks
    ]
