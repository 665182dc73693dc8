"""Adapters before and after a network: vectors, images, means and deviations."""

import pytest
import torch
from gymnasium import spaces
from tensordict.nn import NormalParamExtractor

from marl_collect.models import ImageInput, LocScale
from marl_collect.models.layers.inputs import VectorInput, observation_leaves


def test_categories_count_from_the_start_of_their_space() -> None:
    space = spaces.Tuple(
        [spaces.Discrete(3, start=10), spaces.Discrete(2), spaces.Discrete(2, start=-1)]
    )
    net = VectorInput(observation_leaves(space, ("agent", "observation")))
    features = net(torch.tensor([10, 12]), torch.tensor([1, 0]), torch.tensor([-1, 0]))
    assert features.tolist() == [[1, 0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 0, 0, 1]]


def test_images_become_floats_with_channels_first() -> None:
    image = torch.zeros(2, 3, 4, 5, 3, dtype=torch.uint8)
    image[..., 1] = 255
    out = ImageInput(channels_last=True)(image)
    assert out.shape == (2, 3, 3, 4, 5)
    assert out.dtype == torch.float32
    assert out[:, :, 1].min() == 1
    assert out[:, :, 0].max() == 0
    assert torch.equal(ImageInput(channels_last=False)(out), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_keep_the_channels_last_in_memory(dtype: torch.dtype) -> None:
    """Convolutions are faster with them."""
    image = torch.zeros(2, 30, 31, 3, dtype=torch.uint8)
    out = ImageInput(dtype=dtype)(image)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_images_can_be_made_contiguous() -> None:
    image = torch.randint(0, 256, (2, 30, 31, 3), dtype=torch.uint8)
    out = ImageInput(memory_format=torch.contiguous_format)(image)
    assert out.is_contiguous()
    assert torch.equal(out, ImageInput()(image))


def test_images_of_bfloat16_are_rounded_once() -> None:
    image = torch.randint(0, 256, (2, 30, 31, 3), dtype=torch.uint8)
    out = ImageInput(dtype=torch.bfloat16)(image)
    assert torch.equal(out, (image.movedim(-1, -3) / 255).bfloat16())


def test_loc_scale_equals_tensordicts_extractor() -> None:
    x = torch.randn(5, 2, 8)
    with torch.device("meta"):
        ours = LocScale()
    for actual, expected in zip(ours(x), NormalParamExtractor()(x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert ours(torch.zeros(2))[1] == pytest.approx(1.0)
