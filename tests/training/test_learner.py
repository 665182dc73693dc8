"""What all learners share: their arguments, and files of their state."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import run_python
from workloads.counting import CountingEnv

from marl_collect import Collector, evaluate
from marl_collect.core.signature import MEMBER
from marl_collect.models import load_policy, make_policy, save_policy
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.learner import Learner, RunningMoments, learner_of
from marl_collect.training.options import Setup, TrainingOptions
from marl_collect.training.trainer import make_learner

pytestmark = pytest.mark.processes

TINY = TrainingOptions(num_cells=(8,), frames=80).with_settings(
    {"ppo.minibatch_frames": 20, "value.minibatch_frames": 8, "value.warm_up_frames": 0}
)
ENV: Any = partial(CountingEnv, n_prey=0)
DESCRIPTION = ENV().description


def make(setup: str, seed: int = 0, options: TrainingOptions = TINY) -> Learner:
    parsed = Setup.parse(setup)
    return learner_of(parsed.algorithm)(DESCRIPTION, parsed, options, seed)


def batches(policy: Any, count: int) -> list[Any]:
    with Collector(
        ENV, policy, frames_per_batch=40, total_frames=40 * count, seed=1
    ) as collector:
        return [batch.clone() for batch in collector]


@pytest.mark.parametrize(
    ("position", "wrong", "cure"),
    [
        (0, ENV, r"describe\(make_env\)"),
        (0, ENV(), r"describe\(make_env\)"),
        (1, "mappo", r"Setup\('mappo'\)"),
        (1, "mapo", r"Setup\('mappo'\)"),
        (2, {"gamma": 0.9}, r"TrainingOptions\(\)\.with_settings"),
        (2, None, r"TrainingOptions\(\)"),
    ],
)
@pytest.mark.parametrize("algorithm", ["mappo", "vdn"])
def test_an_argument_of_another_kind_is_an_error_that_says_what_to_pass(
    position: int, wrong: Any, cure: str, algorithm: str
) -> None:
    arguments: list[Any] = [DESCRIPTION, Setup(algorithm), TINY]
    arguments[position] = wrong
    kind: Any = learner_of(algorithm)
    with pytest.raises(TypeError, match=cure) as excinfo:
        kind(*arguments, seed=0)
    assert kind.__name__ in str(excinfo.value)
    assert type(wrong).__name__ in str(excinfo.value)


TARGET = TINY.with_settings({"ppo.target_tau": 0.1, "ppo.normalise_values": True})


@pytest.mark.parametrize("setup", ["mappo-local-shared", "vdn-local-shared"])
def test_targets_begin_with_the_initial_weights(setup: str, tmp_path: Path) -> None:
    parsed = Setup.parse(setup)
    make(setup, options=TARGET).save(tmp_path / "learner.pt")
    options = TARGET.with_settings({"initial": str(tmp_path / "learner.pt")})
    learner: Any = make_learner(DESCRIPTION, parsed, options, 3)
    (target,) = learner.untrained.values()
    followed = learner.critic if parsed.algorithm == "mappo" else learner.online
    for one, other in zip(target.parameters(), followed.parameters(), strict=True):
        assert (one == other).all()


def test_the_policy_of_a_saved_learner_needs_no_options(tmp_path: Path) -> None:
    options = TINY.with_settings({"recurrent": "gru", "activation": "relu"})
    learner = make("mappo-centralised-own", options=options)
    learner.save(tmp_path / "learner.pt")
    policy = load_policy(tmp_path / "learner.pt", ENV)
    played = [
        evaluate(p, ENV, episodes=3, seeds=0).team_returns
        for p in (learner.policy, policy)
    ]
    assert played[0] == played[1]


@pytest.mark.parametrize(
    ("saved", "setup", "settings", "message"),
    [
        ("mappo-local-shared", None, {"ppo.target_tau": 0.1}, ".* fit.*target_critic"),
        ("mappo-local-own", "mappo-local-shared", {}, " does not fit"),
        ("ippo-local-shared", "mappo-local-shared", {}, ".*the setup ippo-local-share"),
        ("qmix-local-shared", None, {"value.buffer_frames": 200}, " .*=100000 .*=200 "),
        (
            "qmix-local-shared",
            None,
            {"value.replay": "episodes"},
            " .*plays frames.*plays episodes",
        ),
    ],
)
def test_a_file_of_another_learner_is_refused_before_anything_changes(
    saved: str, setup: Any, settings: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "learner.pt"
    first = make(saved, seed=3)
    first.update(batches(first.policy, 1)[0], 0.5)
    first.save(path)
    second = make(setup or saved, options=TINY.with_settings(settings))
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ValueError, match=rf"learner\.pt{message}"):
        second.load(path)
    assert repr(second.state_dict()) == repr(before)


def test_a_file_without_a_learner_is_named(tmp_path: Path) -> None:
    path, learner = tmp_path / "learner.pt", make("mappo-local-shared")
    policy = make_policy(DESCRIPTION, num_cells=(8,))
    save_policy(path, policy, DESCRIPTION, num_cells=(8,))
    with pytest.raises(ValueError, match=r"learner\.pt has a policy only"):
        learner.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        learner.load(tmp_path / "none.pt")


@pytest.mark.parametrize("setup", ["mappo-local-shared", "qmix-local-shared"])
def test_all_networks_stay_if_one_does_not_fit(setup: str, tmp_path: Path) -> None:
    path = tmp_path / "learner.pt"
    first = make(setup, seed=3)
    first.save(path)
    state = torch.load(path, weights_only=True)
    last = list(first.networks)[-1]
    weights = state["networks"][last]
    weights[list(weights)[-1]] = torch.zeros(99)
    torch.save(state, path)
    second = make(setup)
    before = copy.deepcopy(second.state_dict())
    with pytest.raises(ValueError, match=rf"The {last} in .*learner\.pt does not fit"):
        second.load(path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        second.load_state_dict(state)
    assert repr(second.state_dict()) == repr(before)


@pytest.mark.parametrize("name", ["ippo-local-shared", "iql-local-shared"])
def test_a_loaded_learner_keeps_its_own_options(name: str) -> None:
    options = TINY.with_settings({"standardise_rewards": True, "value.lr": 0.5})
    first = make(name, options=options)
    (batch,) = batches(first.policy, 1)
    first.update(batch, 0.5)
    second = make(name)
    second.load_state_dict(first.state_dict())
    rewards = torch.arange(4.0)
    assert torch.equal(second._scaled("hunter", rewards), rewards)
    assert not torch.equal(first._scaled("hunter", rewards), rewards)
    if name.startswith("iql"):
        assert second.optimizer.param_groups[0]["lr"] == TINY.value.lr


def test_equal_rewards_become_zeros() -> None:
    moments = RunningMoments()
    assert moments.standardise(torch.ones(2)).tolist() == [1.0, 1.0]
    moments.add(torch.full((3,), 7.0))
    moments.add(torch.zeros(0))
    assert moments.standardise(torch.full((2,), 7.0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("name", ["ippo", "mappo", "iql", "vdn", "qmix"])
def test_the_rewards_of_rivals_are_not_the_team_s(name: str, mask: bool) -> None:
    settings = {"gamma": 0.0, "reward": "team", "ppo.normalise_advantages": False}
    factory: Any = partial(CountingEnv, n_hunters=4, n_prey=0, mask=mask)
    options = TINY.with_settings(settings)
    learner: Any = learner_of(name)(factory().description, Setup(name), options, 0)
    with Collector(
        factory,
        policies={"main": learner.policy, "rival": None},
        assign=lambda seed, agents: {
            agent: "main" if (seed + k) % 4 < 1 + seed % 3 else "rival"
            for k, agent in enumerate(agents)
        },
        frames_per_batch=60,
        seed=0,
    ) as collector:
        batch = collector.next().clone()
        of_main = collector.policy.batch_of(batch, "main")
    rewards = batch["next", "hunter", "reward"][0, :, :, 0].tolist()
    ids = batch["hunter", "policy_id"][0].tolist()
    expected = []
    for row, policies in zip(rewards, ids, strict=True):
        team = [r for r, policy in zip(row, policies, strict=True) if policy == 0]
        expected.append(sum(team) / (1 if name in ("vdn", "qmix") else len(team)))
    if "ppo" in name:
        data = learner.prepare(of_main)["hunter"]
        for t, reward in enumerate(expected):
            for target in data["value_target"][t][data["trained"][t]]:
                assert target.item() == pytest.approx(reward, abs=1e-5)
        assert data["trained"].sum() > 60
    if name == "ippo":  # Nor are the values of what they observe after the batch.
        options = options.with_settings({"gamma": 0.9})
        learner = learner_of(name)(factory().description, Setup(name), options, 0)
        for end in range(1, 60):
            data = of_main[:, :end].clone()
            moved = data.clone()
            moved["next", "hunter", "observation"][~data["hunter", MEMBER]] += 1
            data, moved = (learner.prepare(b)["hunter"] for b in (data, moved))
            used = data["trained"]
            assert torch.equal(data["value_target"][used], moved["value_target"][used])
    if "ppo" not in name:
        learner.remember(of_main)
        (stored,) = learner.replay._columns["reward"]
        stored = stored[:60].reshape(60, -1)
        for row, reward in zip(stored.tolist(), expected, strict=True):
            assert row == pytest.approx([reward] * len(row), abs=1e-5)


def test_every_algorithm_trains_without_torchrl() -> None:
    """In a process whose imports of torchrl fail."""
    script = """
import sys
sys.modules["torchrl"] = None
from functools import partial
from workloads.counting import CountingEnv
from workloads.pair import PairEnv
from marl_collect import Collector
from marl_collect.envs import PettingZooWrapper
from marl_collect.training.algorithms import ALGORITHMS
from marl_collect.training.learner import learner_of
from marl_collect.training.options import Setup, TrainingOptions
factory = partial(CountingEnv, n_prey=0)
numbers = lambda: PettingZooWrapper(PairEnv(continuous=True))
options = TrainingOptions().with_settings(
    {"num_cells": [8], "value.warm_up_frames": 0, "value.minibatch_frames": 8,
     "ppo.epochs": 2}
)
for algorithm in ALGORITHMS:
    setup = Setup(algorithm)
    if "ddpg" in algorithm:
        factory = numbers
    learner = learner_of(algorithm)(factory().description, setup, options, seed=0)
    with Collector(factory, learner.policy, frames_per_batch=40) as collector:
        learner.update(collector.next(), 0.5)
    print(algorithm, learner.updates)
"""
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
    trained = dict(zip(*[iter(done.stdout.split())] * 2, strict=True))
    assert trained == {name: "1" if "a2c" in name else "2" for name in ALGORITHMS}
