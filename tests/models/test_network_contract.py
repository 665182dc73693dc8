"""What every network promises: who sees whom, copies, laziness, tracing, TorchRL."""

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from model_tools import SETUPS
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from marl_collect.models import (
    CrossCriticGroupSpec,
    CrossGroupCritic,
    MultiAgentAttention,
    MultiAgentConvNet,
    MultiAgentGRU,
    MultiAgentLSTM,
    MultiAgentMLP,
    MultiAgentNetBase,
    QMixer,
    VDNMixer,
)
from marl_collect.weights.materialize import materialize, meta_tensors

N = 3
DOUBLE = torch.float64
Build = Callable[..., nn.Module]


def mlp(size: int | None = 4, **options: Any) -> nn.Module:
    return MultiAgentMLP(size, 2, N, num_cells=[5], **options)


def conv(size: int | None = 2, **options: Any) -> nn.Module:
    layers: Any = {"num_cells": [3, 2], "kernel_sizes": [3, (2, 3)], "strides": 1}
    return MultiAgentConvNet(N, in_features=size, **layers, **options)


def attention(size: int | None = 4, **options: Any) -> nn.Module:
    return MultiAgentAttention(size, 2, N, num_cells=[5, 6], num_heads=2, **options)


def gru(size: int | None = 4, **options: Any) -> nn.Module:
    return MultiAgentGRU(size, 6, N, num_layers=2, **options)


def lstm(size: int | None = 4, **options: Any) -> nn.Module:
    return MultiAgentLSTM(size, 6, N, **options)


def qmix(size: int = 4, **options: Any) -> nn.Module:
    return QMixer((size,), 5, N, **options)


def critic(*, share_params: bool, **options: Any) -> nn.Module:
    groups = {}
    for name, n, size in (("a", 2, 3), ("b", 1, 4)):
        keys: Any = {"obs_key": (name, "observation")}
        keys["value_key"] = (name, "state_value")
        groups[name] = CrossCriticGroupSpec(obs_dim=size, n_agents=n, **keys)
    sizes: Any = {"d_model": 4, "trunk_cells": 5}
    whole = CrossGroupCritic(groups, share_params=share_params, **sizes, **options)
    inner: nn.Module = whole.module
    return inner


