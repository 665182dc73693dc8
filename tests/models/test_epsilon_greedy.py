"""Policies that are epsilon-greedy in the values of actions."""

from functools import partial

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect.models import make_policy
from marl_collect.models.policy import EpsilonGreedyLogits

VALUES = torch.tensor([[[1.0, 3.0, 2.0, 9.0]]])
LEGAL = torch.tensor([[[True, True, True, False]]])


def test_epsilon_is_spread_over_legal_actions_and_the_best_gets_the_rest() -> None:
    logits = EpsilonGreedyLogits(0.3)(VALUES, LEGAL)
    expected = torch.tensor([[[0.1, 0.8, 0.1, 0.0]]])
    torch.testing.assert_close(logits.softmax(-1), expected, atol=1e-5, rtol=0)


def test_the_mode_is_the_best_action_even_if_all_are_equally_likely() -> None:
    assert EpsilonGreedyLogits(1.0)(VALUES).argmax(-1).item() == 3
    assert EpsilonGreedyLogits(1.0)(VALUES, LEGAL).argmax(-1).item() == 1


def test_logits_are_finite_with_epsilon_zero() -> None:
    assert EpsilonGreedyLogits(0.0)(VALUES, LEGAL).isfinite().all()


@pytest.mark.processes
def test_make_policy_builds_values_and_acts_greedily_in_them() -> None:
    make_env = partial(CountingEnv, n_prey=0, action_mask=True)
    policy = make_policy(make_env, epsilon=0.0, return_log_prob=False)
    outputs = policy(make_env().reset())["hunter"]
    legal = outputs["action_value"].masked_fill(~outputs["action_mask"], -torch.inf)
    assert torch.equal(outputs["action"], legal.argmax(-1))
    assert "action_log_prob" not in outputs


@pytest.mark.processes
def test_a_wrong_epsilon_and_actions_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1, but is 1.5"):
        make_policy(CountingEnv, epsilon=1.5)
    with pytest.raises(
        TypeError, match="epsilon needs Discrete actions, but prey acts"
    ):
        make_policy(CountingEnv, epsilon=0.1)
