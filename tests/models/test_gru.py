"""The written gradient of a GRU equals that of autograd, to the second order."""

from typing import Any

import pytest
import torch
from torch import Tensor

from marl_collect.models import MultiAgentGRU
from marl_collect.models.recurrent.gru import run_gru

T, ROWS, UNITS, AGENTS = 4, 3, 2, 2


def inputs(agents: tuple[int, ...], resets: bool) -> list[Any]:
    shapes: list[Any] = [
        (T, *agents, ROWS, 3 * UNITS),
        (*agents, ROWS, UNITS),
        (*agents, UNITS, 3 * UNITS),
        (*agents, 1, 3 * UNITS) if agents else (3 * UNITS,),
    ]
    tensors = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    shape = (T, *(1 for _ in agents), ROWS, 1)
    keep = (torch.rand(shape) > 0.5).double() if resets else None
    return [*tensors[:2], keep, *tensors[2:]]


@pytest.mark.parametrize("agents", [(), (AGENTS,)])
@pytest.mark.parametrize("resets", [False, True])
def test_the_gradient_is_that_of_differences(
    agents: tuple[int, ...], resets: bool
) -> None:
    given = inputs(agents, resets)
    assert torch.autograd.gradcheck(run_gru, given)
    assert torch.autograd.gradgradcheck(run_gru, given)


def trained(net: Any, x: Tensor, is_init: Tensor | None) -> list[Tensor]:
    """Return the outputs, and the gradients of everything that has one."""
    state = torch.zeros(*x.shape[:1], *net.state_shape, requires_grad=True)
    tensors = [x, state, *net.parameters()]
    outputs = net(x, state, is_init, sequence=True)
    torch.manual_seed(1)
    loss = sum((out * torch.randn(out.shape)).sum() for out in outputs)
    assert isinstance(loss, Tensor)
    return [*outputs, *torch.autograd.grad(loss, tensors)]


def test_a_gradient_of_some_inputs_is_enough() -> None:
    net = MultiAgentGRU(5, 6, 3, centralised=False, share_params=True)
    x = torch.randn(4, 7, 3, 5)
    whole = trained(net, x.clone().requires_grad_(), None)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("input" in name)
    out, state = net(x, sequence=True)
    torch.manual_seed(1)
    loss = sum((t * torch.randn(t.shape)).sum() for t in (out, state))
    assert isinstance(loss, Tensor)
    loss.backward()
    names = [name for name, _ in net.named_parameters()]
    for name, expected in zip(names, whole[4:], strict=True):
        grad = net.get_parameter(name).grad
        assert (grad is not None) == ("input" in name)
        if grad is not None:
            torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("part", ["cell", "hidden"])
def test_hooks_run_at_each_step(part: str) -> None:
    net = MultiAgentGRU(5, 6, 3, centralised=False, share_params=True)
    x, calls = torch.randn(4, 7, 3, 5), list[int]()
    plain = net(x, sequence=True)
    (cell,) = net.net.children()
    module = cell if part == "cell" else cell.get_submodule("hidden")
    module.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(net(x, sequence=True), plain)
    assert len(calls) == 7
