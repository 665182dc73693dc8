"""Batches of a simulator of many worlds that costs nothing, and a bare loop.

Each world has three agents that observe 18 numbers and take one of five actions, at
random or by a network with two hidden layers of 64 units. Both sides store the same
arrays, at the root and under ``next``. The bare loop draws all actions from one
generator, those of a network as the argmax of logits and Gumbel noise, and writes whole
frames ``[K, ...]`` one after the other. It knows neither episodes nor returns. The rows
differ in the number of worlds and in how episodes end; divide the times by each other
to get the curve. The last rows compare whole trajectories with plain batches.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, final

import numpy as np
import torch
from gymnasium import spaces
from harness.turns import Alternative
from typing_extensions import override

from cases.case import Case
from marl_collect.collectors import Collector
from marl_collect.core.batched import BatchedEnv, Step
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models.policy import make_policy

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


Act = Callable[[Any], dict[str, Any]]
"""Returns the outputs for observations ``[K, 3, 18]``, ``[K, 3, ...]`` by name."""


def random_actions(worlds: int) -> Act:
    """Return a function that draws actions."""
    random = np.random.default_rng(0)
    return lambda _: {"action": random.integers(0, ACTIONS, (worlds, AGENTS))}


def network_actions(policy: Any) -> Act:
    """Return a function that samples from the network of ``make_policy``."""
    network = policy[0].module

    @torch.no_grad()
    def act(observed: Any) -> dict[str, Any]:
        logits = network(torch.from_numpy(observed))
        gumbel = torch.empty_like(logits).exponential_().log_().neg_()
        action = gumbel.add_(logits).argmax(-1)
        chances = logits.log_softmax(-1).gather(-1, action[..., None])
        return {
            "action": action.numpy(),
            "logits": logits.numpy(),
            "action_log_prob": chances[..., 0].numpy(),
        }

    return act


def bare_loop(worlds: int, ends: str, act: Act) -> Callable[[], float]:
    """Return a call that fills one batch ``[FRAMES, K]``."""
    env = FreeWorlds(worlds, ends)
    row = env.description.row()
    keys = [key for key in row if key[-1] not in ("reward", "action")]
    shape = (FRAMES, worlds)
    memory: dict[Any, Any] = {
        (where, *key): np.zeros((*shape, *row[key].shape), row[key].dtype)
        for where in ("root", "next")
        for key in keys
    }
    reward = np.zeros((*shape, AGENTS, 1), np.float32)
    ids = np.zeros(shape, np.int64)
    names = [key[1:] for key in memory if key[0] == "next"]
    ended = [key for key in names if key[-1] in ("done", "terminated")]
    cut = [key for key in names if key[-1] == "truncated"]
    observation, mask = ("agents", "observation"), ("agents", "mask")
    seeds = np.zeros(worlds, np.int64)
    episode = np.zeros(worlds, np.int64)
    observed = env.begin(None, seeds)["agents"]
    outputs = {
        name: np.zeros((FRAMES, *values.shape), values.dtype)
        for name, values in act(observed).items()
    }

    def call() -> float:
        nonlocal observed
        root, following = (
            {key[1:]: array for key, array in memory.items() if key[0] == where}
            for where in ("root", "next")
        )
        for frame in range(FRAMES):
            acted = act(observed)
            for name, values in acted.items():
                outputs[name][frame] = values
            root[observation][frame] = observed
            root[mask][frame] = True
            for key in (*ended, *cut):
                root[key][frame] = False
            ids[frame] = episode
            step = env.advance({"agents": acted["action"]})
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


def collect(
    stack: ExitStack, worlds: int, ends: str, policy: Any = None, **keywords: Any
) -> Alternative:
    """Return our collector."""
    collector = stack.enter_context(
        Collector(
            partial(FreeWorlds, worlds, ends),
            policy,
            frames_per_batch=FRAMES * worlds,
            total_frames=-1,
            seed=0,
            **keywords,
        )
    )
    return Alternative(lambda: float(_frames(collector.next())))


def _frames(batch: Any) -> int:
    """Return the number of frames, without those that pad trajectories."""
    padded = "mask" in batch["collector"].keys()
    return int(batch["collector", "mask"].sum()) if padded else batch.numel()


def batches(
    stack: ExitStack, worlds: int, ends: str, *, network: bool
) -> dict[str, Alternative]:
    """Return the bare loop, and our collector."""
    policy, act = None, random_actions(worlds)
    if network:
        policy = make_policy(partial(FreeWorlds, worlds, ends), num_cells=(64, 64))
        act = network_actions(policy)
    return {
        "bare loop": Alternative(bare_loop(worlds, ends, act)),
        "Collector": collect(stack, worlds, ends, policy),
    }


def trajectories(stack: ExitStack, worlds: int, ends: str) -> dict[str, Alternative]:
    """Return our collector with batches ``[K, T]`` and with whole trajectories."""
    forms = {
        f"trajs_per_batch={worlds}, {form}": collect(
            stack, worlds, ends, trajs_per_batch=worlds, traj_format=form
        )
        for form in ("cat", "padded")
    }
    return {"plain batches": collect(stack, worlds, ends), **forms}


def cases() -> list[Case]:
    """Return a row for each number of worlds, way to act and way to end."""
    work = "frame of a world"
    compared = [
        Case(
            f"{worlds} worlds, {acting}, {ends}",
            partial(batches, worlds=worlds, ends=ends, network=acting == "network"),
            work,
        )
        for acting, endings in (("random actions", ENDS), ("network", ENDS[1:2]))
        for ends in endings
        for worlds in WORLDS
    ]
    whole = [
        Case(
            f"{worlds} worlds, trajectories, {ends}",
            partial(trajectories, worlds=worlds, ends=ends),
            work,
        )
        for ends in ENDS[1:]
        for worlds in (64, 1024)
    ]
    return compared + whole
