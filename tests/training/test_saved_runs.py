"""Saved policies act as before, wherever they are loaded."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import short
from tensordict import TensorDict
from torch import nn
from workloads.counting import CountingEnv

from marl_collect import describe, evaluate
from marl_collect.cli.policies import PolicyRequest
from marl_collect.models import MultiAgentConvNet, load_policy, make_policy, save_policy
from marl_collect.models.saved_policy import BEST, CONFIG
from marl_collect.training.evaluating import FINAL_SEED as SEED
from marl_collect.training.options import Setup
from marl_collect.training.run_folder import LAST
from marl_collect.training.trainer import Task, Trainer, make_learner

pytestmark = pytest.mark.processes

HUNTERS = partial(CountingEnv, n_prey=0, image=(32, 32, 3), action_mask=True)
OPTIONS = short({"frames": 40, "ppo.epochs": 1, "value.warm_up_frames": 0})


@pytest.mark.parametrize(
    ("name", "recurrent", "dtype"),
    [
        ("mappo-local-own", "gru", "bfloat16"),
        ("ippo-centralised-shared-ids", None, "float32"),
        ("qmix-local-own", None, "float32"),
        ("qmix-local-shared", "gru", "bfloat16"),
    ],
)
def test_a_run_s_policy_acts_as_it_did_and_training_goes_on(
    name: str, recurrent: bool, dtype: str, tmp_path: Path
) -> None:
    task = Task("task", HUNTERS, describe(HUNTERS), {})
    options = OPTIONS.with_settings({"recurrent": recurrent, "conv_dtype": dtype})
    setup = Setup.parse(name)
    tmp_path /= "seed_0"
    result = Trainer(task, setup, options, 0, tmp_path).run()
    for path in (tmp_path, tmp_path / BEST):
        policy = load_policy(path, HUNTERS)
        evaluation = evaluate(
            policy, HUNTERS, episodes=2, num_workers=1, envs_per_worker=2, seeds=SEED
        )
        returns = [round(value, 3) for value in evaluation.team_returns]
        assert returns == result["best"]["team_returns"]
    convolutions = [m for m in policy.modules() if isinstance(m, MultiAgentConvNet)]
    assert {str(net.dtype) for net in convolutions} == {f"torch.{dtype}"}
    last = load_policy(tmp_path / LAST, HUNTERS).state_dict()
    assert last.keys() == policy.state_dict().keys()
    same(load_policy(tmp_path.parent, HUNTERS), policy)  # The only run in there.
    acting = PolicyRequest(str(tmp_path), False, True, 0)
    acting.check()
    recorded = acting.describe()
    assert recorded["sha256"]
    assert recorded["kind"] == "saved"
    assert recorded["centralised"] is setup.centralised
    assert recorded["recurrent"] == recurrent
    same(acting.build(task.description), policy)
    parent = PolicyRequest(str(tmp_path.parent), False, True, 0)
    assert parent.describe() == acting.describe()
    going_on = options.with_settings({"initial": str(tmp_path)})
    same(make_learner(task.description, setup, going_on, 5).policy, policy)
    other = "vdn-local-shared" if name.startswith("qmix") else "ippo-local-shared"
    with pytest.raises(ValueError, match=f"in {tmp_path / BEST} does not fit"):
        make_learner(task.description, Setup.parse(other), going_on, 5)
    relu = going_on.with_settings({"activation": "relu"})
    with pytest.raises(ValueError, match=r"it has .*Tanh.*, but the setup has .*ReLU"):
        make_learner(task.description, setup, relu, 5)
    masks = describe(partial(HUNTERS, action_mask=False))
    with pytest.raises(ValueError, match="for another environment"):
        make_learner(masks, setup, going_on, 5)


def same(net: nn.Module, other_net: nn.Module) -> None:
    weights, other_weights = net.state_dict(), other_net.state_dict()
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(v, other_weights[k]) for k, v in weights.items())


def test_a_policy_of_a_script_is_built_again_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "policy.pt"
    options = {"share_params": False, "num_cells": (6,), "activation_class": nn.ReLU}
    policy = make_policy(CountingEnv, **options)
    save_policy(path, policy, CountingEnv, **options)
    same(load_policy(path, CountingEnv), policy)
    same(PolicyRequest(str(path), False, True, 0).build(describe(CountingEnv)), policy)
    with pytest.raises(ValueError, match="builds another policy"):
        save_policy(path, policy, CountingEnv)
    with pytest.raises(ValueError, match="builds another policy"):  # Another network.
        save_policy(path, policy, CountingEnv, share_params=False, num_cells=(6,))
    double = make_policy(CountingEnv, **options).double()
    with pytest.raises(ValueError, match="float64, which load_policy would not"):
        save_policy(path, double, CountingEnv, **options)
    with pytest.raises(ValueError, match="Discrete.4., but has .* with action masks"):
        load_policy(path, partial(CountingEnv, action_mask=True))
    with pytest.raises(ValueError, match="'hunter' had 2 agents, .* has 4 agents"):
        load_policy(path, partial(CountingEnv, n_hunters=4))


def test_a_shared_network_acts_for_other_numbers_of_agents(tmp_path: Path) -> None:
    four = partial(CountingEnv, n_hunters=4)
    path = tmp_path / "policy.pt"
    policy = make_policy(CountingEnv)
    save_policy(path, policy, CountingEnv)
    hunters, prey = torch.rand(6, 4, 5), torch.rand(6, 3, 3)
    outputs = load_policy(path, four)(seen(hunters, prey))
    halves = [policy(seen(half, prey)) for half in hunters.split(2, dim=1)]
    for key in ("action", "action_log_prob"):
        expected = torch.cat([half["hunter", key] for half in halves], 1)
        torch.testing.assert_close(outputs["hunter", key], expected)
    options: dict[str, object] = {"recurrent": "gru"}
    save_policy(path, make_policy(CountingEnv, **options), CountingEnv, **options)
    assert evaluate(load_policy(path, four), four, episodes=2, num_workers=1).lengths
    for option in ("centralised", "agent_ids"):
        options = {option: True}
        save_policy(path, make_policy(CountingEnv, **options), CountingEnv, **options)
        with pytest.raises(ValueError, match="'hunter' had 2 agents, .* has 4 agents"):
            load_policy(path, four)


def seen(hunters: torch.Tensor, prey: torch.Tensor) -> TensorDict:
    groups = {"hunter": hunters, "prey": prey}
    return TensorDict({g: {"observation": o} for g, o in groups.items()}, [6])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b""), "is damaged, or holds no tensors"),
        (lambda p: torch.save({"a": 1}, p), "only the entries a. Write it with"),
        (lambda p: torch.save(torch.ones(1), p), "only an object of type Tensor"),
        (lambda p: torch.save({"environment": {}}, p), "is damaged, or of another ver"),
    ],
)
def test_other_files_are_named(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    write(path)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        load_policy(path)


def test_a_folder_without_a_single_policy_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="file of a policy or the folder"):
        load_policy(tmp_path)
    for seed in ("seed_0", "seed_1"):
        (tmp_path / seed).mkdir()
        (tmp_path / seed / CONFIG).write_text("{}")
    with pytest.raises(FileNotFoundError, match="choose one of seed_0, seed_1"):
        load_policy(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"best.pt is missing"):
        load_policy(tmp_path / "seed_0")
