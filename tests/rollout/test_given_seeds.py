"""The actions of an episode with a given seed depend on nothing but this seed."""

from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, set_interaction_type
from workloads.counting import CountingEnv

from marl_collect.buffers.layout import TRAJ_IDS, batch_fields
from marl_collect.core.batch import SerialBatch
from marl_collect.core.description import allocate
from marl_collect.models import make_policy
from marl_collect.policies.assigned import AssignedPolicies
from marl_collect.policies.choose import make_runner
from marl_collect.rollout.episodes import EPISODE_BITS, Plan
from marl_collect.rollout.loop import Rollout
from marl_collect.rollout.progress import ProgressReporter

Seeds = tuple[tuple[int, ...], ...]


def actions_of(seeds: Seeds, policy: Any, frames: int) -> dict[int, Any]:
    """Return the actions of each episode, by its seed, from slots of so many frames."""
    engine = SerialBatch([CountingEnv(action_mask=True) for _ in seeds])
    plan = Plan(seed=4, environments=range(len(seeds)), given_seeds=seeds)
    runner = make_runner(policy, engine)
    rollout = Rollout(engine, runner, plan, ProgressReporter())
    fields = batch_fields(engine.description, runner.signature, {TRAJ_IDS})
    running = {seed for given in seeds for seed in given}
    episodes: dict[int, list[Any]] = {seed: [] for seed in running}
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        while running:
            slot = allocate(fields, (len(seeds), frames))
            count = rollout.collect(slot).frames
            for row, frame in np.ndindex(len(seeds), count):
                number = int(slot[TRAJ_IDS][row, frame]) % 2**EPISODE_BITS
                if number >= len(seeds[row]):
                    continue
                seed = seeds[row][number]
                actions = [slot[g, "action"][row, frame] for g in ("hunter", "prey")]
                episodes[seed].append(np.concatenate([a.ravel() for a in actions]))
                if slot["next", "done"][row, frame]:
                    running.remove(seed)
    return {seed: np.stack(frames) for seed, frames in episodes.items()}


def alternately(seed: int, agents: tuple[str, ...]) -> dict[str, str]:
    return {agent: str((seed + i) % 2) for i, agent in enumerate(agents)}


@pytest.mark.parametrize("networks", [0, 1, 2])
def test_actions_depend_on_the_seed_of_their_episode_only(networks: int) -> None:
    torch.manual_seed(0)
    env = CountingEnv(action_mask=True)
    policies = {str(i): make_policy(env, num_cells=(4,)) for i in range(networks)}
    policy: Any = policies.get("0")
    if networks == 2:
        policy = AssignedPolicies(policies, alternately)
    expected = actions_of(((7,), (8,), (9,)), policy, 60)
    for seeds, frames in ((((9, 8, 7),), 60), (((8,), (7, 9)), 12)):
        actual = actions_of(seeds, policy, frames)
        assert actual.keys() == expected.keys()
        for seed, actions in expected.items():
            np.testing.assert_array_equal(actual[seed], actions)
    assert not np.array_equal(expected[7][:4], expected[8][:4])
