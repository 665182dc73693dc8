"""Networks of vectors, pictures and sets of agents, and adapters of inputs."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from model_tools import INPUTS, SETUPS, N, network
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn
from workloads.counting import CountingEnv

from marl_collect import Collector
from marl_collect.models import (
    ImageInput,
    LocScale,
    MultiAgentAttention,
    MultiAgentConvNet,
    MultiAgentNetBase,
    make_policy,
)
from marl_collect.models.layers.inputs import VectorInput, observation_leaves
from marl_collect.models.layers.stacking import stack_agents


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


def test_frozen_layers_of_agents_are_stacked_frozen() -> None:
    frozen = [nn.Linear(3, 2).requires_grad_(requires_grad=False) for _ in range(N)]
    assert not any(p.requires_grad for p in stack_agents(frozen).parameters())


@pytest.mark.parametrize("share_params", [False, True])
def test_a_single_network_shares_buffers_too(share_params: bool) -> None:
    norm: Any = {"norm_class": nn.BatchNorm1d, "norm_kwargs": {"num_features": 8}}
    net = network(centralised=False, share_params=share_params, **norm)
    for buffer in net.get_stateful_net(1).buffers():
        buffer.fill_(7)
    assert all((buffer == 7).any() for buffer in net.buffers())


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


def test_lazy_layers_that_cannot_be_stacked_are_an_error() -> None:
    class Lazy(MultiAgentNetBase):
        def _build_single_net(self, *, device: Any, **_: Any) -> Any:
            return nn.LazyBatchNorm1d(device=device)

    with pytest.raises(ValueError, match="LazyBatchNorm1d has lazy parameters"):
        Lazy(n_agents=2, centralised=False, share_params=False)


def test_hooks_on_layers_are_called() -> None:
    net = network(False, False)
    calls = []
    net.net[1].register_forward_hook(lambda *args: calls.append("layer"))
    net(torch.zeros(N, INPUTS))
    net.net.register_forward_hook(lambda *args: calls.append("net"))
    net(torch.zeros(N, INPUTS))
    assert calls == ["layer", "layer", "net"]


def conv(
    centralised: bool, share_params: bool, in_features: int | None = 2, **options: Any
) -> Any:
    layers = {"num_cells": [4, 6], "kernel_sizes": [3, (2, 3)], "strides": 1}
    return MultiAgentConvNet(
        N,
        centralised=centralised,
        share_params=share_params,
        in_features=in_features,
        **(layers | options),  # type: ignore[arg-type]
    )


def both(centralised: bool, share_params: bool, **options: Any) -> tuple[Any, Any]:
    """Return networks with the same weights that compute in float32 and bfloat16."""
    net = conv(centralised, share_params, **options)
    other = conv(centralised, share_params, dtype=torch.bfloat16, **options)
    other.load_state_dict(net.state_dict())
    return net, other


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((value - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize(("centralised", "share_params"), SETUPS)
@pytest.mark.parametrize("norm_class", [None, nn.GroupNorm])
def test_bfloat16_computes_the_features_of_float32_up_to_rounding(
    centralised: bool, share_params: bool, norm_class: Any
) -> None:
    torch.manual_seed(0)
    norm = {"num_groups": 2, "num_channels": 4} if norm_class else None
    options = {"num_cells": [4, 4], "norm_class": norm_class, "norm_kwargs": norm}
    net, other = both(centralised, share_params, **options)
    x = torch.rand(16, N, 2, 7, 8)
    outputs = [net(x), other(x)]
    weights = torch.rand_like(outputs[0])
    gradients = []
    for out, computed in zip(outputs, (net, other), strict=True):
        (out * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in computed.parameters()]))

    # bfloat16 has 8 significant bits.
    for values in (outputs, gradients):
        assert values[1].dtype == torch.float32
        assert values[1].isfinite().all()
        assert 0 < relative(values[1], values[0]) < 0.02
    assert {p.dtype for p in other.parameters()} == {torch.float32}


def test_bfloat16_is_shown_and_has_the_shapes_of_float32_on_meta() -> None:
    net, other = both(False, True)
    x = torch.rand(5, N, 2, 7, 8)
    assert other.to("meta")(x.to("meta")).shape == net(x).shape
    assert "dtype=torch.bfloat16" in repr(other)
    assert "dtype" not in repr(net)


def test_categories_count_from_the_start_of_their_space() -> None:
    space = spaces.Tuple(
        [spaces.Discrete(3, start=10), spaces.Discrete(2), spaces.Discrete(2, start=-1)]
    )
    net = VectorInput(observation_leaves(space, ("agent", "observation")))
    features = net(torch.tensor([10, 12]), torch.tensor([1, 0]), torch.tensor([-1, 0]))
    assert features.tolist() == [[1, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_are_rounded_once_in_either_order_of_memory(dtype: torch.dtype) -> None:
    """By default channels are last in memory, so that convolutions are faster."""
    image = torch.randint(0, 256, (2, 30, 31, 3), dtype=torch.uint8)
    out = ImageInput(dtype=dtype)(image)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(out, (image.movedim(-1, -3) / 255).to(dtype))
    assert torch.equal(ImageInput(dtype=dtype, channels_last=False)(out), out)
    other = ImageInput(dtype=dtype, memory_format=torch.contiguous_format)(image)
    assert other.is_contiguous()
    assert torch.equal(other, out)


def test_loc_scale_equals_tensordicts_extractor() -> None:
    x = torch.randn(5, 2, 8)
    with torch.device("meta"):
        ours = LocScale()
    for actual, expected in zip(ours(x), NormalParamExtractor()(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert ours(torch.zeros(2))[1] == pytest.approx(1.0)


AGENTS, FEATURES, OUT = 4, 5, 3
DOUBLE = torch.float64


def attending(share_params: bool = True, **options: Any) -> Any:
    defaults: dict[str, Any] = {"num_cells": [7, 6], "num_heads": 2, "absent": -1}
    defaults |= {"centralised": True, "share_params": share_params}
    return MultiAgentAttention(FEATURES, OUT, AGENTS, **(defaults | options)).double()


def inputs(*absent: int, rows: int = 3) -> Tensor:
    x = torch.randn(
        rows, AGENTS, FEATURES, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)
    )
    x[..., -1] = 0
    x[:, list(absent), -1] = 1
    return x


def dense(layers: Any, x: Tensor, agent: int, present: list[int], heads: int) -> Tensor:
    """Outputs of one agent of one row ``[AGENTS, F]``, with torch's attention."""
    encode, project, decode = layers
    seen = sorted({agent, *present})
    codes = encode(x[seen])
    queries, keys, contents = (
        part.unflatten(-1, (heads, -1)).transpose(0, 1)
        for part in project(codes).chunk(3, -1)
    )
    attended = F.scaled_dot_product_attention(queries, keys, contents)
    own = seen.index(agent)
    out: Tensor = decode(torch.cat([codes[own], attended[:, own].flatten()]))
    return out


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("share_params", [True, False])
@pytest.mark.parametrize("absent", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_it_equals_a_dense_computation_without_the_absent_agents(
    absent: tuple[int, ...], share_params: bool, heads: int
) -> None:
    net, x = attending(share_params, num_heads=heads), inputs(*absent)
    out = net(x)
    present = [i for i in range(AGENTS) if i not in absent]
    for agent in range(AGENTS):
        layers = net.get_stateful_net(None if share_params else agent)
        for row in range(len(x)):
            expected = dense(layers, x[row], agent, present, heads)
            torch.testing.assert_close(out[row, agent], expected)


# In policies and critics


OPTIONS: dict[str, Any] = {"network": "attention", "centralised": True}
HUNTERS = partial(CountingEnv, n_prey=0)


@pytest.mark.parametrize("share_params", [True, False])
def test_collectors_act_with_it_as_the_module_does(share_params: bool) -> None:
    """Also with its recorded operations, which replace the module's calls."""
    policy = make_policy(
        HUNTERS().description, device="meta", share_params=share_params, **OPTIONS
    )
    with Collector(HUNTERS, policy, frames_per_batch=60, total_frames=120) as collector:
        for batch in collector:
            again = copy.deepcopy(collector.policy)(batch.clone())
            logits = ("hunter", "logits")
            torch.testing.assert_close(batch[logits], again[logits])