@dataclass(frozen=True)
class Case:
    """A network, and the shapes of its inputs without batch dimensions."""

    build: Build
    inputs: tuple[tuple[int, ...], ...]

    def x(self, *batch: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(sum(batch))
        return tuple(
            torch.randn(*batch, *shape, generator=generator, dtype=dtype)
            for shape in self.inputs
        )


OF_AGENTS: dict[str, tuple[Build, tuple[tuple[int, ...], ...]]] = {
    "mlp": (mlp, ((N, 4),)),
    "conv": (conv, ((N, 2, 6, 7),)),
    "attention": (attention, ((N, 4),)),
    "gru": (gru, ((N, 4), (N, 2, 6))),
    "lstm": (lstm, ((N, 4), (N, 1, 6), (N, 1, 6))),
}
"""Networks with weights of each agent or shared ones, by kind."""
AGENTS = {
    f"{kind}-{'cd'[not centralised]}{'su'[not shared]}": (kind, centralised, shared)
    for kind in OF_AGENTS
    for centralised, shared in SETUPS
}
CASES = {
    name: Case(
        partial(OF_AGENTS[kind][0], centralised=centralised, share_params=shared),
        OF_AGENTS[kind][1],
    )
    for name, (kind, centralised, shared) in AGENTS.items()
} | {
    "vdn": Case(lambda **_: VDNMixer(N), ((N, 1),)),
    "qmix": Case(qmix, ((N, 1), (4,))),
    "critic-s": Case(partial(critic, share_params=True), ((2, 3), (1, 4))),
    "critic-u": Case(partial(critic, share_params=False), ((2, 3), (1, 4))),
}
WITH_WEIGHTS = [name for name in CASES if name != "vdn"]
# Tracing is slow.
TRACED = (
    *("mlp-cs", "mlp-cu", "mlp-ds", "mlp-du", "conv-du", "conv-cs", "gru-du"),
    *("attention-cs", "attention-cu", "attention-ds", "attention-du"),
    *("gru-cs", "lstm-cu", "lstm-ds", "vdn", "qmix", "critic-u"),
)
of_agents: Any = pytest.mark.parametrize("name", AGENTS)
with_weights: Any = pytest.mark.parametrize("name", WITH_WEIGHTS)
traced: Any = pytest.mark.parametrize("name", TRACED)


def outputs(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def total(out: Any) -> Tensor:
    return torch.stack([output.square().sum() for output in outputs(out)]).sum()


# Who sees whom


@pytest.mark.parametrize("batch", [(), (0,), (1,), (2, 3), (2, 0, 3), (600,)])
@pytest.mark.parametrize("name", CASES)
def test_rows_of_any_batch_are_computed_alike(name: str, batch: Any) -> None:
    net, x = CASES[name].build(), CASES[name].x(*batch)
    if not torch.Size(batch).numel():
        assert all(out.numel() == 0 for out in outputs(net(*x)))
        return
    flat = [tensor.reshape(-1, *tensor.shape[len(batch) :]) for tensor in x]
    # Many rows are computed in another way than few.
    parts = [net(*some) for some in zip(*(t.split(100) for t in flat), strict=True)]
    for index, out in enumerate(outputs(net(*x))):
        expected = torch.cat([outputs(part)[index] for part in parts])
        close(out, expected.reshape(*batch, *expected.shape[1:]))


@of_agents
def test_an_agent_depends_on_others_only_if_centralised(name: str) -> None:
    _, centralised, _ = AGENTS[name]
    net, (x, *states) = CASES[name].build(), CASES[name].x(2)
    before = outputs(net(x, *states))[0]
    x[:, 0] += 1
    differs = (outputs(net(x, *states))[0] != before).flatten(2).any(-1).all(0)
    assert differs.tolist() == [True, centralised, centralised]


@of_agents
def test_agents_are_alike_only_if_they_share_weights(name: str) -> None:
    _, centralised, shared = AGENTS[name]
    net, inputs = CASES[name].build(), CASES[name].x(2)
    alike = [tensor[:, :1].expand_as(tensor).contiguous() for tensor in inputs]
    out = outputs(net(*alike))[0]
    # Rows of one matrix product may differ in their last digits.
    assert torch.allclose(out[:, 0], out[:, 1], atol=1e-6) == shared
    if shared and not centralised:
        order = [2, 0, 1]
        expected = outputs(net(*inputs))[0][:, order]
        close(outputs(net(*(tensor[:, order] for tensor in inputs)))[0], expected)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class OwnNetwork(MultiAgentNetBase):
    """A custom class, written as for TorchRL."""

    def _build_single_net(self, *, device: Any, **_: Any) -> Any:
        layer = nn.Linear(4 * N if self.centralised else 4, 2, device=device)
        return nn.Sequential(layer, Square(), nn.Softmax(-1))


own = partial(OwnNetwork, n_agents=N)
GROUPS = {"num_groups": 2, "num_channels": 4}
NORMED = partial(MultiAgentConvNet, N, in_features=2, num_cells=[4])
SLOPE: dict[str, Any] = {"activation_kwargs": {"negative_slope": 0.3}}
LAYERS: dict[str, Build] = {
    "mlp": mlp,
    "conv": conv,
    "own": own,
    "own-by-0": partial(own, agent_dim=0),
    "own-by-1": partial(own, agent_dim=1),
    "layer-norm": partial(
        mlp, norm_class=nn.LayerNorm, norm_kwargs={"normalized_shape": 5}
    ),
    "batch-norm": partial(
        mlp, norm_class=nn.BatchNorm1d, norm_kwargs={"num_features": 5}
    ),
    "group-norm": partial(NORMED, norm_class=nn.GroupNorm, norm_kwargs=GROUPS),
    "prelu": partial(mlp, activation_class=nn.PReLU),
    "slope": partial(mlp, activation_class=nn.LeakyReLU, **SLOPE),
    "last": partial(mlp, bias_last_layer=False, activate_last_layer=True),
    "no-bias": partial(mlp, layer_kwargs=[{"bias": False}, {}]),
}
"""Networks that consist of layers of torch."""


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("centralised", "shared"), SETUPS)
def test_each_agent_computes_what_its_own_network_of_torch_does(
    kind: str, centralised: bool, shared: bool
) -> None:
    if kind == "batch-norm" and shared:
        return  # Torch's network would normalise the rows of each agent alone.
    net: Any = LAYERS[kind](centralised=centralised, share_params=shared).double()
    batch = () if kind == "own-by-0" else (6,)
    dim = len(batch)
    shape = (N, 2, 6, 7) if kind in ("conv", "group-norm") else (N, 4)
    x = torch.randn(*batch, *shape, dtype=DOUBLE, requires_grad=True)
    agents = [None] if shared else [*range(N)]
    singles = [net.get_stateful_net(agent) for agent in agents]
    if not shared:  # Batches change buffers, which are the network's own.
        singles = copy.deepcopy(singles)
    seen = [x.flatten(dim, dim + 1)] * N if centralised else x.unbind(dim)
    results = [singles[k % len(singles)](seen[k]) for k in range(N)]
    expected, out = torch.stack(results, dim), net(x)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=0)
    weights = torch.randn_like(expected)
    single_weights = [p for single in singles for p in single.parameters()]
    theirs = torch.autograd.grad((expected * weights).sum(), [x, *single_weights])
    ours = torch.autograd.grad((out * weights).sum(), [x, *net.parameters()])
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-10, rtol=0)
    count = len(ours) - 1
    for index, gradient in enumerate(ours[1:], 1):
        other = theirs[index] if shared else torch.stack(theirs[index::count])
        turned = other.mT if other.ndim == 3 else other  # Of linear layers.
        torch.testing.assert_close(gradient.reshape(turned.shape), turned)
    for agent, single in zip(agents, singles, strict=True):
        after = net.get_stateful_net(agent).state_dict()
        torch.testing.assert_close({**after}, {**single.state_dict()})


