"""``make_critic`` reads every observation space; identities tell agents apart."""

from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from model_tools import observe

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import CrossGroupCritic, make_critic

VECTOR = GroupDescription(
    ("a", "b"), spaces.Box(-1, 1, (5,), np.float32), spaces.Discrete(3)
)
DICT = GroupDescription(
    ("c", "d", "e"),
    spaces.Dict(
        {
            "RGB": spaces.Box(0, 255, (40, 44, 3), np.uint8),
            "speed": spaces.Box(-1, 1, (2,), np.float64),
            "kind": spaces.Discrete(4),
        }
    ),
    spaces.Discrete(2),
)
BOTH = EnvDescription("both", {"one": VECTOR, "two": DICT})
SMALL = {"num_cells": (8,), "hidden_size": 6, "conv": {"num_cells": (4, 4, 4)}}


@pytest.mark.parametrize(
    ("centralised", "share_params", "recurrent"),
    product([False, True], [False, True], [None, "gru", "lstm"]),
)
def test_a_value_for_every_agent(
    centralised: bool, share_params: bool, recurrent: bool
) -> None:
    critic = make_critic(
        BOTH,
        centralised=centralised,
        share_params=share_params,
        recurrent=recurrent,
        **SMALL,
    )
    td = observe(BOTH, 7)
    critic(td)
    assert td["one", "state_value"].shape == (7, 2, 1)
    assert td["two", "state_value"].shape == (7, 3, 1)
    sum(td[g, "state_value"].sum() for g in BOTH.groups).backward()
    idle = [n for n, p in critic.named_parameters() if p.grad is None]
    assert not idle
    changed_td = observe(BOTH, 7)
    changed_td["two", "observation", "speed"] += 1
    critic(changed_td)
    is_equal = torch.equal(changed_td["one", "state_value"], td["one", "state_value"])
    assert is_equal is not centralised  # Only the other group's observations differ.


def test_a_centralised_critic_of_vectors_is_a_cross_group_critic() -> None:
    description = EnvDescription("vectors", {"one": VECTOR})
    assert isinstance(make_critic(description, centralised=True), CrossGroupCritic)
    assert not isinstance(make_critic(description), CrossGroupCritic)


def test_hidden_layers_of_a_cross_group_critic_have_their_own_units() -> None:
    description = EnvDescription("vectors", {"one": VECTOR})
    critic = make_critic(description, centralised=True, num_cells=(8, 16, 4))
    trunk = [m for m in critic.module.trunk if isinstance(m, torch.nn.Linear)]
    assert [layer.out_features for layer in trunk[:-1]] == [8, 16, 4]
    assert critic(observe(description, 3))["one", "state_value"].shape[0] == 3


def test_a_cross_group_critic_reads_the_only_vector_of_nested_observations() -> None:
    nested = GroupDescription(
        ("c",),
        spaces.Dict({"cards": spaces.Box(-1, 1, (4,), np.float32)}),
        spaces.Discrete(2),
    )
    description = EnvDescription("nested", {"one": VECTOR, "two": nested})
    critic = make_critic(description, centralised=True)
    assert isinstance(critic, CrossGroupCritic)
    values = critic(observe(description, 3))
    assert values["two", "state_value"].shape[-2:] == (1, 1)


def test_an_option_of_policies_only_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match="no option 'check_mask'. Its options are actions, activation_cl",
    ):
        make_critic(BOTH, check_mask=False)
