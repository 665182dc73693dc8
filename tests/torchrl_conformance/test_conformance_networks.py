"""Multi-agent networks and mixers: results, weights, and errors."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_tools import IMPLEMENTATIONS, Implementation
from torch import nn

AGENTS, INPUTS, OUTPUTS = 3, 4, 5
Build = Callable[[Any], Any]
SHARE: Any = pytest.mark.parametrize("share_params", [True, False])


def mlp(implementation: Any, **options: Any) -> Any:
    """Return a network of three agents."""
    options = {
        "n_agent_inputs": INPUTS,
        "n_agent_outputs": OUTPUTS,
        "n_agents": AGENTS,
        "centralised": False,
        "share_params": False,
        "depth": 2,
        "num_cells": 8,
        **options,
    }
    return implementation.MultiAgentMLP(**options)


def qmixer(implementation: Any) -> Any:
    return implementation.QMixer(
        state_shape=(8, 2), mixing_embed_dim=16, n_agents=AGENTS, device="cpu"
    )


def vdn(implementation: Any) -> Any:
    return implementation.VDNMixer(n_agents=AGENTS, device="cpu")


def drawn(seed: int) -> tuple[Build, tuple[int, ...]]:
    """Return a network of random options, and the shape of its input."""
    draw = random.Random(seed)
    options: dict[str, Any] = {
        draw.choice(["centralised", "centralized"]): draw.random() < 0.5,
        "share_params": draw.random() < 0.5,
        "activation_class": draw.choice([nn.Tanh, nn.ReLU]),
        "n_agents": AGENTS,
    }
    if seed % 4 == 3:
        options |= draw.choice([{}, {"num_cells": [4, 6], "kernel_sizes": [5, 3]}])
        options |= {"in_features": draw.choice([None, 3]), "strides": 2}
        return lambda names: names.MultiAgentConvNet(**options), (AGENTS, 3, 40, 40)
    options |= {"n_agent_inputs": draw.choice([None, INPUTS])}
    options |= {"n_agent_outputs": OUTPUTS}
    options |= draw.choice(
        [
            {"depth": 2, "num_cells": 8},
            {"depth": 1},
            {"depth": 3, "num_cells": None},
            {"num_cells": [8, 16]},
            {},
        ]
    )
    return lambda names: names.MultiAgentMLP(**options), (AGENTS, INPUTS)


@pytest.mark.parametrize("seed", range(24))
def test_networks_compute_the_same_with_the_same_weights(seed: int) -> None:
    pytest.importorskip("torchrl")
    build, shape = drawn(seed)
    ours, theirs = (build(Implementation(name)) for name in IMPLEMENTATIONS)
    x = torch.randn(2, 6, *shape)
    assert ours(x).shape == theirs(x).shape  # Sizes that are unknown are inferred.
    sizes = [sum(p.numel() for p in net.parameters()) for net in (ours, theirs)]
    assert sizes[0] == sizes[1]
    ours.load_torchrl_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert ours.centralized == ours.centralised == theirs.centralized


def test_mixers_compute_the_same_with_the_same_weights() -> None:
    pytest.importorskip("torchrl")
    values, state = torch.randn(2, 6, AGENTS, 1), torch.randn(2, 6, 8, 2)
    for build, inputs in ((vdn, [values]), (qmixer, [values, state])):
        ours, theirs = (build(Implementation(name)) for name in IMPLEMENTATIONS)
        if build is qmixer:
            ours.load_torchrl_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(*inputs), theirs(*inputs))


@SHARE
def test_the_first_dimension_of_separate_parameters_is_the_agent(
    implementation: Any, share_params: bool
) -> None:
    net = mlp(implementation, share_params=share_params)
    shapes = {n.partition(".")[2]: tuple(p.shape) for n, p in net.named_parameters()}
    lead = () if share_params else (AGENTS,)
    assert shapes["0.weight"] == (*lead, 8, INPUTS)
    assert shapes["4.bias"] == (*lead, OUTPUTS)


@SHARE
def test_the_network_inside_may_be_initialised(
    implementation: Any, share_params: bool
) -> None:
    net = mlp(implementation, share_params=share_params)
    inside = net.get_stateful_net()
    with torch.no_grad():
        for parameter in inside.parameters():
            parameter.zero_()
    net.from_stateful_net(inside)
    assert not net(torch.randn(AGENTS, INPUTS)).any()


def test_parameters_are_below_params(implementation: Any) -> None:
    names = [name for name, _ in mlp(implementation).named_parameters()]
    assert {name.partition(".")[0] for name in names} == {"params"}


def without(name: str) -> Build:
    options = {"centralised": True, "share_params": True}
    del options[name]
    return lambda names: names.MultiAgentMLP(INPUTS, OUTPUTS, AGENTS, **options)


def calling(build: Build, *shapes: tuple[int, ...]) -> Build:
    return lambda names: build(names)(*(torch.randn(*shape) for shape in shapes))


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (TypeError, without("centralised")),
        (TypeError, without("share_params")),
        (ValueError, calling(mlp, (7, 2, INPUTS))),
        (ValueError, calling(qmixer, (4, AGENTS, 1), (4, 8, 3))),
        (ValueError, calling(qmixer, (4, AGENTS + 1, 1), (4, 8, 2))),
        (ValueError, calling(qmixer, (4, AGENTS, 2), (4, 8, 2))),
        ((ValueError, TypeError), calling(vdn, (AGENTS, 1), (8,))),
        (
            (RuntimeError, ValueError),
            lambda n: mlp(n).load_state_dict(mlp(n, num_cells=9).state_dict()),
        ),
    ],
)
def test_what_does_not_fit_is_an_error(
    implementation: Any, error: Any, call: Build
) -> None:
    with pytest.raises(error, match=r"\w"):
        call(implementation)
