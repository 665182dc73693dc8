"""Arguments, options and inputs that do not fit are errors that name them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from model_tools import INPUTS, SETUPS, N, network
from torch import nn
from workloads.counting import CountingEnv

from marl_collect.core.description import EnvDescription, GroupDescription
from marl_collect.models import (
    MultiAgentAttention,
    MultiAgentConvNet,
    MultiAgentGRU,
    MultiAgentMLP,
    QMixer,
    VDNMixer,
    make_critic,
    make_head,
    make_policy,
)

Case = tuple[Callable[..., Any], dict[str, Any], str]
"""What is called, with which keywords, and the words of the error."""
VECTOR, SEVERAL = spaces.Box(-1, 1, (5,), np.float32), spaces.MultiDiscrete([2, 3])


def group(action: Any, observation: Any = VECTOR) -> GroupDescription:
    return GroupDescription(("a",), observation, action)


def policy_of(action: Any, observation: Any = VECTOR) -> partial[Any]:
    groups = {"g": group(action, observation)}
    return partial(make_policy, EnvDescription("test", groups))


mlp = partial(network, False, share_params=False)
unset = partial(MultiAgentMLP, 3, 2, 2)
conv = partial(MultiAgentConvNet, 2, False, True)
attention = partial(MultiAgentAttention, 5, 3, 4, centralised=True, share_params=True)
policy, counting = policy_of(SEVERAL), partial(make_policy, CountingEnv())
critic = partial(make_critic, CountingEnv().description)
BOTH = {"centralised": True, "share_params": True}
GROUP: dict[str, Any] = {"n_agent_inputs": 5, "n_agents": 4, **BOTH}
SIZED: list[tuple[Any, dict[str, Any]]] = [
    (MultiAgentMLP, {**GROUP, "n_agent_outputs": 3}),
    (MultiAgentAttention, {**GROUP, "n_agent_outputs": 3}),
    (MultiAgentGRU, {**GROUP, "hidden_size": 3, "num_layers": 1}),
    (MultiAgentConvNet, {"in_features": 3, "n_agents": 4, **BOTH}),
]


def wrong_sizes(*values: Any) -> list[Case]:
    return [
        (kind, {**sizes, name: value}, f"{name} must be (an integer|True or False)")
        for kind, sizes in SIZED
        for name, size in sizes.items()
        for value in values
        if isinstance(value, str) or size is not True
        if value != 0 or name in ("n_agents", "hidden_size", "num_layers")
    ]


NORMS = {"norm_class": nn.LayerNorm, "norm_kwargs": [{"normalized_shape": 8}] * 3}
TWICE = {"share_params": True, "centralised": True, "centralized": True}
ATTENTION: dict[str, Any] = {"network": "attention", "centralised": True}
VALUES: list[Case] = [
    *wrong_sizes(0, -1),
    (mlp, {"norm_kwargs": {"eps": 1.0}}, "norm_kwargs .* without norm_class"),
    (mlp, {"layer_kwargs": [{}] * 2}, "layer_kwargs has 2 entries, .* 3 such layers"),
    (mlp, {"layer_kwargs": [{}] * 4}, "layer_kwargs has 4 entries, .* 3 such layers"),
    (mlp, {"activation_kwargs": [{}] * 3}, "activation_kwargs has 3 .* 2 such layers"),
    (mlp, NORMS, "norm_kwargs has 3 entries, .* 2 such layers"),
    (mlp, {"depth": None, "num_cells": 8}, "pass the number of layers as depth"),
    (mlp, {"depth": 2, "num_cells": [8]}, "contradicts"),
    (mlp, {"n_inputs": None, "layer_class": nn.Bilinear}, "needs layer_class"),
    (conv, {"num_cells": [4, 6], "strides": [1]}, r"strides=\[1\] has 1 ent.*2 layers"),
    (conv, {"norm_kwargs": {"num_groups": 2}}, "norm_kwargs .* without norm_class"),
    *(
        (conv, {"dtype": dtype}, f"float32 or torch.bfloat16, but is {dtype}")
        for dtype in (torch.float16, torch.float64, "bfloat16")
    ),
    (attention, {"num_cells": [0, 4]}, "num_cells must be an integer of at least 1"),
    (attention, {"num_cells": [], "num_heads": 2}, r"of num_heads=2.*is \[\]"),
    (attention, {"num_cells": [4, 3], "num_heads": 2}, "must end with a multiple of"),
    (attention, {"num_heads": 0}, "num_heads must be an integer of at least 1"),
    *(
        case
        for make in (counting, critic)
        for case in (
            (make, {"network": "attention"}, "pass centralised=True"),
            (make, ATTENTION | {"recurrent": "gru"}, "has no memory, but recurrent='g"),
            (
                make,
                ATTENTION | {"network": "atention"},
                "network must be None, 'att",
            ),
            (make, ATTENTION | {"num_cells": ()}, "num_cells must end with a multiple"),
        )
    ),
    (critic, {"network": nn.Linear}, "must be None or 'attention'"),
    (policy, {"recurrent": "rnn"}, r"one of \['gru', 'lstm'\], but is 'rnn'"),
    (policy, {"num_cells": (8, 0)}, "num_cells must be an integer of at least 1, but"),
    (policy, {"recurrent": "gru", "hidden_size": 0}, "hidden_size must be an integer"),
    (policy, {"recurrent": "gru", "num_layers": 0}, "num_layers must be an integer of"),
    *(
        (make, options, "configure a recurrent network, .* or num_cells")
        for make in (policy, critic)
        for options in ({"num_layers": 2}, {"hidden_size": 128})
    ),
    (
        policy,
        {"network": MultiAgentMLP, "num_cells": (8,)},
        "network replaces .*num_",
    ),
    (policy, {"network": MultiAgentMLP, "recurrent": "gru"}, "network replaces .*recu"),
    (counting, {"epsilon": 1.5}, "from 0 to 1, but is 1.5"),
]
TYPES: list[Case] = [
    *wrong_sizes("3", (3,), 3.0, True),
    (unset, {"share_params": True}, "either centralised or centralized"),
    (unset, TWICE, "either centralised or centralized"),
    (unset, {"centralised": True}, "share_params=True or"),
    (policy, {"centralized": True}, "'centralized'. Did you mean centralised?"),
    (policy, {"network": lambda *_, **__: None}, "must return a torch.nn.Module"),
    (
        critic,
        {"check_mask": False},
        "no option 'check_mask'. Its options are actions",
    ),
    (critic, {"actions": True}, "actions=True needs Box actions, but hunter"),
    (policy, {"activation_class": "relu"}, "such as torch.nn.ReLU, but is 'relu'"),
    (policy, {"epsilon": "0.1"}, "epsilon must be a number or None, but is '0.1'"),
    *(
        (make, {"centralised": "no"}, "centralised must be True or False, but is 'no'")
        for make in (policy, critic)
    ),
    (counting, {"epsilon": 0.1}, "epsilon needs Discrete actions, but prey"),
    (
        policy_of(spaces.Box(-1, 1, (2, 2))),
        *({"last_action": True}, "last_action=True cannot write the actions"),
    ),
    (policy_of(SEVERAL, spaces.Text(5)), {}, "no network for the observation g/obs"),
    (partial(make_head, group(spaces.Dict(x=VECTOR))), {}, "no head for the action sp"),
    (partial(make_policy, 42), {}, "Expected an environment, an envir.*42"),
]


@pytest.mark.parametrize(
    ("error", "case"),
    [*((ValueError, case) for case in VALUES), *((TypeError, case) for case in TYPES)],
)
def test_arguments_that_do_not_fit_are_named(
    error: type[Exception], case: Case
) -> None:
    call, keywords, words = case
    with pytest.raises(error, match=words):
        call(**keywords)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


gru = MultiAgentGRU(4, 6, N, num_layers=2, centralised=False, share_params=False)
vdn, qmixer = VDNMixer(4), QMixer((3,), 4, 4)
TO_MLP = [
    (zeros(2, 4, INPUTS), r"n_agents=3 .* found the shape \[2, 4, 5\]"),
    (zeros(INPUTS), r"n_agents=3 .* found the shape \[5\]"),
    (zeros(2, N, 7), "expected 5 features per agent, but found 7"),
    (zeros(2, N, INPUTS, dtype=torch.float64), "dtype torch.float32, but"),
    (zeros(2, N, INPUTS, dtype=torch.uint8), "found torch.uint8"),
]


@pytest.mark.parametrize(
    ("net", "inputs", "words"),
    [
        *((network(*setup), [x], words) for setup in SETUPS for x, words in TO_MLP),
        (gru, [zeros(2, 4, 4)], r"n_agents=3 .* shape \[2, 4, 4\]"),
        (gru, [zeros(2, N, 5)], "inputs=4"),
        (gru, [zeros(2, N, 4), zeros(2, N, 1, 6)], r"state of shape \[2, 3, 2, 6\]"),
        (gru, [zeros(2, N, 4).double()], "input has dtype torch.float64"),
        (vdn, [zeros(2, 3, 1)], r"n_agents=4.*\[2, 3, 1\]"),
        (vdn, [zeros(2, 4, 1), zeros(2, 3)], "takes no state"),
        (qmixer, [zeros(2, 4, 1)], "but found none"),
        (
            qmixer,
            [zeros(2, 4, 1), zeros(2, 5)],
            r"shape \[2, 3\], but .*\[2, 5\]",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(net: Any, inputs: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        net(*inputs)


def test_a_wrong_shape_of_is_init_is_named() -> None:
    with pytest.raises(ValueError, match=r"is_init of shape \[2, 1\]"):
        gru(zeros(2, N, 4), is_init=zeros(2, dtype=torch.bool))
