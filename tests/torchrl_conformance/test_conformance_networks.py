"""Multi-agent networks and mixers: shapes, independence, parameters, errors."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

AGENTS, INPUTS, OUTPUTS = 3, 4, 5
both = pytest.mark.parametrize
CENTRALISED: Any = both("centralised", [True, False])
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
@CENTRALISED
@both("batch", [(), (2,), (2, 6)])
def test_every_agent_has_outputs(
    implementation: Any, centralised: bool, share_params: bool, batch: Any
) -> None:
    net = mlp(implementation, centralised=centralised, share_params=share_params)
    out = net(torch.randn(*batch, AGENTS, INPUTS))
    assert out.shape == (*batch, AGENTS, OUTPUTS)


@SHARE
@CENTRALISED
def test_only_a_centralised_network_sees_other_agents(
    implementation: Any, centralised: bool, share_params: bool
) -> None:
    net = mlp(implementation, centralised=centralised, share_params=share_params)
    x = torch.randn(AGENTS, INPUTS)
    before = net(x)
    x[1] += 1
    changed_agents = (net(x) != before).any(-1)
    assert changed_agents.tolist() == (
        [True] * 3 if centralised else [False, True, False]
    )


@SHARE
@CENTRALISED
def test_agents_with_equal_inputs_agree_if_they_share(
    implementation: Any, centralised: bool, share_params: bool
) -> None:
    net = mlp(implementation, centralised=centralised, share_params=share_params)
    out = net(torch.randn(INPUTS).expand(AGENTS, INPUTS))
    assert torch.allclose(out[0], out[1]) == share_params


@SHARE
@CENTRALISED
def test_parameters_are_counted_once_per_network(
    implementation: Any, centralised: bool, share_params: bool
) -> None:
    net = mlp(implementation, centralised=centralised, share_params=share_params)
    inputs = INPUTS * AGENTS if centralised else INPUTS
    n_parameters = (inputs + 1) * 8 + (8 + 1) * 8 + (8 + 1) * OUTPUTS
    assert numbers(net) == n_parameters * (1 if share_params else AGENTS)


@SHARE
def test_the_first_dimension_of_separate_parameters_is_the_agent(
    implementation: Any, share_params: bool
) -> None:
    net = mlp(implementation, share_params=share_params)
    shapes = {name: tuple(value.shape) for name, value in weights(net).items()}
    lead = () if share_params else (AGENTS,)
    assert shapes["0.weight"] == (*lead, 8, INPUTS)
    assert shapes["4.bias"] == (*lead, OUTPUTS)


@both(
    ("options", "cells"),
    [
        ({"depth": 2, "num_cells": None}, [32, 32]),
        ({"depth": None, "num_cells": [8, 16]}, [8, 16]),
        ({"depth": None, "num_cells": None}, []),
        ({"depth": 1, "num_cells": 8}, [8]),
    ],
)
def test_depth_and_cells_give_the_layers(
    implementation: Any, options: Any, cells: list[int]
) -> None:
    net = mlp(implementation, share_params=True, **options)
    sizes = [INPUTS, *cells, OUTPUTS]
    pairs = pairwise(sizes)
    assert numbers(net) == sum((n_in + 1) * n_out for n_in, n_out in pairs)


@both("name", ["centralised", "centralized"])
def test_both_spellings_are_taken(implementation: Any, name: str) -> None:
    options = {name: True, "share_params": True}
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


@SHARE
@CENTRALISED
def test_the_number_of_inputs_may_be_inferred(
    implementation: Any, centralised: bool, share_params: bool
) -> None:
    net = mlp(
        implementation,
        n_agent_inputs=None,
        centralised=centralised,
        share_params=share_params,
    )
    out = net(torch.randn(2, AGENTS, INPUTS))
    eager = mlp(implementation, centralised=centralised, share_params=share_params)
    assert out.shape == (2, AGENTS, OUTPUTS)
    assert numbers(net) == numbers(eager)


def test_an_optimiser_may_be_made_before_the_first_call(implementation: Any) -> None:
    net = mlp(implementation, n_agent_inputs=None)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(AGENTS, INPUTS)
    before = net(x).detach()
    net(x).square().sum().backward()
    optimiser.step()
    assert not torch.equal(net(x), before)


@both("activation", [nn.ReLU, nn.Tanh])
def test_the_activation_is_chosen(implementation: Any, activation: Any) -> None:
    net = mlp(implementation, share_params=True, activation_class=activation)
    x = torch.randn(AGENTS, INPUTS)
    actual, expected = weights(net), x
    for layer in (0, 2, 4):
        expected = expected @ actual[f"{layer}.weight"].T + actual[f"{layer}.bias"]
        expected = activation()(expected) if layer < 4 else expected
    torch.testing.assert_close(net(x), expected)


@SHARE
def test_gradients_reach_every_parameter(
    implementation: Any, share_params: bool
) -> None:
    net = mlp(implementation, share_params=share_params)
    net(torch.randn(7, AGENTS, INPUTS)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_an_agent_s_gradients_are_its_own(implementation: Any) -> None:
    net = mlp(implementation)
    net(torch.randn(AGENTS, INPUTS))[1].sum().backward()
    for parameter in net.parameters():
        assert parameter.grad[1].any()
        assert not parameter.grad[[0, 2]].any()


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


@SHARE
@CENTRALISED
def test_a_state_dict_carries_the_weights(
    implementation: Any, centralised: bool, share_params: bool
) -> None:
    options = {"centralised": centralised, "share_params": share_params}
    net, other = mlp(implementation, **options), mlp(implementation, **options)
    x = torch.randn(AGENTS, INPUTS)
    assert not torch.equal(net(x), other(x))
    other.load_state_dict(net.state_dict())
    assert torch.equal(net(x), other(x))


def test_parameters_are_below_params(implementation: Any) -> None:
    names = [name for name, _ in mlp(implementation).named_parameters()]
    assert {name.partition(".")[0] for name in names} == {"params"}


def test_dropout_differs_between_agents(implementation: Any) -> None:
    net = mlp(implementation, num_cells=64, dropout=0.5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.1)
        out = net(torch.ones(AGENTS, INPUTS))
    assert not torch.equal(out[0], out[1])


def test_several_inputs_are_concatenated(implementation: Any) -> None:
    net = mlp(implementation)
    x = torch.randn(2, AGENTS, INPUTS)
    assert torch.equal(net(x[..., :1], x[..., 1:]), net(x))


def test_networks_can_be_vectorised(implementation: Any) -> None:
    net = mlp(implementation)
    x = torch.randn(6, AGENTS, INPUTS)
    torch.testing.assert_close(torch.vmap(net)(x), net(x))


@SHARE
@CENTRALISED
@both("batch", [(), (2,), (2, 3)])
def test_images_become_features_of_every_agent(
    implementation: Any, centralised: bool, share_params: bool, batch: Any
) -> None:
    net = convnet(implementation, centralised=centralised, share_params=share_params)
    out = net(torch.randn(*batch, AGENTS, 3, 20, 20))
    assert out.shape[:-1] == (*batch, AGENTS)
    assert out.shape[-1] == 4 * 6 * 6


@SHARE
@CENTRALISED
def test_only_a_centralised_convolution_sees_other_agents(
    implementation: Any, centralised: bool, share_params: bool
) -> None:
    net = convnet(implementation, centralised=centralised, share_params=share_params)
    x = torch.randn(AGENTS, 3, 20, 20)
    before = net(x)
    x[2] += 1
    changed_agents = (net(x) != before).any(-1)
    assert changed_agents.tolist() == (
        [True] * 3 if centralised else [False, False, True]
    )


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


@both("batch", [(), (2,), (2, 6)])
def test_qmix_gives_one_value(implementation: Any, batch: Any) -> None:
    mixer = qmixer(implementation)
    out = mixer(torch.randn(*batch, AGENTS, 1), torch.randn(*batch, 8, 2))
    assert out.shape == (*batch, 1)


def test_qmix_never_falls_with_an_agent_s_value(implementation: Any) -> None:
    values = torch.randn(50, AGENTS, 1, requires_grad=True)
    qmixer(implementation)(values, torch.randn(50, 8, 2)).sum().backward()
    assert (values.grad >= 0).all()
    assert values.grad.any()


def test_qmix_depends_on_the_state(implementation: Any) -> None:
    mixer, values = qmixer(implementation), torch.randn(AGENTS, 1)
    states = torch.randn(2, 8, 2)
    assert not torch.equal(mixer(values, states[0]), mixer(values, states[1]))


def test_qmix_has_the_papers_parameters(implementation: Any) -> None:
    names = {
        name.split(".")[0] for name, _ in qmixer(implementation).named_parameters()
    }
    assert names == {"hyper_w_1", "hyper_w_final", "hyper_b_1", "V"}


@both(
    "inputs",
    [
        ((AGENTS, 1), (8, 3)),
        ((AGENTS + 1, 1), (8, 2)),
        ((AGENTS, 2), (8, 2)),
    ],
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


@SHARE
@CENTRALISED
def test_the_libraries_compute_the_same(centralised: bool, share_params: bool) -> None:
    from conformance_tools import Implementation

    pytest.importorskip("torchrl")
    options = {"centralised": centralised, "share_params": share_params}
    ours = mlp(Implementation("marl_collect"), **options)
    theirs = mlp(Implementation("torchrl"), **options)
    with torch.no_grad():
        for name, value in weights(theirs).items():
            source = weights(ours)[name]
            turned = not share_params and name.endswith("weight")
            value.copy_((source.mT if turned else source).reshape(value.shape))
    x = torch.randn(2, AGENTS, INPUTS)
    torch.testing.assert_close(ours(x), theirs(x))


def test_the_libraries_mix_alike() -> None:
    from conformance_tools import Implementation

    pytest.importorskip("torchrl")
    ours, theirs = (qmixer(Implementation(n)) for n in ("marl_collect", "torchrl"))
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(4, AGENTS, 1), torch.randn(4, 8, 2)
    torch.testing.assert_close(ours(*inputs), theirs(*inputs))
