"""The contract of multi-agent networks: ``MultiAgentMLP`` and custom networks."""

import copy
from typing import Any

import pytest
import torch
from model_tools import INPUTS, SETUPS, N, network
from torch import nn

from marl_collect.models import MultiAgentMLP, MultiAgentNetBase


def as_modules(net: Any, x: torch.Tensor) -> Any:
    """Apply each agent's torch network to ``x``, ``[B, N, F]``."""
    outputs = []
    for agent in range(N):
        module = net.get_stateful_net(None if net.share_params else agent)
        outputs.append(module(x.flatten(1) if net.centralised else x[:, agent]))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share_params": True}, "either centralised or centralized"),
        (
            {"share_params": True, "centralised": True, "centralized": True},
            "either centralised or centralized",
        ),
        ({"centralised": True}, "share_params=True or"),
    ],
)
def test_centralised_and_share_params_are_required(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MultiAgentMLP(3, 2, 2, **options)


def test_outputs_can_be_changed_in_place() -> None:
    out = network(centralised=True, share_params=True)(torch.zeros(2, N, INPUTS))
    out[:, 0] += 1
    assert not torch.equal(out[:, 0], out[:, 1])


def test_one_agent_is_reset_without_the_others() -> None:
    net = network(centralised=False, share_params=False)
    before = copy.deepcopy(net.state_dict())
    net.reset_parameters(agent=1)
    for key, tensor in net.state_dict().items():
        assert torch.equal(tensor[0], before[key][0])
        assert not torch.equal(tensor[1], before[key][1])
    net.reset_parameters()
    after = net.net[0].weight
    assert not torch.equal(after[0], before["net.0.weight"][0])
    assert not torch.equal(after[0], after[2])


@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
def test_single_networks_can_be_replaced(centralised: bool, share_params: bool) -> None:
    net = network(centralised, share_params)

    def orthogonal(layer: Any) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight)
            nn.init.zeros_(layer.bias)

    net.get_stateful_net().apply(orthogonal)
    first = net.net[2].weight if share_params else net.net[2].weight[1]
    torch.testing.assert_close(first @ first.mT, torch.eye(8), atol=1e-5, rtol=0)
    other = network(centralised, share_params)
    if not share_params:
        other.from_stateful_net(net.get_stateful_net(agent=2), agent=0)
        torch.testing.assert_close(other.net[0].weight[0], net.net[0].weight[2])
        assert not torch.equal(other.net[0].weight[1], net.net[0].weight[1])
    other.from_stateful_net(net.get_stateful_net())
    x = torch.randn(2, N, INPUTS)
    torch.testing.assert_close(other(x), net(x))


def test_a_single_network_of_another_shape_is_an_error() -> None:
    net = network(centralised=False, share_params=False)
    with pytest.raises(ValueError, match=r"Missing: \['2.bias', '2.weight'"):
        net.from_stateful_net(nn.Sequential(nn.Linear(5, 8)), agent=0)
    with pytest.raises(ValueError, match="agent must be from 0 to 2, but is 3"):
        net.get_stateful_net(3)


def test_dropout_differs_between_agents() -> None:
    net = network(centralised=False, share_params=False, dropout=0.5)
    module = net.get_stateful_net(0)
    for agent in range(N):
        net.from_stateful_net(module, agent)
    x = torch.ones(N, INPUTS)
    out = net(x)
    assert not torch.equal(out[0], out[1])
    net.eval()
    torch.testing.assert_close(net(x)[0], net(x)[1])
    assert not net.get_stateful_net(0).training


