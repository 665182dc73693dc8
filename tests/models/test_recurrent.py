"""Recurrent networks equal torch's, for single steps and for sequences."""

from typing import Any

import pytest
import torch
from model_tools import SETUPS
from tensordict import TensorDict
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from marl_collect.models import (
    MultiAgentGRU,
    MultiAgentLSTM,
    RecurrentModule,
    set_recurrent_mode,
)
from marl_collect.weights.materialize import infer_lazy, materialize, meta_tensors

KINDS = [(MultiAgentGRU, nn.GRU), (MultiAgentLSTM, nn.LSTM)]
N, INPUTS, UNITS, LAYERS, T = 3, 4, 6, 2, 7


def build(
    kind: Any,
    centralised: bool,
    share_params: bool,
    n_inputs: int | None = INPUTS,
    **options: Any,
) -> Any:
    options = {"num_layers": LAYERS} | options
    setup = {"centralised": centralised, "share_params": share_params}
    return kind(n_inputs, UNITS, N, **setup, **options)


def states_of(net: Any, *batch: Any) -> Any:
    states = [torch.randn(*batch, *net.state_shape) for _ in net.state_names]
    if net.centralised and net.share_params:
        states = [s[..., :1, :, :].expand_as(s) for s in states]
    return [s.to(next(net.parameters()).dtype) for s in states]


def as_torch(net: Any, kind: Any, agent: int) -> Any:
    """Build torch's network with the weights of one agent."""
    inputs = INPUTS * N if net.centralised else INPUTS
    reference = kind(inputs, UNITS, LAYERS, batch_first=True).double()
    cells = net.get_stateful_net(None if net.share_params else agent)
    with torch.no_grad():
        for layer, cell in enumerate(cells):
            for name, linear in (("ih", cell.input), ("hh", cell.hidden)):
                getattr(reference, f"weight_{name}_l{layer}").copy_(linear.weight)
                getattr(reference, f"bias_{name}_l{layer}").copy_(linear.bias)
    return reference


@pytest.mark.parametrize(("kind", "theirs"), KINDS)
@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
def test_a_sequence_equals_torch(
    kind: Any, theirs: Any, centralised: bool, share_params: bool
) -> None:
    net = build(kind, centralised, share_params).double()
    x = torch.randn(5, T, N, INPUTS, dtype=torch.float64, requires_grad=True)
    states = states_of(net, 5)
    out, *_ = net(x, *states, sequence=True)
    outputs = []
    for agent in range(N):
        agent_input = x.flatten(2) if centralised else x[:, :, agent]
        first = tuple(s[:, agent].transpose(0, 1).contiguous() for s in states)
        state = first[0] if len(first) == 1 else first
        outputs.append(as_torch(net, theirs, agent)(agent_input, state)[0])
    expected = torch.stack(outputs, 2)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    weights = torch.randn_like(out)
    gradient = torch.autograd.grad((out * weights).sum(), x)[0]
    expected_gradient = torch.autograd.grad((expected * weights).sum(), x)[0]
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)


