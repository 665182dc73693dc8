"""Multi-agent networks and mixers: shapes, independence, parameters, errors."""

from typing import Any

import pytest
import torch
from conformance_tools import IMPLEMENTATIONS, Implementation

AGENTS, INPUTS, OUTPUTS = 3, 4, 5
both = pytest.mark.parametrize
SHARE: Any = both("share_params", [True, False])


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


def convnet(implementation: Any, **options: Any) -> Any:
    """Return a convolutional network of three agents with images of 3x20x20."""
    options = {
        "n_agents": AGENTS,
        "centralised": False,
        "share_params": False,
        "in_features": 3,
        "num_cells": [4, 4],
        "kernel_sizes": [5, 3],
        "strides": [2, 1],
        **options,
    }
    return implementation.MultiAgentConvNet(**options)


def weights(net: Any) -> dict[str, torch.Tensor]:
    """Return the parameters by layer and name."""
    parameters = {n.partition(".")[2]: p for n, p in net.named_parameters()}
    return {n: p for n, p in parameters.items() if n}


def numbers(net: Any) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@SHARE
def test_the_first_dimension_of_separate_parameters_is_the_agent(
    implementation: Any, share_params: bool
) -> None:
    net = mlp(implementation, share_params=share_params)
    shapes = {name: tuple(value.shape) for name, value in weights(net).items()}
    lead = () if share_params else (AGENTS,)
    assert shapes["0.weight"] == (*lead, 8, INPUTS)
    assert shapes["4.bias"] == (*lead, OUTPUTS)


@SHARE
@both(
    "options",
    [
        {"num_cells": None},
        {"depth": None, "num_cells": [8, 16]},
        {"depth": None, "num_cells": None},
        {"depth": 1},
        {"n_agent_inputs": None},
        {"n_agent_inputs": None, "centralised": True},
    ],
)
def test_networks_have_the_same_size(options: Any, share_params: bool) -> None:
    pytest.importorskip("torchrl")
    sizes = []
    for name in IMPLEMENTATIONS:
        net = mlp(Implementation(name), share_params=share_params, **options)
        assert net(torch.randn(2, AGENTS, INPUTS)).shape == (2, AGENTS, OUTPUTS)
        sizes.append(numbers(net))
    assert sizes[0] == sizes[1]


def test_both_spellings_are_taken(implementation: Any) -> None:
    options = {"centralized": True, "share_params": True}
    net = implementation.MultiAgentMLP(INPUTS, OUTPUTS, AGENTS, **options)
    assert net.centralized


@both("missing", ["centralised", "share_params"])
def test_nothing_is_assumed(implementation: Any, missing: str) -> None:
    options = {"centralised": True, "share_params": True}
    del options[missing]
    with pytest.raises(TypeError):
        implementation.MultiAgentMLP(INPUTS, OUTPUTS, AGENTS, **options)


def test_another_number_of_agents_is_a_value_error(implementation: Any) -> None:
    with pytest.raises(ValueError, match=r"\b2\b"):
        mlp(implementation)(torch.randn(7, 2, INPUTS))


def test_an_optimiser_may_be_made_before_the_first_call(implementation: Any) -> None:
    net = mlp(implementation, n_agent_inputs=None)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(AGENTS, INPUTS)
    before = net(x).detach()
    net(x).square().sum().backward()
    optimiser.step()
    assert not torch.equal(net(x), before)


@SHARE
def test_parameters_may_be_drawn_again(implementation: Any, share_params: bool) -> None:
    net = mlp(implementation, share_params=share_params)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    net.reset_parameters()
    pairs = list(zip(before, net.parameters(), strict=True))
    assert all(not torch.equal(old, new) for old, new in pairs)
    if not share_params:
        assert all(not torch.equal(new[0], new[1]) for _, new in pairs)


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


def test_weights_of_another_shape_are_refused(implementation: Any) -> None:
    net, wider = mlp(implementation), mlp(implementation, num_cells=9)
    with pytest.raises((RuntimeError, ValueError)):
        net.load_state_dict(wider.state_dict())


def test_parameters_are_below_params(implementation: Any) -> None:
    names = [name for name, _ in mlp(implementation).named_parameters()]
    assert {name.partition(".")[0] for name in names} == {"params"}


def test_the_number_of_channels_may_be_inferred(implementation: Any) -> None:
    net = convnet(implementation, in_features=None)
    net(torch.randn(AGENTS, 3, 20, 20))
    assert numbers(net) == numbers(convnet(implementation))


def test_vdn_adds_the_values_of_agents(implementation: Any) -> None:
    mixer = implementation.VDNMixer(n_agents=AGENTS, device="cpu")
    values = torch.randn(2, 6, AGENTS, 1)
    torch.testing.assert_close(mixer(values), values.sum(-2))


def qmixer(implementation: Any) -> Any:
    return implementation.QMixer(
        state_shape=(8, 2), mixing_embed_dim=16, n_agents=AGENTS, device="cpu"
    )


@both(
    "inputs", [((AGENTS, 1), (8, 3)), ((AGENTS + 1, 1), (8, 2)), ((AGENTS, 2), (8, 2))]
)
def test_wrong_shapes_of_mixers_are_value_errors(
    implementation: Any, inputs: Any
) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        qmixer(implementation)(*(torch.randn(4, *shape) for shape in inputs))


def test_a_mixer_without_a_state_takes_none(implementation: Any) -> None:
    mixer = implementation.VDNMixer(n_agents=AGENTS, device="cpu")
    with pytest.raises((ValueError, TypeError)):
        mixer(torch.randn(AGENTS, 1), torch.randn(8))
