"""Every network can be copied, compiled, exported, vmapped, and used in losses.

``test_network_functional.py`` has more of these tests for ``MultiAgentMLP``.
"""

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from marl_collect.models import (
    CrossCriticGroupSpec,
    CrossGroupCritic,
    MultiAgentConvNet,
    MultiAgentGRU,
    MultiAgentLSTM,
    MultiAgentMLP,
    QMixer,
    VDNMixer,
)
from marl_collect.weights.materialize import materialize, meta_tensors

N = 3
DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """A network, and the shapes of its inputs without batch dimensions."""

    build: Callable[..., nn.Module]
    inputs: tuple[tuple[int, ...], ...]

    def x(self, batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(batch)
        return tuple(
            torch.randn(batch, *shape, generator=generator, dtype=dtype)
            for shape in self.inputs
        )


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for centralised, share_params in itertools.product((False, True), (False, True)):
        setup: dict[str, Any] = {
            "centralised": centralised,
            "share_params": share_params,
        }

        def mlp(setup: Any = setup, **options: Any) -> nn.Module:
            return MultiAgentMLP(4, 2, N, num_cells=[5], **setup, **options)

        def conv(setup: Any = setup, **options: Any) -> nn.Module:
            return MultiAgentConvNet(
                N,
                in_features=2,
                num_cells=[3, 2],
                kernel_sizes=3,
                strides=1,
                **setup,
                **options,
            )

        def gru(setup: Any = setup, **options: Any) -> nn.Module:
            return MultiAgentGRU(4, 3, N, num_layers=2, **setup, **options)

        def lstm(setup: Any = setup, **options: Any) -> nn.Module:
            return MultiAgentLSTM(4, 3, N, **setup, **options)

        name = f"{'c' if centralised else 'd'}{'s' if share_params else 'u'}"
        cases[f"mlp-{name}"] = Case(mlp, ((N, 4),))
        cases[f"conv-{name}"] = Case(conv, ((N, 2, 6, 6),))
        cases[f"gru-{name}"] = Case(gru, ((N, 4), (N, 2, 3)))
        cases[f"lstm-{name}"] = Case(lstm, ((N, 4), (N, 1, 3), (N, 1, 3)))
    cases["vdn"] = Case(lambda **_: VDNMixer(N), ((N, 1),))
    cases["qmix"] = Case(
        lambda **options: QMixer((4,), 5, N, **options), ((N, 1), (4,))
    )
    for share_params in (False, True):

        def critic(share: bool = share_params, **options: Any) -> nn.Module:
            groups = {
                name: CrossCriticGroupSpec(
                    obs_dim=size,
                    n_agents=n,
                    obs_key=(name, "observation"),
                    value_key=(name, "state_value"),
                )
                for name, (n, size) in {"a": (2, 3), "b": (1, 4)}.items()
            }
            sizes: dict[str, Any] = {"d_model": 4, "trunk_cells": 5}
            module = CrossGroupCritic(groups, share_params=share, **sizes, **options)
            inner: nn.Module = module.module
            return inner

        cases[f"critic-{'s' if share_params else 'u'}"] = Case(critic, ((2, 3), (1, 4)))
    return cases


CASES = _cases()
WITH_WEIGHTS = {name: case for name, case in CASES.items() if name != "vdn"}
# These tests are slow; those of MultiAgentMLP are in test_network_functional.py.
TRACED = (
    "conv-du",
    "conv-cs",
    "gru-du",
    "gru-cs",
    "lstm-cu",
    "lstm-ds",
    "vdn",
    "qmix",
    "critic-u",
)


@pytest.fixture(params=TRACED)
def traced(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=WITH_WEIGHTS)
def weighty(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def total(out: Any) -> Tensor:
    outputs = out if isinstance(out, tuple) else (out,)
    return torch.stack([output.square().sum() for output in outputs]).sum()


def test_gradients_pass_gradcheck(case: Case) -> None:
    net = case.build().double()
    x = tuple(tensor.requires_grad_() for tensor in case.x(2, DOUBLE))
    params = dict(net.named_parameters())

    def call(*tensors: Tensor) -> Any:
        named_params = dict(zip(params, tensors[len(x) :], strict=True))
        return torch.func.functional_call(net, named_params, tensors[: len(x)])

    assert torch.autograd.gradcheck(call, (*x, *params.values()), fast_mode=True)


def test_copies_are_equal_and_independent(weighty: Case) -> None:
    net = weighty.build()
    x = weighty.x(3)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        close(other(*x), net(*x))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        assert not torch.equal(total(other(*x)), total(net(*x)))


LAZY: dict[str, Callable[..., nn.Module]] = {
    "mlp": lambda **setup: MultiAgentMLP(None, 2, N, num_cells=[5], **setup),
    "conv": lambda **setup: MultiAgentConvNet(
        N, num_cells=[3], kernel_sizes=3, strides=1, **setup
    ),
    "gru": lambda **setup: MultiAgentGRU(None, 3, N, **setup),
    "lstm": lambda **setup: MultiAgentLSTM(None, 3, N, **setup),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("centralised", [False, True])
@pytest.mark.parametrize("share_params", [False, True])
def test_lazy_networks_can_be_copied_pickled_and_printed(
    kind: str, centralised: bool, share_params: bool
) -> None:
    net = LAZY[kind](centralised=centralised, share_params=share_params)
    x = CASES[f"{kind}-ds"].x(2)[0]
    assert repr(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net):
        assert any(is_lazy(parameter) for parameter in other.parameters())
        other(x)
        assert not any(is_lazy(parameter) for parameter in other.parameters())


def test_state_dicts_round_trip(weighty: Case) -> None:
    net, other = weighty.build(), weighty.build()
    other.load_state_dict(net.state_dict())
    close(other(*weighty.x(3)), net(*weighty.x(3)))


def test_materialized_weights_depend_only_on_the_seed(weighty: Case) -> None:
    meta = weighty.build(device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert repr(meta)
    ready = [materialize(copy.deepcopy(meta), seed=3) for _ in range(2)]
    assert not meta_tensors(ready[0])
    assert torch.equal(total(ready[0](*weighty.x(2))), total(ready[1](*weighty.x(2))))


def test_parameters_are_replaced_from_a_tensordict(weighty: Case) -> None:
    net, other = weighty.build(), weighty.build()
    x = weighty.x(2)
    with TensorDict.from_module(net).to_module(other):
        close(other(*x), net(*x))


def test_functional_call_uses_other_weights(weighty: Case) -> None:
    net, other = weighty.build(), weighty.build()
    x = weighty.x(2)
    weights: dict[str, Any] = dict(other.named_parameters())
    close(torch.func.functional_call(net, weights, x), other(*x))


def test_vmap_over_stacked_copies(weighty: Case) -> None:
    nets = [weighty.build() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)
    x = weighty.x(2)

    out = torch.vmap(
        lambda p, b: torch.func.functional_call(nets[0], (p, b), x), in_dims=(0, 0)
    )(params, buffers)

    expected = [net(*x) for net in nets]
    if isinstance(expected[0], tuple):
        close(
            out, tuple(torch.stack(outputs) for outputs in zip(*expected, strict=True))
        )
    else:
        close(out, torch.stack(expected))


def test_it_compiles_in_one_graph(traced: Case) -> None:
    torch._dynamo.reset()
    net = traced.build()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    close(compiled(*traced.x(4)), net(*traced.x(4)))
    if list(net.parameters()):
        total(compiled(*traced.x(4))).backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


_SHARED: dict[str, Any] = {"centralised": False, "share_params": True}
SIZED: dict[str, Callable[[int], tuple[nn.Module, tuple[tuple[int, ...], ...]]]] = {
    "mlp": lambda size: (MultiAgentMLP(size, 2, N, **_SHARED), ((N, size),)),
    "conv": lambda size: (
        MultiAgentConvNet(
            N, in_features=size, num_cells=[3], kernel_sizes=3, strides=1, **_SHARED
        ),
        ((N, size, 6, 6),),
    ),
    "gru": lambda size: (
        MultiAgentGRU(size, 3, N, **_SHARED),
        ((N, size), (N, 1, 3)),
    ),
    "lstm": lambda size: (
        MultiAgentLSTM(size, 3, N, **_SHARED),
        ((N, size), (N, 1, 3), (N, 1, 3)),
    ),
    "qmix": lambda size: (QMixer((size,), 5, N), ((N, 1), (size,))),
}
"""Builds, for an input size, a network and the shapes of its inputs."""


@pytest.mark.parametrize("name", SIZED)
def test_networks_of_several_sizes_compile_in_one_process(name: str) -> None:
    torch._dynamo.reset()
    # Once a size has changed, the compiler treats it as a symbol instead of a number.
    for size in (4, 5, 6):
        net, shapes = SIZED[name](size)
        x = Case(lambda net=net: net, shapes).x(size)
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        close(compiled(*x), net(*x))


def test_it_exports_with_any_batch_size(traced: Case) -> None:
    net = traced.build()
    batch = torch.export.Dim("batch", min=2)
    shapes = tuple({0: batch} for _ in traced.inputs)
    example = traced.x(4)
    # torch.export expects the shapes of ``*args`` as a single tuple.
    dynamic: Any = (shapes,) if _takes_any_number(net) else shapes

    program = torch.export.export(net, example, dynamic_shapes=dynamic)

    for size in (2, 9):
        x = traced.x(size)
        close(program.module()(*x), net(*x))


def _takes_any_number(net: nn.Module) -> bool:
    parameters = inspect.signature(net.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


# TorchRL warns that there is no updater of the target parameters.
@pytest.mark.filterwarnings("ignore:No target network updater")
def test_torchrl_losses_accept_it_with_target_parameters(weighty: Case) -> None:
    objectives = pytest.importorskip("torchrl.objectives")
    net = weighty.build()

    class Loss(objectives.LossModule):  # type: ignore[name-defined]
        net: nn.Module
        net_params: TensorDict
        target_net_params: TensorDict

        def __init__(self) -> None:
            super().__init__()
            self.convert_to_functional(net, "net", create_target_params=True)

    loss = Loss()
    x = weighty.x(2)
    for params in (loss.net_params, loss.target_net_params):
        with params.to_module(loss.net):
            close(loss.net(*x), net(*x))


@pytest.mark.accelerator
def test_the_gpu_equals_the_cpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # By default convolutions round to 10 bits of mantissa there.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net = case.build()
    on_gpu = copy.deepcopy(net).cuda()
    x = case.x(5)

    out = on_gpu(*(tensor.cuda() for tensor in x))
    expected = net(*x)

    pairs = zip(
        out if isinstance(out, tuple) else (out,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    )
    for gpu_value, cpu_value in pairs:
        torch.testing.assert_close(gpu_value.cpu(), cpu_value, atol=1e-4, rtol=1e-3)
    if list(net.parameters()):
        total(out).backward()
        total(expected).backward()
        gradients = zip(on_gpu.parameters(), net.parameters(), strict=True)
        for gpu_parameter, cpu_parameter in gradients:
            assert gpu_parameter.grad is not None
            torch.testing.assert_close(
                gpu_parameter.grad.cpu(), cpu_parameter.grad, atol=1e-3, rtol=1e-3
            )