def test_several_inputs_are_joined() -> None:
    net = mlp(6, centralised=True, share_params=False)
    x, y = torch.randn(5, N, 4), torch.randn(5, N, 2)
    torch.testing.assert_close(net(x, y), net(torch.cat([x, y], -1)))


@of_agents
def test_the_network_of_one_agent_has_the_same_tensors(name: str) -> None:
    _, centralised, _ = AGENTS[name]
    net: Any = CASES[name].build()
    x = CASES[name].x(2)
    expected = [out[:, 1:2].detach().clone() for out in outputs(net(*x))]
    before = list(net.parameters())
    if centralised:
        with pytest.raises(ValueError, match="reads the inputs of all agents"):
            net.keep_agent(1)
        return
    net.keep_agent(1)
    row = [tensor[:, 1:2] for tensor in x]
    close(list(outputs(net(*row))), expected)
    with torch.no_grad():
        for tensor in before:
            tensor.zero_()
    assert not any(parameter.any() for parameter in net.parameters())


@of_agents
def test_agents_are_initialised_independently_within_torch_s_bounds(name: str) -> None:
    _, _, shared = AGENTS[name]
    eager: Any = CASES[name].build()
    again = copy.deepcopy(eager)
    again.reset_parameters()
    ready = materialize(CASES[name].build(device="meta"), seed=0)
    pairs = zip(eager.parameters(), again.parameters(), strict=True)
    assert all((before != after).all() for before, after in pairs)
    lazy: Any = CASES[name].build(size=None)
    lazy(*CASES[name].x(2))
    for net in (eager, again, ready, lazy):
        single = net.get_stateful_net(None if shared else 1)
        other = net.get_stateful_net(None if shared else 0)
        for key, tensor in single.named_parameters():
            assert shared or not torch.equal(tensor, other.get_parameter(key))
            layer = single.get_submodule(key.rpartition(".")[0])
            units = 6 if name.startswith(("gru", "lstm")) else layer.weight[0].numel()
            bound = units**-0.5
            assert tensor.abs().max() <= bound
            assert tensor.abs().max() > bound * (1 - 16 / tensor.numel())


# Weights are copied, exchanged, loaded and inferred


@pytest.mark.parametrize("name", CASES)
def test_gradients_pass_gradcheck(name: str) -> None:
    net = CASES[name].build().double()
    x = tuple(tensor.requires_grad_() for tensor in CASES[name].x(2, dtype=DOUBLE))
    params = dict(net.named_parameters())

    def call(*tensors: Tensor) -> Any:
        named = dict(zip(params, tensors[len(x) :], strict=True))
        return torch.func.functional_call(net, named, tensors[: len(x)])

    assert torch.autograd.gradcheck(call, (*x, *params.values()), fast_mode=True)
    if name.startswith("mlp"):
        assert torch.autograd.gradgradcheck(net, x)


@with_weights
def test_training_under_autocast_is_close_to_float32(name: str) -> None:
    net, x = CASES[name].build(), CASES[name].x(2, 3)
    numbers = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            loss = torch.stack([out.float().square().sum() for out in outputs(net(*x))])
        gradients = torch.autograd.grad(loss.sum(), [*net.parameters()])
        numbers.append(torch.cat([t.flatten() for t in (loss, *gradients)]).detach())
    size = numbers[0].abs().max()
    torch.testing.assert_close(numbers[1] / size, numbers[0] / size, rtol=0, atol=0.1)


