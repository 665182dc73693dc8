"""Batches of a simulator of many worlds that costs nothing, and a bare loop.

Each world has three agents that observe 18 numbers and take one of five actions at
random. Both sides store the same arrays, at the root and under ``next``; the bare loop
draws all actions from one generator and writes whole frames ``[K, ...]`` one after the
other. It knows neither episodes nor returns. The rows differ in the number of worlds
and in how episodes end; divide the times by each other to get the curve.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import numpy as np
from gymnasium import spaces
from harness.turns import Alternative
from typing_extensions import override

from cases.case import Case
from marl_collect.collectors import Collector
from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription, GroupDescription

AGENTS, INPUTS, ACTIONS = 3, 18, 5
FRAMES = 64
"""Frames of each world in a batch."""
WORLDS = (1, 16, 64, 256, 1024, 4096)
PERIOD = 100
"""Steps of an episode that ends by its time limit, or on average if ends are random."""
_TABLE = 997
"""Steps after which random ends repeat; so long that they come in every world."""
ENDS = ("no ends", "1 % end per frame", "all end after 100 frames")


@final
class FreeWorlds(BatchedEnv):
    """Worlds with constant observations and rewards, which end as a table says."""

    def __init__(self, worlds: int, ends: str) -> None:
        """Prepare the table."""
        group = GroupDescription(
            tuple(f"agent_{i}" for i in range(AGENTS)),
            spaces.Box(-1, 1, (INPUTS,), np.float32),
            spaces.Discrete(ACTIONS),
        )
        limit = PERIOD if ends == ENDS[2] else None
        about = EnvDescription("free", {"agents": group}, time_limit=limit)
        super().__init__(about, worlds)
        chance = 1 / PERIOD if ends == ENDS[1] else 0.0
        self._ends = np.random.default_rng(0).random((_TABLE, worlds)) < chance
        self._observed = {
            "agents": np.zeros((worlds, AGENTS, INPUTS), np.float32),
        }
        self._rewards = {"agents": np.ones((worlds, AGENTS), np.float32)}
        self._steps = 0

    @override
    def begin(self, which: Any, seeds: Any) -> Any:
        """Return the constants."""
        return self._observed

    @override
    def advance(self, actions: Any) -> Step:
        """Return the constants."""
        self._steps += 1
        over = self._ends[self._steps % len(self._ends)]
        return Step(self._observed, self._rewards, over)


def bare_loop(worlds: int, ends: str) -> Callable[[], float]:
    """Return a call that fills one batch ``[FRAMES, K]``."""
    env = FreeWorlds(worlds, ends)
    random = np.random.default_rng(0)
    row = env.description.row()
    keys = [key for key in row if key[-1] not in ("reward", "action")]
    shape = (FRAMES, worlds)
    memory: dict[Any, Any] = {
        (where, *key): np.zeros((*shape, *row[key].shape), row[key].dtype)
        for where in ("root", "next")
        for key in keys
    }
    action = np.zeros((*shape, AGENTS), np.int64)
    reward = np.zeros((*shape, AGENTS, 1), np.float32)
    ids = np.zeros(shape, np.int64)
    names = [key[1:] for key in memory if key[0] == "next"]
    ended = [key for key in names if key[-1] in ("done", "terminated")]
    cut = [key for key in names if key[-1] == "truncated"]
    observation, mask = ("agents", "observation"), ("agents", "mask")
    seeds = np.zeros(worlds, np.int64)
    episode = np.zeros(worlds, np.int64)
    observed = env.begin(None, seeds)["agents"]

    def call() -> float:
        nonlocal observed
        root, following = (
            {key[1:]: array for key, array in memory.items() if key[0] == where}
            for where in ("root", "next")
        )
        for frame in range(FRAMES):
            chosen = random.integers(0, ACTIONS, (worlds, AGENTS))
            action[frame] = chosen
            root[observation][frame] = observed
            root[mask][frame] = True
            for key in (*ended, *cut):
                root[key][frame] = False
            ids[frame] = episode
            step = env.advance({"agents": chosen})
            over: Any = step.terminated
            following[observation][frame] = step.observations["agents"]
            reward[frame, ..., 0] = step.rewards["agents"]
            following[mask][frame] = ~over[:, None]
            for key in cut:
                following[key][frame] = False
            for key in ended:
                target = following[key][frame]
                target[...] = over.reshape(worlds, *([1] * (target.ndim - 1)))
            observed = step.observations["agents"]
            if over.any():
                episode[over] += 1
                observed = np.where(
                    over[:, None, None], env.begin(over, seeds)["agents"], observed
                )
        return float(FRAMES * worlds)

    return call


def batches(stack: ExitStack, worlds: int, ends: str) -> dict[str, Alternative]:
    """Return the bare loop, and our collector."""
    collector = stack.enter_context(
        Collector(
            partial(FreeWorlds, worlds, ends),
            None,
            frames_per_batch=FRAMES * worlds,
            total_frames=-1,
            seed=0,
        )
    )
    return {
        "bare loop": Alternative(bare_loop(worlds, ends)),
        "Collector": Alternative(lambda: float(collector.next().numel())),
    }


def cases() -> list[Case]:
    """Return a row for each number of worlds and each way to end."""
    return [
        Case(
            f"{worlds} worlds, {ends}",
            partial(batches, worlds=worlds, ends=ends),
            "frame of a world",
        )
        for ends in ENDS
        for worlds in WORLDS
    ]
