"""The presets of ``conv``: a gradient step, and acting.

Alternatives are float32, bfloat16, and float32 with the channels first in memory.

Pictures are those of MeltingPot, 88 x 88 x 3 bytes. Acting takes 16 of them at a time,
as for 8 environments with 2 players each, a gradient step 400. The size is that of the
tensors which the backward pass needs.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from harness.turns import Alternative
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from cases.case import Case
from marl_collect.models import MultiAgentConvNet
from marl_collect.models.layers.inputs import ImageInput
from marl_collect.training.allocator import keep_freed_memory
from marl_collect.training.convolutions import CONVOLUTIONS, layers

ROWS = {"acting": 16, "gradient step": 400}
LAST, FIRST = torch.preserve_format, torch.contiguous_format


def calls(
    preset: str, task: str, dtype: torch.dtype, memory_format: torch.memory_format
) -> Alternative:
    """Return the forward pass, with the backward pass for a gradient step."""
    arguments: dict[str, Any] = {"dtype": dtype, **layers(preset)}
    conv = MultiAgentConvNet(1, False, True, in_features=3, **arguments)
    image = ImageInput(dtype=dtype, memory_format=memory_format)
    net = nn.Sequential(image, conv)
    pictures = torch.randint(0, 256, (ROWS[task], 1, 88, 88, 3), dtype=torch.uint8)
    if task == "acting":

        def act() -> None:
            with torch.no_grad():
                net(pictures)

        return Alternative.once(act)

    def step() -> None:
        net.zero_grad()
        net(pictures).square().mean().backward()

    size = saved(net, pictures)
    return Alternative(Alternative.once(step).call, nbytes=lambda: size)


def saved(net: nn.Module, pictures: Tensor) -> int:
    """Return the bytes of the tensors that the backward pass needs."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(pictures)
    return sum(storages.values())


def build(_: ExitStack, preset: str, task: str) -> dict[str, Alternative]:
    """Return the alternatives."""
    keep_freed_memory()
    return {
        "float32": calls(preset, task, torch.float32, LAST),
        "bfloat16": calls(preset, task, torch.bfloat16, LAST),
        "channels first": calls(preset, task, torch.float32, FIRST),
    }


def cases() -> list[Case]:
    """Return two rows per preset: acting and training."""
    return [
        Case(f"{preset}, {task}", partial(build, preset=preset, task=task), per="ms")
        for preset in CONVOLUTIONS
        for task in ROWS
    ]
