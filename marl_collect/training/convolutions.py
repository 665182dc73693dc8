"""The setting ``conv``: presets, layers as text, and the arguments of networks.

Sources:
    nature: Mnih et al., "Human-level control through deep reinforcement learning",
    Nature 518.
"""

import re
from collections.abc import Mapping
from typing import Final

from marl_collect.core.description import EnvDescription
from marl_collect.models.layers.inputs import Leaf, observation_leaves

AUTO: Final = "auto"
SPRITE: Final = 8
"""Pixels of a side of a cell of MeltingPot's maps."""
CONVOLUTIONS: Final[Mapping[str, str]] = {
    "sprites": "16k8s8,32k3s1",
    "three": "32k5s2,32k5s2,32k5s2",
    "nature": "32k8s4,64k4s2,64k3s1",
}
"""Presets. ``16k8s8`` is a layer of 16 channels, with kernels of 8 x 8 and stride 8."""
_LAYER = re.compile(r"([1-9]\d*)k([1-9]\d*)s([1-9]\d*)")


def layers(setting: str) -> dict[str, list[int]]:
    """Return the arguments of ``MultiAgentConvNet`` for a preset or layers.

    Raises:
        ValueError: for anything else; says what is expected.
    """
    parts = CONVOLUTIONS.get(setting, setting).split(",")
    matches = [_LAYER.fullmatch(part.strip()) for part in parts]
    numbers = [tuple(map(int, match.groups())) for match in matches if match]
    if len(numbers) < len(parts):
        raise ValueError(
            f"conv is {setting!r}: expected {AUTO}, {', '.join(CONVOLUTIONS)}, or "
            "layers such as 16k8s8,32k3s1 (channels, kernel, stride)."
        )
    names = ("num_cells", "kernel_sizes", "strides")
    return dict(zip(names, map(list, zip(*numbers, strict=True)), strict=True))


def pictures(description: EnvDescription) -> list[Leaf]:
    """Return the arrays of the observations that go through convolutions."""
    return [
        leaf
        for name, group in description.groups.items()
        for leaf in observation_leaves(group.observation, (name, "observation"))
        if leaf.kind == "image"
    ]


def convolutions(setting: str, description: EnvDescription) -> dict[str, list[int]]:
    """Return the convolutions for the pictures of an environment.

    ``"auto"`` is ``"sprites"`` if the sides of all pictures are multiples of 8 pixels,
    and ``"three"`` otherwise.

    Raises:
        ValueError: if a picture is too small for the layers.
    """
    sides = {size for leaf in pictures(description) for size in _sides(leaf)}
    if setting == AUTO:
        whole = all(size % SPRITE == 0 for size in sides)
        setting = "sprites" if whole else "three"
    arguments = layers(setting)
    smallest = size = min(sides, default=0)
    for kernel, stride in zip(
        arguments["kernel_sizes"], arguments["strides"], strict=True
    ):
        size = (size - kernel) // stride + 1
        if sides and size < 1:
            raise ValueError(
                f"conv is {setting!r}, whose layers need larger pictures than those of "
                f"{description.name}: the smallest side has {smallest} pixels. Use "
                "fewer layers, or smaller kernels."
            )
    return arguments


def _sides(leaf: Leaf) -> tuple[int, ...]:
    image = leaf.shape[-3:]
    return image[:2] if leaf.channels_last else image[1:]
