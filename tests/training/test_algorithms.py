"""An algorithm needs a file and a line in the table, nothing else."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from workloads.counting import CountingEnv

from marl_collect import describe
from marl_collect.models import make_policy
from marl_collect.models.saved_policy import load_policy
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.comparison import default_setups, every_setup, write_report
from marl_collect.training.learner import Learner, training_rewards
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.trainer import Task, Trainer

OPTIONS = TrainingOptions().with_settings(
    {
        "frames": 80,
        "frames_per_batch": 40,
        "workers": 1,
        "envs_per_worker": 2,
        "eval_interval": 40,
        "eval_episodes": 2,
        "final_episodes": 2,
        "num_cells": [8],
    }
)
HUNTERS = partial(CountingEnv, n_prey=0)


class RewardLearner(Learner):
    """Raises the probability of actions whose reward was above the mean."""

    prefetch = False

    def __init__(self, description: Any, setup: Any, options: Any, seed: int) -> None:
        super().__init__(description, setup, options, seed)
        self.policy = make_policy(description, **self.policy_options)
        self.networks = {"policy": self.policy}
        self.optimizer = self._adam(1e-3)

    def learn(self, batch: Any, progress: Any) -> Any:
        return self._means([self._step(batch.reshape(-1), 10.0)])

    def loss(self, minibatch: Any) -> Any:
        rewards = training_rewards(minibatch, self.description, team=False)
        reward = rewards["hunter"].squeeze(-1)
        action = minibatch["hunter", "action"]
        log_prob = self.policy.get_dist(minibatch).log_prob(action)
        loss = -(log_prob * (reward - reward.mean())).mean()
        return loss, {"loss": loss.detach()}


def test_a_parameter_that_networks_share_is_trained_once() -> None:
    setup = Setup.parse("ippo-local-shared")
    learner = RewardLearner(HUNTERS().description, setup, OPTIONS, 0)
    own_parameters = [*learner.parameters()]
    critic = torch.nn.Sequential(learner.policy, torch.nn.Linear(2, 1))
    learner.networks = {"policy": learner.policy, "critic": critic}
    assert [*learner.parameters()] == [*own_parameters, *critic[1].parameters()]
    torch.optim.Adam(learner.parameters())  # Warns of parameters that are given twice.


def test_every_algorithm_has_default_setups() -> None:
    setups = every_setup(HUNTERS().description)
    names = [setup.name for setup in setups]
    assert len(set(names)) == len(names) == 12
    assert "qmix-local-shared-ids" in names
    ppo = {(s.algorithm, s.centralised, s.share_params) for s in setups[:10]}
    assert len(ppo) == 8
    # Where agents take turns, IQL cannot be trained, so it is trained on request; so
    # are IA2C and MAA2C, MADDPG and IDDPG.
    on_request = {"iql", "ia2c", "maa2c", "maddpg", "iddpg"}
    assert {s.algorithm for s in setups} == set(ALGORITHMS) - on_request


@pytest.mark.processes
def test_an_algorithm_of_ones_own_is_trained_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{__name__}:{RewardLearner.__name__}"
    monkeypatch.setitem(ALGORITHMS, "reward", line)
    description = describe(HUNTERS)
    names = [setup.name for setup in default_setups(description, OPTIONS)]
    assert "reward-centralised-own" in names
    setup = Setup.parse("reward-local-shared")
    task, path = (
        Task("task", HUNTERS, description, {}),
        tmp_path / setup.name / "seed_0",
    )
    result = Trainer(task, setup, OPTIONS, 0, path).run()
    assert result["frames"] == 80
    assert "reward-local-shared" in write_report(tmp_path)
    load_policy(path)
