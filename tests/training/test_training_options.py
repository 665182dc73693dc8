import json
from dataclasses import asdict
from typing import Any

import pytest

from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.learner import learner_of
from marl_collect.training.options import PPOOptions, Setup, TrainingOptions


def test_parse_returns_the_setup_of_a_name() -> None:
    for algorithm in ALGORITHMS:
        for setup in learner_of(algorithm).default_setups(algorithm, agent_ids=True):
            assert Setup.parse(setup.name) == setup


def test_an_unknown_algorithm_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ValueError, match="'sac': expected ippo, mappo, vdn, qmix"):
        Setup("sac")


def test_an_unknown_setup_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ValueError, match="ippo.mappo.vdn.qmix, then -local"):
        Setup.parse("maddpg-local-shared")


def test_settings_reach_the_parts_and_survive_json() -> None:
    options = TrainingOptions().with_settings(
        {"ppo.lr": 1, "num_cells": [8, 9], "gamma": 0.5, "max_frames_per_traj": 7}
    )
    assert options.ppo == PPOOptions(lr=1.0)
    assert options.num_cells == (8, 9)
    assert TrainingOptions.from_dict(json.loads(json.dumps(asdict(options)))) == (
        options
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", 1, "no setting lr: expected activation"),
        ("ppo.gamma", 1, "no setting ppo.gamma: expected .*ppo.anneal.*value.tau"),
        ("ppo", 1, "no setting ppo: expected activation"),
        ("frames", 0, "frames must be an integer of at least 1, but is 0"),
        ("frames", "many", "frames must be an integer of at least 1, but is 'many'"),
        ("activation", "selu", "activation must be one of 'tanh', 'relu', 'elu', but"),
        ("ppo.epochs", 0, "ppo.epochs must be an integer of at least 1, but is 0"),
        ("ppo.minibatch_frames", 0, "ppo.minibatch_frames must be an integer of at"),
        ("value.minibatch_frames", 0, "value.minibatch_frames must be an integer of"),
        ("ppo.lr", 0, "ppo.lr must be a positive number, but is 0"),
        ("gamma", 1.5, "gamma must be a number of at least 0 and at most 1, but"),
        ("ppo.entropy_coeff", float("nan"), "ppo.entropy_coeff must be a number of at"),
        ("recurrent", "rnn", "recurrent must be one of 'gru', 'lstm', None"),
        ("num_cells", ["a"], "num_cells must be a sequence of integers of at"),
        ("num_cells", [0], "num_cells must be a sequence of integers of at"),
        ("max_frames_per_traj", "ten", "max_frames_per_traj must be an integer of"),
        ("reward", "mine", "reward must be one of 'agent', 'team'"),
        ("device", "abacus", "device is 'abacus': Expected one of"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingOptions().with_settings({name: value})


def test_all_settings_have_names_that_with_settings_takes() -> None:
    options = TrainingOptions()
    settings = options.settings()
    assert settings["ppo.epochs"] == 10
    assert settings["value.tau"] == 0.005
    assert options.with_settings(settings) == options
