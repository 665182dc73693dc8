"""Groups may have any name, also one that modules have or that has a dot."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from model_tools import observe
from torch import nn

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.core.groups import RESERVED
from marl_collect.models import load_policy, make_critic, make_policy, save_policy
from marl_collect.models.by_group import ModulesByGroup

TAKEN = sorted({*dir(nn.Module()), *dir(nn.ModuleDict()), "state_dict"} - RESERVED)
ODD = ["team.red", "team%2Ered", "train%", "%", ".", "a b", "группа"]
NAMES = [*TAKEN, *ODD]


def describe(*names: str) -> EnvDescription:
    group = GroupDescription(
        ("a", "b"), spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    )
    return EnvDescription("named", dict.fromkeys(names, group))


def test_groups_of_any_names_stay_apart(tmp_path: Path) -> None:
    assert {"train", "type", "half", "children", "keys", "to", "training"} < set(TAKEN)
    description = describe(*NAMES)
    policy = make_policy(description, num_cells=(4,))
    assert list(policy.module) == list(policy.module.keys()) == NAMES
    state = policy.state_dict()
    assert len(state) == len(list(policy.parameters())) + len(list(policy.buffers()))
    save_policy(tmp_path / "p.pt", policy, description, num_cells=(4,))
    loaded = load_policy(tmp_path / "p.pt", description).state_dict()
    torch.testing.assert_close({**loaded}, {**state}, rtol=0, atol=0)
    data = policy(observe(description, 4))
    for centralised in (False, True):
        critic = make_critic(description, centralised=centralised, num_cells=(4,))
        values = critic(data.clone())
        for name in NAMES:
            assert values[name, "state_value"].shape == (4, 2, 1)
    for name in NAMES:
        assert name in policy.module
        alone = policy[name](observe(description, 4))
        assert torch.equal(alone[name, "logits"], data[name, "logits"])
        assert policy[name].out_keys[-1][0] == name


def test_the_weights_of_ordinary_groups_keep_their_names() -> None:
    modules = ModulesByGroup({n: nn.Linear(1, 1) for n in ("walker_0", "a b", "prey")})
    plain = nn.ModuleDict({n: nn.Linear(1, 1) for n in ("walker_0", "a b", "prey")})
    assert list(modules.state_dict()) == list(plain.state_dict())
    policy = make_policy(describe("wolf", "sheep"), num_cells=(4,))
    assert {key.split(".")[1] for key in policy.state_dict()} == {"wolf", "sheep"}


def test_a_group_can_be_removed() -> None:
    modules = ModulesByGroup({"train": nn.Linear(1, 1), "prey": nn.Linear(1, 1)})
    del modules["train"]
    assert list(modules) == ["prey"]
    assert modules.pop("prey") is not None
    assert 3 not in modules
    assert not len(modules)


def test_a_policy_of_several_groups_names_the_distributions_of_each() -> None:
    policy = make_policy(describe("wolf", "team.red"), num_cells=(4,))
    with pytest.raises(AttributeError) as excinfo:
        policy.get_dist(None)
    assert "policy['wolf'].get_dist and policy['team.red'].get_dist" in str(
        excinfo.value
    )
    assert callable(policy["wolf"].get_dist)
    assert not hasattr(policy, "get_dist")
    with pytest.raises(AttributeError, match="no attribute 'get_disst'"):
        policy.get_disst  # noqa: B018 - a misspelled name