class _Elements(TorchDispatchMode):
    """Counts the elements that all operations return, those of gradients included."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.number += tensor.numel()
        return out


@pytest.mark.parametrize("kind", [MultiAgentGRU, MultiAgentLSTM])
@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
def test_training_costs_twice_as_much_for_twice_as_many_steps(
    kind: Any, centralised: bool, share_params: bool
) -> None:
    net = build(kind, centralised, share_params)
    elements = []
    for steps in (50, 100):
        x = torch.randn(2, steps, N, INPUTS, requires_grad=True)
        is_init = torch.rand(2, steps, 1) > 0.9
        with _Elements() as counted:
            net(x, is_init=is_init, sequence=True)[0].sum().backward()
        elements.append(counted.number)
    assert elements[1] < 2.1 * elements[0]


@pytest.mark.parametrize("kind", [MultiAgentGRU, MultiAgentLSTM])
@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
@pytest.mark.parametrize("batch", [(), (2, 5)])
@pytest.mark.parametrize("resets", [False, True])
def test_single_steps_equal_the_sequence_and_its_gradients(
    kind: Any, centralised: bool, share_params: bool, batch: Any, resets: bool
) -> None:
    net = build(kind, centralised, share_params).double()
    x = torch.randn(*batch, T, N, INPUTS, dtype=torch.float64, requires_grad=True)
    is_init = torch.rand(*batch, T, 1) > 0.7 if resets else None
    first = [state.requires_grad_() for state in states_of(net, *batch)]
    sequence = net(x, *first, is_init=is_init, sequence=True)
    time, states, steps = len(batch), first, []
    for t in range(T):
        begins = None if is_init is None else is_init.select(time, t)
        out, *states = net(x.select(time, t), *states, is_init=begins)
        steps.append((out, *states))
    stacked = [torch.stack(parts, time) for parts in zip(*steps, strict=True)]
    weights = [torch.randn_like(part) for part in stacked]
    tensors = [x, *first, *net.parameters()]
    found = []
    for outputs in (sequence, stacked):
        once, again = (
            torch.autograd.grad(
                outputs,
                tensors,
                weights,
                retain_graph=True,
                create_graph=differentiable,
            )
            for differentiable in (False, True)
        )
        twice = torch.autograd.grad([g.square().sum() for g in again], tensors)
        found.append([*outputs, *once, *again, *twice])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", [MultiAgentGRU, MultiAgentLSTM])
@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
@pytest.mark.parametrize("sequence", [False, True])
def test_under_autocast_it_computes_in_its_own_dtype(
    kind: Any, centralised: bool, share_params: bool, sequence: bool
) -> None:
    """Behind a layer, whose output autocast has rounded."""
    net = build(kind, centralised, share_params)
    x = torch.randn(2, *[T] * sequence, N, INPUTS).bfloat16()
    arguments: dict[str, Any] = {"is_init": torch.rand(*x.shape[:-2], 1) > 0.7}
    states = states_of(net, 2)

    def run(x: torch.Tensor) -> Any:
        return net(x, *states, **arguments, sequence=sequence)

    expected = run(x.float())
    with torch.autocast("cpu"):
        outputs = run(x)
    for output, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, value, rtol=0, atol=0)
    gradients = [
        torch.autograd.grad(out[0].square().sum(), [*net.parameters()])
        for out in (outputs, expected)
    ]
    for gradient, value in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, value, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "theirs"), KINDS)
@pytest.mark.parametrize("share_params", [False, True])
def test_torchrls_weights_are_loaded(
    kind: Any, theirs: Any, share_params: bool
) -> None:
    modules = pytest.importorskip("torchrl.modules")
    module_class = modules.GRUModule if theirs is nn.GRU else modules.LSTMModule
    states = ["h"] if theirs is nn.GRU else ["h", "c"]
    out_keys = ["y", *(("next", state) for state in states)]
    keys = {"in_keys": ["x", *states], "out_keys": out_keys}
    module = module_class(INPUTS, UNITS, num_layers=LAYERS, **keys)
    net = build(kind, False, share_params)
    agents = [None] if share_params else range(N)
    for agent in agents:
        net.load_torchrl_state_dict(module.state_dict(), agent)
    x = torch.randn(5, N, INPUTS)
    core = module.gru if theirs is nn.GRU else module.lstm
    expected = core(x[:, 0].unsqueeze(1))[0].squeeze(1)
    torch.testing.assert_close(net(x)[0][:, 0], expected)
    if not share_params:
        with pytest.raises(ValueError, match="pass the agent, such as agent=0"):
            net.load_torchrl_state_dict(module.state_dict())
    other = build(kind, False, True, num_layers=1)
    with pytest.raises(ValueError, match=r"unknown: \['1\.hidden"):
        other.load_torchrl_state_dict(module.state_dict())


def frames(batch: Any, n_steps: int | None = None) -> Any:
    shape = batch if n_steps is None else (*batch, n_steps)
    return TensorDict(
        {
            "walker": TensorDict(
                {"observation": torch.randn(*shape, N, INPUTS)}, shape
            ),
            "is_init": torch.zeros(*shape, 1, dtype=torch.bool),
        },
        shape,
    )


def test_errors_of_a_module_name_its_group_and_missing_keys() -> None:
    module = RecurrentModule(build(MultiAgentGRU, False, True), "walker")
    with pytest.raises(KeyError, match="needs walker/observation, but found nothing"):
        module(TensorDict({}, [2]))
    with (
        set_recurrent_mode(),
        pytest.raises(KeyError, match="needs is_init, but found walker"),
    ):
        module(frames((2,), T).exclude("is_init"))
    wrong = frames((2,))
    wrong["walker", "observation"] = torch.zeros(2, 5, INPUTS)
    with pytest.raises(ValueError, match=r"Group 'walker'.*n_agents=3"):
        module(wrong)


def test_a_lazy_module_is_inferred_from_a_fake_frame() -> None:
    module = RecurrentModule(build(MultiAgentGRU, True, False, n_inputs=None), "walker")
    ready = materialize(infer_lazy(module, frames((1,))), seed=0)
    assert not meta_tensors(ready)
    assert ready(frames((2,)))["walker", "embedding"].shape == (2, N, UNITS)


def test_a_gradient_of_some_inputs_is_enough() -> None:
    net = MultiAgentGRU(5, 6, 3, centralised=False, share_params=True)
    x, parameters = torch.randn(4, 7, 3, 5), dict(net.named_parameters())
    outputs = net(x, sequence=True)
    weights = [torch.randn_like(out) for out in outputs]
    whole = torch.autograd.grad(outputs, [*parameters.values()], weights)
    for name, parameter in parameters.items():
        parameter.requires_grad_("input" in name)
    torch.autograd.backward(net(x, sequence=True), weights)
    for (name, parameter), expected in zip(parameters.items(), whole, strict=True):
        assert (parameter.grad is not None) == ("input" in name)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected)


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
