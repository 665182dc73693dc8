"""Tasks of families whose environments are single worlds: a loop, and our collector.

The loop steps the library's environment with random actions drawn in advance, and
stores observations at the root and under ``next``, actions, rewards and flags.
Environments of ``gymnasium.make`` are built without Gymnasium's checker. An episode
ends with the first agent that is done, as in ours.
"""

import importlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from harness.turns import Alternative

from cases.case import Case
from marl_collect.cli.tasks import find_factory
from marl_collect.collectors import Collector

FRAMES = 2000
LISTS = {
    "lbforaging": (
        "Foraging-5x5-3p-1f-v3",
        "Foraging-8x8-2p-3f-v3",
        "Foraging-15x15-4p-3f-v3",
    ),
    "rware": ("rware-tiny-2ag-v2", "rware-small-4ag-v2"),
}
"""Tasks of libraries with Gymnasium's methods and lists of agents."""
PARALLEL = {
    "sisl": ("multiwalker_v9",),
    "mpe": ("simple_spread_v3",),
    "magent": ("battle_v4",),
    "mamujoco": ("Ant-4x2",),
}
"""Tasks with PettingZoo's ParallelEnv, whose agents have equal spaces."""


def draw(space: Any, shape: tuple[int, ...]) -> Any:
    """Return random elements of a space, ``[*shape, ...]``."""
    random = np.random.default_rng(0)
    if isinstance(space, spaces.Box):
        size = (*shape, *space.shape)
        return random.uniform(space.low, space.high, size).astype(space.dtype)
    return random.integers(0, space.n, shape)


def list_loop(family: str, task: str) -> Callable[[], float]:
    """Return a call that stores a batch of an environment with lists of agents."""
    importlib.import_module(family)  # It registers its tasks.
    env = gymnasium.make(task, disable_env_checker=True)
    observed: Any = env.observation_space
    action_spaces: Any = env.action_space
    shape = (FRAMES, len(action_spaces))
    root = np.zeros((*shape, *observed[0].shape), np.float32)
    following = np.zeros_like(root)
    samples = draw(action_spaces[0], shape)
    actions = np.zeros_like(samples)
    rewards = np.zeros(shape, np.float32)
    flags = np.zeros((FRAMES, 2), np.bool_)
    episode = 0
    observation, _ = env.reset(seed=episode)

    def call() -> float:
        nonlocal observation, episode
        for frame in range(FRAMES):
            root[frame] = observation
            actions[frame] = samples[frame]
            observation, reward, *over, _ = env.step(list(samples[frame]))
            following[frame] = observation
            rewards[frame] = reward
            flags[frame] = over
            if any(over):
                episode += 1
                observation, _ = env.reset(seed=episode)
        return float(FRAMES)

    return call


def parallel_loop(family: str, task: str) -> Callable[[], float]:
    """Return a call that stores a batch of a ParallelEnv."""
    env: Any
    if family == "mamujoco":
        from gymnasium_robotics import mamujoco_v1

        env = mamujoco_v1.parallel_env(*task.split("-"))
    else:
        from marl_collect.envs.pettingzoo.tasks import find_task

        env = find_task(task)()
    rows = {agent: row for row, agent in enumerate(env.possible_agents)}
    observed = env.observation_space(env.possible_agents[0])
    shape = (FRAMES, len(rows))
    root = np.zeros((*shape, *observed.shape), observed.dtype)
    following = np.zeros_like(root)
    samples = draw(env.action_space(env.possible_agents[0]), shape)
    actions = np.zeros_like(samples)
    rewards = np.zeros(shape, np.float32)
    flags = np.zeros((*shape, 2), np.bool_)
    episode = 0
    observations, _ = env.reset(seed=episode)

    def call() -> float:
        nonlocal observations, episode
        for frame in range(FRAMES):
            for agent, observation in observations.items():
                root[frame, rows[agent]] = observation
            actions[frame] = samples[frame]
            joint = {agent: samples[frame, row] for agent, row in rows.items()}
            observations, reward, terminated, truncated, _ = env.step(joint)
            for agent, observation in observations.items():
                row = rows[agent]
                following[frame, row] = observation
                rewards[frame, row] = reward[agent]
                flags[frame, row] = terminated[agent], truncated[agent]
            if flags[frame].any():
                episode += 1
                observations, _ = env.reset(seed=episode)
        return float(FRAMES)

    return call


def build(
    stack: ExitStack, loop: Callable[[str, str], Callable[[], float]], name: str
) -> dict[str, Alternative]:
    """Return the loop and the collector for ``"family/task"``."""
    factory = find_factory(name, {})
    factory().close()  # The error of a missing library names what to install.
    collector = stack.enter_context(
        Collector(factory, None, frames_per_batch=FRAMES, total_frames=-1, seed=0)
    )
    return {
        "stock loop that stores": Alternative(loop(*name.split("/"))),
        "Collector": Alternative(lambda: float(collector.next().numel())),
    }


def cases() -> list[Case]:
    """Return a row per task."""
    return [
        Case(
            f"{family}/{task}",
            partial(build, loop=loop, name=f"{family}/{task}"),
            "frame",
        )
        for loop, families in ((list_loop, LISTS), (parallel_loop, PARALLEL))
        for family, tasks in families.items()
        for task in tasks
    ]
