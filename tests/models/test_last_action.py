"""``make_policy(last_action=True)``: what agents did last, in every kind of data."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import Collector, evaluate
from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import make_policy
from marl_collect.models.last_action import LastAction
from marl_collect.models.saved_policy import load_policy, save_policy
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.value_decomposition import ValueLearner

pytestmark = pytest.mark.processes

factory = partial(CountingEnv, action_mask=True)
OPTIONS: dict[str, Any] = {
    "last_action": True,
    "num_cells": (8,),
    "activation_class": nn.ReLU,  # Observations are large.
}


def small(what: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_policy(what or factory().description, **OPTIONS | options)


def numbers(actions: Any) -> Any:
    """Return what stands for actions of the counting environment."""
    return np.eye(4)[actions] if actions.ndim == 3 else actions


def check_last_actions(batch: Any, groups: Any) -> int:
    """Compare frames from the first one of episodes on; return how many begin one."""
    done = batch["next", "done"][..., 0].numpy()
    begun = 0
    for group in groups:
        acts = batch[group, "mask"].numpy()
        did = numbers(batch[group, "action"].numpy())
        for row in range(len(batch)):
            expected = np.zeros_like(did[row, 0])
            for frame in range(batch.shape[1]):
                actual = batch[group, "last_action"][row, frame].numpy()
                np.testing.assert_array_equal(actual, expected)
                begun += not expected.any()
                expected = np.where(
                    acts[row, frame, :, None], did[row, frame], expected
                )
                after = batch["next", group, "last_action"][row, frame].numpy()
                np.testing.assert_array_equal(after, expected)
                if done[row, frame]:
                    expected = np.zeros_like(expected)
    return begun


def test_rollouts_evaluations_and_saved_policies_hand_them_on(tmp_path: Path) -> None:
    policy = small()
    with torch.no_grad():
        rollout = factory().rollout(30, policy, break_when_any_done=False)
    assert check_last_actions(rollout.unsqueeze(0), ("hunter", "prey")) > 2
    save_policy(tmp_path / "policy.pt", policy, factory().description, **OPTIONS)
    saved = load_policy(tmp_path / "policy.pt", factory().description)
    returns = [
        evaluate(acting, factory, episodes=4, num_workers=workers).team_returns
        for acting, workers in ((policy, 1), (policy, 2), (saved, 1))
    ]
    assert returns[0] == returns[1] == returns[2]
    other = small(last_action=False)
    with pytest.raises(ValueError, match="another policy"):
        save_policy(tmp_path / "other.pt", other, factory().description, **OPTIONS)


def description_of(action: Any, *, one_hot: bool = False) -> EnvDescription:
    observation = spaces.Box(-1, 1, (3,))
    group = GroupDescription(
        ("a", "b"), observation, action, categorical_actions=not one_hot
    )
    return EnvDescription("any", {"agents": group})


@pytest.mark.parametrize(
    ("space", "one_hot", "action", "expected"),
    [
        (spaces.Discrete(3), False, [2, 0], [[0, 0, 1], [1, 0, 0]]),
        (spaces.Discrete(2), True, [[0, 1], [1, 0]], [[0, 1], [1, 0]]),
        (
            spaces.MultiDiscrete([2, 3]),
            False,
            [[1, 0], [0, 2]],
            [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]],
        ),
        (spaces.MultiBinary(2), False, [[1, 0], [1, 1]], [[1, 0], [1, 1]]),
        (spaces.Box(-1, 1, (2,)), False, [[0.5, -1.0], [0, 1]], [[0.5, -1], [0, 1]]),
    ],
)
def test_encoded_actions(space: Any, one_hot: bool, action: Any, expected: Any) -> None:
    group = description_of(space, one_hot=one_hot).groups["agents"]
    last = LastAction.of("agents", group)
    actual = last.encode(torch.tensor(action))
    assert actual.dtype == torch.float32
    assert actual.tolist() == expected
    assert last.size == len(expected[0])


def test_a_value_learner_acts_in_its_random_frames() -> None:
    """Random actions of a collector would be missing in the next frame."""
    hunters = partial(CountingEnv, n_prey=0)
    options = TrainingOptions(last_action=True, num_cells=(8,)).with_settings(
        {"value.epsilon_start": 0.5, "value.warm_up_frames": 60}
    )
    learner = ValueLearner(hunters().description, Setup("vdn"), options, seed=0)
    assert learner.warm_up_frames is None
    assert learner.policy_options["epsilon"] == 1.0
    with Collector([hunters] * 2, learner.policy, frames_per_batch=40) as collector:
        batch = collector.next()
        assert check_last_actions(batch, ("hunter",)) > 2
        assert learner.update(batch, progress=0.1)["epsilon"] == 1.0
        assert learner.update(collector.next(), progress=0.2)["epsilon"] < 0.5
