"""Presets have the values of their sources."""

from typing import Any

import pytest

pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")

from marl_collect.envs import MatrixGameEnv
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.presets import PRESETS, find_preset
from marl_collect.training.trainer import make_learner

# EPyMARL's configuration files at cbc38c0, as printed by
# `git show cbc38c0:src/config/algs/NAME.yaml`.
EPYMARL: dict[str, dict[str, Any]] = {
    "iql": {"lr": 3e-4, "hidden": 128, "rnn": True, "anneal": 200_000},
    "vdn": {"lr": 5e-4, "hidden": 64, "rnn": False, "anneal": 50_000},
    "qmix": {"lr": 5e-4, "hidden": 64, "rnn": False, "anneal": 50_000},
    "ippo": {"lr": 3e-4, "hidden": 128, "rnn": True, "entropy": 0.001, "epochs": 4},
    "mappo": {"lr": 3e-4, "hidden": 128, "rnn": True, "entropy": 0.001, "epochs": 4},
    "ia2c": {"lr": 5e-4, "hidden": 128, "rnn": True, "entropy": 0.001},
    "maa2c": {"lr": 5e-4, "hidden": 128, "rnn": True, "entropy": 0.01},
}


def options_of(preset: str, algorithm: str, limit: int = 25) -> TrainingOptions:
    settings = find_preset(preset).settings_of(algorithm, limit)
    return TrainingOptions().with_settings(settings)


@pytest.mark.parametrize("algorithm", EPYMARL)
def test_epymarl_has_its_values(algorithm: str) -> None:
    source, options = EPYMARL[algorithm], options_of("epymarl", algorithm)
    assert (options.recurrent == "gru") == source["rnn"]
    assert set(options.num_cells) == {source["hidden"]}
    assert not source["rnn"] or options.hidden_size == source["hidden"]
    assert options.gamma == 0.99
    assert options.standardise_rewards
    assert (options.eval_interval, options.eval_episodes) == (50_000, 100)
    if "entropy" in source:
        assert options.frames == 20_050_000
        assert options.ppo.episodes_per_batch == 10
        assert options.ppo.lr == source["lr"]
        assert options.ppo.max_grad_norm == 10
        if "epochs" in source:
            assert options.ppo.minibatch_frames == 250
            assert options.ppo.epochs == source["epochs"]
            assert options.ppo.clip_epsilon == 0.2
        assert options.ppo.entropy_coeff == source["entropy"]
        assert (options.ppo.n_steps, options.ppo.target_tau) == (5, 0.01)
        assert options.ppo.clip_apart
        assert not options.ppo.recurrent_critic
        assert not options.ppo.normalise_advantages
        return
    value = options.value
    assert options.frames == 2_050_000
    assert (value.buffer_frames, value.minibatch_episodes) == (125_000, 32)
    assert (value.tau, value.target_interval, value.max_grad_norm) == (1.0, 200, 10)
    assert value.double_q
    assert not options.bootstrap_limits
    assert (value.lr, value.epsilon_frames) == (source["lr"], source["anneal"])


def test_mappo_has_the_batches_of_its_script() -> None:
    options = options_of("mappo", "mappo")
    assert options.frames_per_batch == options.ppo.minibatch_frames == 128 * 25
    assert options.workers * options.envs_per_worker == 128
    assert (options.ppo.lr, options.ppo.epochs, options.frames) == (
        7e-4,
        10,
        20_000_000,
    )
    assert (options.ppo.huber_delta, options.ppo.clip_value) == (10, 0.2)
    assert (options.ppo.clip_epsilon, options.ppo.max_grad_norm) == (0.2, 10)
    assert (options.ppo.lmbda, options.ppo.entropy_coeff) == (0.95, 0.01)
    assert options.ppo.normalise_values
    assert (options.ppo.orthogonal, options.ppo.policy_gain) == (True, 0.01)


@pytest.mark.parametrize(
    ("preset", "name"), [(p, name) for p in PRESETS for name in PRESETS[p].setups]
)
def test_all_setups_of_a_preset_can_be_trained(preset: str, name: str) -> None:
    setup = Setup.parse(name)
    options = options_of(preset, setup.algorithm)
    with MatrixGameEnv("climbing") as env:
        learner = make_learner(env.description, setup, options, 0)
    assert learner.options == options


def test_episodes_need_a_time_limit() -> None:
    with pytest.raises(ValueError, match="frames_per_batch is 1 episodes.* no time"):
        find_preset("epymarl").settings_of("vdn", None)
