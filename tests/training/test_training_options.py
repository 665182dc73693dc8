from typing import Any

import pytest

from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.learner import learner_of
from marl_collect.training.options import PPOOptions, Setup, TrainingOptions


def test_parse_returns_the_setup_of_a_name() -> None:
    for algorithm in ALGORITHMS:
        for setup in learner_of(algorithm).default_setups(algorithm, agent_ids=True):
            assert Setup.parse(setup.name) == setup


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (Setup, "sac", r"'sac'\. Expected one of ippo, mappo, ia2c, maa2c, iql, vdn"),
        (Setup, "mapo", r"'mapo'\. Did you mean mappo\? Expected"),
        (Setup.parse, "sac", "ippo.mappo.ia2c.maa2c.iql.vdn.qmix.maddpg.iddpg, then"),
        (Setup.parse, "mapo", r"Did you mean mappo-local-shared\? A name is"),
        (Setup.parse, "mappo-local-own-id", r"Did you mean mappo-local-own-ids\?"),
        (Setup.parse, "qmix-shared", r"Did you mean qmix-local-shared\?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_valid_ones(
    find: Any, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        find(name)


def test_settings_reach_the_parts() -> None:
    options = TrainingOptions().with_settings(
        {"ppo.lr": 1, "num_cells": [8, 9], "gamma": 0.5, "max_frames_per_traj": 7}
    )
    assert options.ppo == PPOOptions(lr=1.0)
    assert options.num_cells == (8, 9)
    assert options.max_frames_per_traj == 7


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", 1, r"no setting lr\. Did you mean ppo.lr or value.lr\?"),
        ("ppo.learning_rate", 1, r"Did you mean ppo.lr\? `marl-collect compare --set"),
        ("ppo.epoch", 1, r"Did you mean ppo.epochs\?"),
        ("ppo.gamma", 1, r"no setting ppo.gamma\. Did you mean gamma\?"),
        ("discount_factor", 1, r"Did you mean gamma\?"),
        ("zzz", 1, r"no setting zzz\. `marl-collect compare --settings` lists all"),
        ("frames", 0, "frames must be an integer of at least 1, but is 0"),
        ("frames", "many", "frames must be an integer of at least 1, but is 'many'"),
        ("activation", "selu", "activation must be one of 'tanh', 'relu', 'elu', but"),
        ("ppo.epochs", 0, "ppo.epochs must be an integer of at least 1, but is 0"),
        ("ppo.minibatch_frames", 0, "ppo.minibatch_frames must be an integer of at"),
        ("value.minibatch_frames", 0, "value.minibatch_frames must be an integer of"),
        ("ppo.lr", 0, "ppo.lr must be a positive number, but is 0"),
        ("gamma", 1.5, "gamma must be a number of at most 1, but is 1.5"),
        ("ppo.entropy_coeff", float("nan"), "ppo.entropy_coeff must be a number of at"),
        ("value.replay", "all", "value.replay must be one of 'auto', 'frames'"),
        ("recurrent", "rnn", "recurrent must be one of 'gru', 'lstm', None"),
        ("network", "mlp", "network must be one of 'attention', None"),
        ("num_cells", ["a"], "num_cells must be a sequence of integers of at"),
        ("num_cells", [0], "num_cells must be a sequence of integers of at"),
        ("max_frames_per_traj", "ten", "max_frames_per_traj must be an integer of"),
        ("conv_dtype", "float16", "conv_dtype must be .*bfloat16.*'float16'"),
        *(
            ("conv", wrong, "expected auto, sprites, three, nature, or")
            for wrong in ("big", "16k8", "16k8s0", "")
        ),
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
