"""Transfers between the CPU and a policy on another device.

The inputs of the policy are contiguous in one pinned buffer, so each frame takes a
single asynchronous copy to the device. Outputs are copied back to pinned memory
asynchronously. The frame ends with one synchronisation.
"""

from collections.abc import Sequence
from typing import final

import torch

from marl_collect.core.description import places
from marl_collect.core.device_check import host_memory, pins


def transfer_device(device: torch.device | None) -> torch.device | None:
    """Return the device to copy to and from; None for a policy on the CPU."""
    return None if device is None or device.type == "cpu" else device


@final
class Exchange:
    """Copies a policy's inputs to its device, and its outputs back.

    Attributes:
        inputs: tensors on the device, which ``send`` fills.
    """

    def __init__(self, sources: Sequence[torch.Tensor], device: torch.device) -> None:
        """Prepare to copy ``sources``, whose memory stays the same.

        Args:
            sources: the policy's inputs on the CPU.
            device: device of the policy.
        """
        self._sources = list(sources)
        self._device = device
        *offsets, size = places(source.nbytes for source in self._sources)
        self._here = host_memory(size, device)
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        pairs = list(zip(self._sources, offsets, strict=True))
        self._staged = [_at(self._here, o, source) for source, o in pairs]
        self.inputs = [_at(self._there, o, source) for source, o in pairs]
        self._landed: list[torch.Tensor] = []

    def send(self) -> None:
        """Start copying the current inputs to the device."""
        for staged, source in zip(self._staged, self._sources, strict=True):
            staged.copy_(source)
        self._there.copy_(self._here, non_blocking=True)

    def receive(
        self, values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> None:
        """Copy outputs from the device to ``targets``, and wait for the copies.

        Args:
            values: the policy's outputs on the device.
            targets: tensors on the CPU.
        """
        if not self._landed:
            self._landed = [
                torch.empty_like(value, device="cpu", pin_memory=pins(self._device))
                for value in values
            ]
        for landed, value in zip(self._landed, values, strict=True):
            landed.copy_(value, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for target, landed in zip(targets, self._landed, strict=True):
            target.copy_(landed)


def _at(memory: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    piece = memory[offset : offset + like.nbytes]
    return piece.view(like.dtype).view(like.shape)
