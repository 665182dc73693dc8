"""MADDPG and IDDPG: exploration, initial weights, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv
from workloads.pair import PairEnv

from marl_collect import Collector, describe
from marl_collect.envs import PettingZooWrapper
from marl_collect.models import make_critic, make_policy, save_policy
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.trainer import make_learner

pytestmark = pytest.mark.processes


def numbers() -> Any:
    return PettingZooWrapper(PairEnv(continuous=True))


SETUP = Setup("maddpg")
OPTIONS = TrainingOptions(frames=60).with_settings(
    {"num_cells": (8,), "value.warm_up_frames": 0, "value.minibatch_frames": 16}
)


def learner_and_batch(**settings: Any) -> Any:
    options = OPTIONS.with_settings(settings)
    learner = make_learner(describe(numbers), SETUP, options, 0)
    with Collector(numbers, learner.policy, frames_per_batch=60) as collector:
        return learner, collector.next().clone()


def test_noise_stays_as_it_is_also_with_the_weights_of_another_learner(
    tmp_path: Path,
) -> None:
    learner, _ = learner_and_batch()
    chosen = learner.policy_options
    saved = tmp_path / "policy.pt"
    save_policy(saved, make_policy(numbers, **chosen), numbers, **chosen)
    for initial in (None, str(saved)):
        learner, batch = learner_and_batch(initial=initial, **{"value.noise": 0.3})
        for updates in (0, 3):
            assert learner.updates == updates
            scale = learner.policy.get_dist(batch).scale
            assert scale.flatten().tolist() == pytest.approx([0.3] * 120)
            learner.update(batch, 1.0)


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(TypeError, match="maddpg needs continuous actions"):
        make_learner(describe(CountingEnv), SETUP, OPTIONS, 0)
    with pytest.raises(TypeError, match="actions=True needs Box actions, but hunter"):
        make_critic(CountingEnv, actions=True)


@pytest.mark.parametrize(
    ("option", "setting"), [("recurrent", "gru"), ("last_action", True)]
)
def test_networks_with_memory_are_refused(option: str, setting: Any) -> None:
    options = OPTIONS.with_settings({option: setting})
    with pytest.raises(ValueError, match=f"{option} is {setting!r}, but maddpg"):
        make_learner(describe(numbers), SETUP, options, 0)


def test_agents_that_wait_for_their_turn_are_refused() -> None:
    learner, batch = learner_and_batch()
    (name,) = learner.description.groups
    batch[name, "mask"] = torch.zeros(batch[name, "done"].shape[:-1]).bool()
    with pytest.raises(ValueError, match="agents wait for their turn here. Use vdn"):
        learner.update(batch, 1.0)
