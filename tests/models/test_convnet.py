"""Pictures: ``MultiAgentConvNet`` equals separate networks, and adapters of inputs."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from model_tools import SETUPS
from tensordict.nn import NormalParamExtractor
from torch import nn

from marl_collect.models import ImageInput, LocScale, MultiAgentConvNet
from marl_collect.models.layers.inputs import VectorInput, observation_leaves

N = 3


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


def test_group_norm_is_applied_per_agent() -> None:
    net = MultiAgentConvNet(
        N,
        centralised=False,
        share_params=False,
        in_features=2,
        num_cells=[4],
        norm_class=nn.GroupNorm,
        norm_kwargs={"num_groups": 2, "num_channels": 4},
    )
    x = torch.randn(6, N, 2, 9, 9)
    expected = [net.get_stateful_net(i)(x[:, i]) for i in range(N)]
    torch.testing.assert_close(net(x), torch.stack(expected, 1))


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
    for out, network in zip(outputs, (net, other), strict=True):
        (out * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters()]))

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
