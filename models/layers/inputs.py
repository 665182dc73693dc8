"""Adapters before a network (vectors, images) and after it (means and deviations)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_collect.core.description import leaf_spaces

MIN_SCALE = 0.01
"""Below this no standard deviation of a policy is."""
_SOFTPLUS_SHIFT = math.log(math.expm1(1 - MIN_SCALE))
# Three convolutions of MultiAgentConvNet need at least this many pixels per side.
_SMALLEST_IMAGE = 29


@final
class LocScale(nn.Module):
    """Splits a network's outputs into means and standard deviations.

    The standard deviation is ``softplus(x + c) + MIN_SCALE``. The constant ``c`` is
    such that an output of 0 gives 1. tensordict's ``NormalParamExtractor`` computes the
    same, but cannot be built on meta.
    """

    pure_forward = True
    by_row = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``[*, 2 k]`` to ``loc`` and ``scale``, ``[*, k]`` each."""
        loc, raw = x.chunk(2, -1)
        return loc, F.softplus(raw + _SOFTPLUS_SHIFT) + MIN_SCALE

    @staticmethod
    def output_of(scale: float) -> float:
        """Return the output that gives a standard deviation above ``MIN_SCALE``."""
        return math.log(math.expm1(scale - MIN_SCALE)) - _SOFTPLUS_SHIFT


@dataclass(frozen=True)
class Leaf:
    """One array of a group's observation.

    Attributes:
        key: key in a batch, a tuple.
        shape: shape of one agent's array.
        kind: how a network reads it: as numbers, as an image, or as one of ``size``
            categories.
        size: number of features; for images, number of channels.
        channels_last: whether an image is ``[height, width, channels]``.
        is_plain: whether it is a float32 vector.
        start: value of the first category.
        stacked: whether an image has a first dimension of frames, whose channels are
            joined.
    """

    key: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Literal["vector", "image", "category"]
    size: int
    channels_last: bool = False
    is_plain: bool = False
    start: int = 0
    stacked: bool = False


def observation_leaves(space: spaces.Space[Any], key: tuple[str, ...]) -> list[Leaf]:
    """List the arrays of an observation space, in the order of its keys.

    An array of three dimensions is an image if its sides have at least 29 pixels;
    smaller ones are read as numbers. Of its first and last dimension, the smaller one
    contains the channels. An array of four dimensions is a stack of such images.

    Raises:
        TypeError: for a space that no network of this package supports.
    """
    leaves = [_leaf(leaf, path) for path, leaf in leaf_spaces(space, key)]
    if not any(leaf.size for leaf in leaves):
        raise TypeError(
            f"There is no network for {'/'.join(key)}, which is empty: its space is "
            f"{space}. An action mask is not part of it: to observe a mask, build the "
            "environment with action_mask=None. agent_ids=True adds an observation too."
        )
    return leaves


def _leaf(space: spaces.Space[Any], key: tuple[str, ...]) -> Leaf:
    if isinstance(space, spaces.Discrete):
        return Leaf(key, (), "category", int(space.n), start=int(space.start))
    if not isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        raise TypeError(
            f"There is no network for the observation {'/'.join(key)} with the space "
            f"{space}: expected Box, Discrete, MultiDiscrete, MultiBinary, or Dict and "
            "Tuple of these. Build the policy by hand from your own network and a head."
        )
    shape = tuple(int(n) for n in space.shape)
    size = int(np.prod(shape, dtype=np.int64))
    if len(shape) in (3, 4):
        image = shape[-3:]
        channels_last = image[2] <= image[0]
        sides = image[:2] if channels_last else image[1:]
        if min(sides) >= _SMALLEST_IMAGE:
            channels = size // (sides[0] * sides[1])
            return Leaf(
                key, shape, "image", channels, channels_last, stacked=len(shape) == 4
            )
    plain = len(shape) == 1 and space.dtype == np.float32
    return Leaf(key, shape, "vector", size, is_plain=plain)


@final
class VectorInput(nn.Module):
    """Concatenates arrays as features, float32.

    Args:
        leaves: the arrays, in the order of the inputs; no images.
    """

    pure_forward = True
    by_row = True

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        super().__init__()
        self.leaves = tuple(leaves)
        self.n_features = sum(leaf.size for leaf in leaves)

    def forward(self, *values: Tensor) -> Tensor:
        """Map arrays ``[*B, n_agents, *shape]`` to ``[*B, n_agents, n_features]``."""
        pairs = zip(self.leaves, values, strict=True)
        features = [self._features(leaf, value) for leaf, value in pairs]
        return features[0] if len(features) == 1 else torch.cat(features, -1)

    def _features(self, leaf: Leaf, value: Tensor) -> Tensor:
        if leaf.kind == "category":
            # F.one_hot() checks the values, for which it waits for the device.
            end = leaf.start + leaf.size
            numbers = torch.arange(leaf.start, end, device=value.device)
            return (value.unsqueeze(-1) == numbers).float()
        if not leaf.shape:
            value = value.unsqueeze(-1)
        elif len(leaf.shape) > 1:
            value = value.flatten(-len(leaf.shape))
        return value.float()

    @override
    def extra_repr(self) -> str:
        return f"{['/'.join(leaf.key) for leaf in self.leaves]}"


@final
class ImageInput(nn.Module):
    """Converts images for convolutions: floating point, channels first.

    Integers are divided by 255.

    Args:
        channels_last: whether the images are ``[height, width, channels]``.
        dtype: dtype of the result.
        stacked: whether there is a dimension of frames before each image.
        memory_format: of the converted integers. By default images with the channels
            last keep this order in memory, which suits convolutions that all agents
            share. Convolutions per agent are faster on contiguous images, because they
            join the images of all agents, and so are stacks.
    """

    pure_forward = True
    by_row = True

    def __init__(
        self,
        *,
        channels_last: bool = True,
        dtype: torch.dtype = torch.float32,
        stacked: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.dtype = dtype
        self.stacked = stacked
        self.memory_format = memory_format

    def forward(self, image: Tensor) -> Tensor:
        """Map ``[*, height, width, channels]`` to ``[*, channels, height, width]``.

        The channels of stacked images are joined: ``[*, frames * channels, ...]``.
        """
        if self.channels_last:
            image = image.movedim(-1, -3)
        if image.dtype.is_floating_point:
            image = image.to(self.dtype)
        else:
            image = image.to(self.dtype, memory_format=self.memory_format).div_(255)
        return image.flatten(-4, -3) if self.stacked else image

    @override
    def extra_repr(self) -> str:
        return f"channels_last={self.channels_last}"
