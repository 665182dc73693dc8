"""Functional use of ``MultiAgentMLP``: its weights are replaced, stacked and traced."""

from typing import Any

import pytest
import torch
from model_tools import INPUTS, OUTPUTS, SETUPS, N, network
from tensordict import TensorDict
from torch import nn


@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
class TestFunctional:
    def test_parameters_are_exchanged_through_a_tensordict(
        self, centralised: bool, share_params: bool
    ) -> None:
        net, other = (network(centralised, share_params) for _ in range(2))
        x = torch.randn(2, N, INPUTS)
        params = TensorDict.from_module(net)
        before = other(x)

        with params.to_module(other):
            inside = other(x)
        with params.data.to_module(other):
            torch.testing.assert_close(other(x), net(x))

        torch.testing.assert_close(inside, net(x))
        torch.testing.assert_close(other(x), before)

    def test_functional_call_uses_the_given_parameters(
        self, centralised: bool, share_params: bool
    ) -> None:
        net, other = (network(centralised, share_params) for _ in range(2))
        x = torch.randn(2, N, INPUTS)

        out = torch.func.functional_call(net, dict(other.named_parameters()), (x,))

        torch.testing.assert_close(out, other(x))

    def test_vmap_over_an_ensemble(self, centralised: bool, share_params: bool) -> None:
        nets = [network(centralised, share_params) for _ in range(4)]
        params, _ = torch.func.stack_module_state(nets)
        x = torch.randn(2, N, INPUTS)

        out = torch.vmap(
            lambda p: torch.func.functional_call(nets[0], p, (x,)),
        )(params)

        torch.testing.assert_close(out, torch.stack([net(x) for net in nets]))

    def test_it_compiles_in_one_graph(
        self, centralised: bool, share_params: bool
    ) -> None:
        net = network(centralised, share_params)
        x = torch.randn(4, N, INPUTS)

        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")

        torch.testing.assert_close(compiled(x), net(x))
        compiled(x).sum().backward()
        assert all(p.grad is not None for p in net.parameters())

    def test_it_exports_with_any_batch_size(
        self, centralised: bool, share_params: bool
    ) -> None:
        net = network(centralised, share_params)
        batch = torch.export.Dim("batch", min=2)

        program = torch.export.export(
            net, (torch.randn(4, N, INPUTS),), dynamic_shapes=(({0: batch},),)
        )

        for size in (2, 100):
            x = torch.randn(size, N, INPUTS)
            torch.testing.assert_close(program.module()(x), net(x))

    # TorchRL warns that there is no updater of the target parameters.
    @pytest.mark.filterwarnings("ignore:No target network updater")
    def test_torchrl_losses_accept_it(
        self, centralised: bool, share_params: bool
    ) -> None:
        objectives: Any = pytest.importorskip("torchrl.objectives")
        net = network(centralised, share_params)

        class Loss(objectives.LossModule):
            net: nn.Module
            net_params: TensorDict
            target_net_params: TensorDict

            def __init__(self) -> None:
                super().__init__()
                self.convert_to_functional(net, "net", create_target_params=True)

        loss = Loss()
        x = torch.randn(2, N, INPUTS)
        with loss.target_net_params.to_module(loss.net):
            torch.testing.assert_close(loss.net(x), net(x))

    def test_it_equals_torchrl_with_the_same_weights(
        self, centralised: bool, share_params: bool
    ) -> None:
        torchrl = pytest.importorskip("torchrl.modules")
        for use_td_params in (True, False):
            theirs = torchrl.MultiAgentMLP(
                INPUTS,
                OUTPUTS,
                N,
                centralized=centralised,
                share_params=share_params,
                depth=2,
                num_cells=8,
                use_td_params=use_td_params,
            ).double()
            net = network(centralised, share_params).double()
            net.load_torchrl_state_dict(theirs.state_dict())
            x = torch.randn(6, N, INPUTS, dtype=torch.float64, requires_grad=True)

            torch.testing.assert_close(net(x), theirs(x), atol=1e-10, rtol=0)
            gradient = torch.autograd.grad(net(x).square().sum(), x)[0]
            other = torch.autograd.grad(theirs(x).square().sum(), x)[0]
            torch.testing.assert_close(gradient, other, atol=1e-10, rtol=0)
        with pytest.raises(ValueError, match="TorchRL's state_dict do not fit"):
            network(centralised, share_params, num_cells=9).load_torchrl_state_dict(
                theirs.state_dict()
            )


@pytest.mark.parametrize("share_params", [False, True])
def test_load_state_dict_names_the_converter_of_torchrls_weights(
    share_params: bool,
) -> None:
    torchrl = pytest.importorskip("torchrl.modules")
    theirs = torchrl.MultiAgentMLP(
        INPUTS, OUTPUTS, N, centralized=True, share_params=share_params, depth=1
    )
    net = network(True, share_params)
    for module, prefix in ((net, ""), (torch.nn.Sequential(net), "0.")):
        state = {prefix + key: value for key, value in theirs.state_dict().items()}
        with pytest.raises(RuntimeError, match="load_torchrl_state_dict"):
            module.load_state_dict(state)