@pytest.mark.parametrize(
    "options",
    [
        {"norm_class": nn.LayerNorm, "norm_kwargs": {"normalized_shape": 8}},
        {"norm_class": nn.BatchNorm1d, "norm_kwargs": {"num_features": 8}},
        {"activation_class": nn.PReLU},
        {"activation_class": nn.LeakyReLU, "activation_kwargs": {"negative_slope": 1}},
        {"bias_last_layer": False, "activate_last_layer": True},
        {"layer_kwargs": [{"bias": False}, {}, {}]},
    ],
)
@pytest.mark.parametrize("centralised", [False, True])
def test_other_layers_are_computed_per_agent(options: Any, centralised: bool) -> None:
    net = network(centralised, share_params=False, **options)
    x = torch.randn(6, N, INPUTS)
    singles = [copy.deepcopy(net.get_stateful_net(agent)) for agent in range(N)]
    out = net(x)
    pairs = enumerate(singles)
    expected = [s(x.flatten(1) if centralised else x[:, i]) for i, s in pairs]
    torch.testing.assert_close(out, torch.stack(expected, 1))
    for agent, module in enumerate(singles):
        agent_state = net.get_stateful_net(agent).state_dict()
        for key, value in module.state_dict().items():
            torch.testing.assert_close(agent_state[key], value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_kwargs": {"eps": 1.0}}, "norm_kwargs .* without norm_class"),
        ({"layer_kwargs": [{}] * 2}, "layer_kwargs has 2 entries, .* 3 such layers"),
        ({"layer_kwargs": [{}] * 4}, "layer_kwargs has 4 entries, .* 3 such layers"),
        ({"activation_kwargs": [{}] * 3}, "activation_kwargs has 3 .* 2 such layers"),
        (
            {"norm_class": nn.LayerNorm, "norm_kwargs": [{"normalized_shape": 8}] * 3},
            "norm_kwargs has 3 entries, .* 2 such layers",
        ),
    ],
)
def test_arguments_of_absent_layers_are_errors(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(False, share_params=True, **options)


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.square()


class OwnNetwork(MultiAgentNetBase):
    """A custom class, written as for TorchRL."""

    def __init__(self, width: Any, **options: Any) -> None:
        self.width = width
        super().__init__(**options)

    def _build_single_net(self, *, device: Any, **_: Any) -> Any:
        layer = nn.Linear(self.width, 2, device=device)
        return nn.Sequential(layer, Square(), nn.Softmax(-1))


@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
@pytest.mark.parametrize("agent_dim", [-2, 0, 1])
def test_custom_networks(centralised: bool, share_params: bool, agent_dim: int) -> None:
    width = N * INPUTS if centralised else INPUTS
    net = OwnNetwork(
        width,
        n_agents=N,
        centralised=centralised,
        share_params=share_params,
        agent_dim=agent_dim,
    )
    x = torch.randn(N, INPUTS) if agent_dim == 0 else torch.randn(4, N, INPUTS)
    out = net(x)
    assert out.shape == (*x.shape[:-1], 2)
    torch.testing.assert_close(out.sum(-1), torch.ones(x.shape[:-1]))
    if agent_dim:
        torch.testing.assert_close(out, as_modules(net, x))
    twice = OwnNetwork(
        2 * width,
        n_agents=N,
        centralised=centralised,
        share_params=share_params,
        agent_dim=agent_dim,
    )
    assert twice(x, x).shape == out.shape


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 4, INPUTS), r"n_agents=3 .* found the shape \[2, 4, 5\]"),
        (torch.zeros(INPUTS), r"n_agents=3 .* found the shape \[5\]"),
        (torch.zeros(2, N, 7), "expected 5 features per agent, but found 7"),
        (torch.zeros(2, N, INPUTS, dtype=torch.float64), "dtype torch.float32, but"),
        (torch.zeros(2, N, INPUTS, dtype=torch.uint8), "found torch.uint8"),
    ],
)
@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
def test_bad_inputs_name_what_is_found(
    centralised: bool, share_params: bool, x: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        network(centralised, share_params)(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": None, "num_cells": 8}, "pass the number of layers as depth"),
        ({"depth": 2, "num_cells": [8]}, "contradicts"),
        ({"n_inputs": None, "layer_class": nn.Bilinear}, "needs layer_class"),
    ],
)
def test_bad_arguments_are_errors(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(False, False, **options)


def test_lazy_layers_that_cannot_be_stacked_are_an_error() -> None:
    class Lazy(OwnNetwork):
        def _build_single_net(self, *, device: Any, **_: Any) -> Any:
            return nn.LazyBatchNorm1d(device=device)

    with pytest.raises(ValueError, match="LazyBatchNorm1d has lazy parameters"):
        Lazy(1, n_agents=2, centralised=False, share_params=False)


def test_hooks_on_layers_are_called() -> None:
    net = network(False, False)
    calls = []
    net.net[1].register_forward_hook(lambda *args: calls.append("layer"))
    net(torch.zeros(N, INPUTS))
    net.net.register_forward_hook(lambda *args: calls.append("net"))
    net(torch.zeros(N, INPUTS))
    assert calls == ["layer", "layer", "net"]
