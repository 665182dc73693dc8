"""Groups may have any name, also one that modules have or that has a dot."""

from typing import Any

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


def test_there_are_names_to_try() -> None:
    assert {"train", "type", "half", "children", "keys", "to", "training"} < set(TAKEN)


@pytest.mark.parametrize("name", NAMES)
def test_any_group_name_works_in_policies_and_critics(name: str) -> None:
    description = describe(name, "other")
    data = make_policy(description, num_cells=(4,))(observe(description, 4))
    assert data[name, "action"].shape == (4, 2)
    for centralised in (False, True):
        critic = make_critic(description, centralised=centralised, num_cells=(4,))
        assert critic(data)[name, "state_value"].shape == (4, 2, 1)


def test_all_names_at_once_stay_apart() -> None:
    description = describe(*NAMES)
    policy = make_policy(description, num_cells=(4,))
    assert list(policy.module) == list(policy.module.keys()) == NAMES
    for name in NAMES:
        assert policy[name].out_keys[-1][0] == name
        assert name in policy.module
    state = policy.state_dict()
    assert len(state) == len(list(policy.parameters())) + len(list(policy.buffers()))


def test_the_weights_of_ordinary_groups_keep_their_names() -> None:
    modules = ModulesByGroup({n: nn.Linear(1, 1) for n in ("walker_0", "a b", "prey")})
    plain = nn.ModuleDict({n: nn.Linear(1, 1) for n in ("walker_0", "a b", "prey")})
    assert list(modules.state_dict()) == list(plain.state_dict())
    policy = make_policy(describe("wolf", "sheep"), num_cells=(4,))
    assert {key.split(".")[1] for key in policy.state_dict()} == {"wolf", "sheep"}


@pytest.mark.parametrize("name", ["train", "team.red"])
def test_a_policy_of_such_a_group_is_saved_and_loaded(name: str, tmp_path: Any) -> None:
    description = describe(name, "other")
    policy = make_policy(description, num_cells=(4,))
    save_policy(tmp_path / "p.pt", policy, description, num_cells=(4,))
    loaded = load_policy(tmp_path / "p.pt", description)
    for key, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[key])


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