@with_weights
def test_copies_are_equal_and_independent(name: str) -> None:
    net, x = CASES[name].build(), CASES[name].x(3)
    loaded = CASES[name].build()
    loaded.load_state_dict(net.state_dict())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), loaded):
        close(other(*x), net(*x))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        assert not torch.equal(total(other(*x)), total(net(*x)))


@with_weights
def test_weights_are_exchanged_for_a_call(name: str) -> None:
    net, other, x = CASES[name].build(), CASES[name].build(), CASES[name].x(2)
    before = other(*x)
    for params in (TensorDict.from_module(net), TensorDict.from_module(net).data):
        with params.to_module(other):
            close(other(*x), net(*x))
    close(torch.func.functional_call(other, dict(net.named_parameters()), x), net(*x))
    close(other(*x), before)


@with_weights
def test_vmap_over_stacked_copies(name: str) -> None:
    nets = [CASES[name].build() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)
    x = CASES[name].x(2)
    out = torch.vmap(
        lambda p, b: torch.func.functional_call(nets[0], (p, b), x), in_dims=(0, 0)
    )(params, buffers)
    expected = zip(*(outputs(net(*x)) for net in nets), strict=True)
    close(list(outputs(out)), [torch.stack(copies) for copies in expected])


@of_agents
def test_a_lazy_network_infers_its_size_from_the_first_input(name: str) -> None:
    build, x = CASES[name].build, CASES[name].x(2)
    eager, lazy = build(), build(size=None)
    optimiser = torch.optim.SGD(lazy.parameters(), lr=1.0)
    get: Any = lazy
    with pytest.raises(ValueError, match="lazy: pass the input size"):
        get.get_stateful_net()
    loaded = copy.deepcopy(lazy)
    loaded.load_state_dict(eager.state_dict())
    close(loaded(*x), eager(*x))
    for net in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy)), lazy):
        assert repr(net)
        assert any(is_lazy(parameter) for parameter in net.parameters())
        for out, expected in zip(outputs(net(*x)), outputs(eager(*x)), strict=True):
            assert out.shape == expected.shape
        shapes = [parameter.shape for parameter in net.parameters()]
        assert shapes == [parameter.shape for parameter in eager.parameters()]
        assert all(parameter.any() for parameter in net.parameters())
    before = copy.deepcopy(lazy.state_dict())
    total(lazy(*x)).backward()
    optimiser.step()
    assert all(not torch.equal(v, before[k]) for k, v in lazy.state_dict().items())


@with_weights
def test_materialized_weights_depend_only_on_the_seed(name: str) -> None:
    with torch.device("meta"):
        implicit = CASES[name].build()
    x = CASES[name].x(2)
    sums = []
    for meta in (implicit, CASES[name].build(device="meta")):
        assert all(parameter.is_meta for parameter in meta.parameters())
        if name in AGENTS:
            with pytest.raises(ValueError, match="device meta.*materialize"):
                meta(*x)
        travelled = pickle.loads(pickle.dumps(copy.deepcopy(meta)))
        assert repr(travelled) == repr(meta)
        ready = materialize(travelled, seed=3)
        assert not meta_tensors(ready)
        sums += [total(ready(*x)), total(materialize(meta, seed=3)(*x))]
    assert len(torch.stack(sums).unique()) == 1


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
def test_torchrl_weights_fit(kind: str, centralised: bool, share_params: bool) -> None:
    torchrl = pytest.importorskip("torchrl.modules")
    setup: dict[str, Any] = {"centralised": centralised, "share_params": share_params}
    for use_td_params in (True, False):
        theirs: Any = setup | {"use_td_params": use_td_params}
        if kind == "mlp":
            other = torchrl.MultiAgentMLP(4, 2, N, num_cells=[5], depth=None, **theirs)
            net: Any = mlp(**setup).double()
        else:
            # The defaults: three layers of 32.
            other = torchrl.MultiAgentConvNet(N, in_features=2, **theirs)
            net = MultiAgentConvNet(N, in_features=2, **setup).double()
        other = other.double()
        with pytest.raises(RuntimeError, match="load_torchrl_state_dict"):
            net.load_state_dict(other.state_dict())
        net.load_torchrl_state_dict(other.state_dict())
        shape = (N, 4) if kind == "mlp" else (N, 2, 30, 31)
        x = torch.randn(2, *shape, dtype=DOUBLE, requires_grad=True)
        torch.testing.assert_close(net(x), other(x), atol=1e-10, rtol=0)
        gradient = torch.autograd.grad(net(x).square().sum(), x)[0]
        expected = torch.autograd.grad(other(x).square().sum(), x)[0]
        torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=0)
        wider: Any = MultiAgentMLP(9, 2, N, num_cells=[6], **setup)
        with pytest.raises(ValueError, match="TorchRL's state_dict do not fit"):
            wider.load_torchrl_state_dict(other.state_dict())


