"""Settings and presets, what they stand for, and algorithms of one's own."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import short
from workloads.counting import CountingEnv

from marl_collect import describe
from marl_collect.models import make_policy
from marl_collect.models.convnet import MultiAgentConvNet
from marl_collect.models.saved_policy import load_policy
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.comparison import default_setups, every_setup, write_report
from marl_collect.training.convolutions import convolutions
from marl_collect.training.learner import Learner, learner_of, training_rewards
from marl_collect.training.options import PPOOptions, Setup, TrainingOptions
from marl_collect.training.ppo import PPOLearner
from marl_collect.training.presets import PRESETS, find_preset
from marl_collect.training.trainer import Task, Trainer, make_learner


def test_parse_returns_the_setup_of_a_name() -> None:
    for algorithm in ALGORITHMS:
        for setup in learner_of(algorithm).default_setups(algorithm, agent_ids=True):
            assert Setup.parse(setup.name) == setup


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (Setup, "sac", r"'sac'\. Expected one of ippo, mappo, ia2c, maa2c, iql, vdn"),
        (Setup, None, r"There is no algorithm None\. Expected one of ippo"),
        (Setup, "mapo", r"'mapo'\. Did you mean mappo\? Expected"),
        (Setup.parse, "sac", "ippo.mappo.ia2c.maa2c.iql.vdn.qmix.maddpg.iddpg, then"),
        (Setup.parse, "mapo", r"Did you mean mappo-local-shared\? A name is"),
        (Setup.parse, "mappo-local-own-id", r"Did you mean mappo-local-own-ids\?"),
        (Setup.parse, "qmix-shared", r"Did you mean qmix-local-shared\?"),
    ],
)
def test_unknown_names_are_refused(find: Any, name: Any, message: str) -> None:
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


SPRITES = {"num_cells": [16, 32], "kernel_sizes": [8, 3], "strides": [8, 1]}
THREE = {"num_cells": [32, 32, 32], "kernel_sizes": [5, 5, 5], "strides": [2, 2, 2]}


def described(*shape: int) -> Any:
    return CountingEnv(image=shape).description


@pytest.mark.parametrize(
    ("setting", "shape", "expected"),
    [
        ("auto", (88, 88, 3), SPRITES),
        ("auto", (84, 84, 3), THREE),
        ("three", (88, 88, 3), THREE),
        (
            "4k6s3, 8k3s2",
            (32, 40, 3),
            {"num_cells": [4, 8], "kernel_sizes": [6, 3], "strides": [3, 2]},
        ),
    ],
)
def test_a_setting_stands_for_layers(
    setting: str, shape: tuple[int, ...], expected: dict[str, list[int]]
) -> None:
    assert convolutions(setting, described(*shape)) == expected


def test_environments_without_pictures_need_no_layers() -> None:
    assert convolutions("nature", CountingEnv().description)


def test_pictures_that_are_too_small_are_named() -> None:
    with pytest.raises(ValueError, match="smallest side has 32 pixels"):
        convolutions("nature", described(32, 32, 3))


@pytest.mark.parametrize("algorithm", ["mappo", "ippo"])
def test_policy_and_critic_have_the_convolutions(algorithm: str) -> None:
    settings = {"conv": "4k6s3,8k3s2", "conv_dtype": "bfloat16"}
    options = TrainingOptions().with_settings(settings)
    description = described(32, 32, 3)
    learner = PPOLearner(description, Setup(algorithm), options, 0)
    for network in learner.networks.values():
        conv_nets = [m for m in network.modules() if isinstance(m, MultiAgentConvNet)]
        assert conv_nets
        assert all(net.net[0].out_channels == 4 for net in conv_nets)
        assert all(net.dtype == torch.bfloat16 for net in conv_nets)


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
        assert options.ppo.critic_num_cells == (source["hidden"],) * 2
        assert options.ppo.adam_eps == 1e-8  # PyTorch's default.
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
    assert (options.ppo.lr, options.ppo.epochs) == (7e-4, 10)
    assert options.frames == 20_000_000
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
    learner = make_learner(HUNTERS().description, setup, options, 0)
    assert learner.options == options


def test_episodes_need_a_time_limit() -> None:
    with pytest.raises(ValueError, match="frames_per_batch is 1 episodes.* no time"):
        find_preset("epymarl").settings_of("vdn", None)


OPTIONS = short({})
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
    task = Task("task", HUNTERS, description, {})
    path = tmp_path / setup.name / "seed_0"
    result = Trainer(task, setup, OPTIONS, 0, path).run()
    assert result["frames"] == 80
    assert "reward-local-shared" in write_report(tmp_path)
    # It does not load the initial weights itself.
    options = OPTIONS.with_settings({"initial": str(path)})
    learner = make_learner(description, setup, options, 1)
    for name, weight in load_policy(path).state_dict().items():
        assert torch.equal(learner.policy.state_dict()[name], weight)