def test_qmix_of_torchrl_computes_the_same() -> None:
    torchrl = pytest.importorskip("torchrl.modules")
    theirs = torchrl.QMixer((3, 2), 8, N, device="cpu")
    mixer = QMixer((3, 2), 8, N)
    mixer.load_torchrl_state_dict(theirs.state_dict())
    for batch in [(), (5,), (5, 2)]:
        q, state = torch.randn(*batch, N, 1), torch.randn(*batch, 3, 2)
        torch.testing.assert_close(mixer(q, state), theirs(q, state))


# Tracing, and losses


@pytest.mark.processes
@traced
def test_it_compiles_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    net, x = CASES[name].build(), CASES[name].x(4)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    close(compiled(*x), net(*x))
    if list(net.parameters()):
        total(compiled(*x)).backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.processes
@pytest.mark.parametrize("kind", [*OF_AGENTS, "qmix"])
def test_networks_of_several_sizes_compile_in_one_process(kind: str) -> None:
    torch._dynamo.reset()
    # Once a size has changed, the compiler treats it as a symbol instead of a number.
    for size in (4, 5, 6):
        if kind == "qmix":
            case = Case(partial(qmix, size), ((N, 1), (size,)))
        else:
            build, (first, *states) = OF_AGENTS[kind]
            setup = partial(build, size, centralised=False, share_params=True)
            case = Case(setup, ((N, size, *first[2:]), *states))
        net, x = case.build(), case.x(size)
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        close(compiled(*x), net(*x))


@traced
def test_it_exports_with_any_batch_size(name: str) -> None:
    net = CASES[name].build()
    batch = torch.export.Dim("batch", min=2)
    shapes = tuple({0: batch} for _ in CASES[name].inputs)
    # torch.export expects the shapes of ``*args`` as a single tuple.
    kinds = [p.kind for p in inspect.signature(net.forward).parameters.values()]
    dynamic: Any = (shapes,) if inspect.Parameter.VAR_POSITIONAL in kinds else shapes
    program = torch.export.export(net, CASES[name].x(4), dynamic_shapes=dynamic)
    for size in (2, 9, 100):
        x = CASES[name].x(size)
        close(program.module()(*x), net(*x))


# TorchRL warns that there is no updater of the target parameters.
@pytest.mark.filterwarnings("ignore:No target network updater")
@with_weights
def test_torchrl_losses_accept_it_with_target_parameters(name: str) -> None:
    objectives = pytest.importorskip("torchrl.objectives")
    net, x = CASES[name].build(), CASES[name].x(2)

    class Loss(objectives.LossModule):  # type: ignore[name-defined]
        net: nn.Module
        net_params: TensorDict
        target_net_params: TensorDict

        def __init__(self) -> None:
            super().__init__()
            self.convert_to_functional(net, "net", create_target_params=True)

    loss = Loss()
    for params in (loss.net_params, loss.target_net_params):
        with params.to_module(loss.net):
            close(loss.net(*x), net(*x))


@pytest.mark.accelerator
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_equals_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # By default convolutions round to 10 bits of mantissa there.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net, x = CASES[name].build(), CASES[name].x(5)
    on_gpu = copy.deepcopy(net).cuda()
    out = on_gpu(*(tensor.cuda() for tensor in x))
    expected = net(*x)
    for gpu_value, cpu_value in zip(outputs(out), outputs(expected), strict=True):
        torch.testing.assert_close(gpu_value.cpu(), cpu_value, atol=1e-4, rtol=1e-3)
    if list(net.parameters()):
        total(out).backward()
        total(expected).backward()
        for ours, theirs in zip(on_gpu.parameters(), net.parameters(), strict=True):
            assert ours.grad is not None
            gradient = ours.grad.cpu()
            torch.testing.assert_close(gradient, theirs.grad, atol=1e-3, rtol=1e-3)
