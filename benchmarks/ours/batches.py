"""Measures an iterator of batches, ours or TorchRL's: every byte of them is read."""

from collections.abc import Iterator
from typing import Any

import torch
from harness.windows import Measure, measure_parts

WARM_UP = 2
_WORD = 8


def measure_batches(batches: Iterator[Any], ahead: int = 0) -> Measure:
    """Return a measure of batches ``[B, T]`` or flat ones, with ``"next", "done"``.

    Args:
        batches: endless.
        ahead: how many batches a worker may have collected while another one was
            reset: these do not count as lying between resets either.
    """
    for _ in range(WARM_UP):  # What is allocated or imported late is not measured.
        next(batches)
    pending = False
    disturbed = 0

    def part() -> tuple[int, int, bool]:
        nonlocal pending, disturbed
        batch = next(batches)
        read(batch)
        dones = batch["next", "done"]
        episodes = int(dones.sum())
        # The reset after a last frame that is done belongs to the next batch.
        reset = pending or episodes > 0
        pending = episodes > 0 and bool(
            dones.reshape(-1)[-1] or dones[..., -1, :].any()
        )
        if reset:
            disturbed = ahead
        elif disturbed:
            disturbed -= 1
            reset = True
        return batch.numel(), episodes, reset

    return measure_parts(part)


def read(batch: Any) -> None:
    """Read every byte, as a learner would: what is lazy is done inside the timing."""
    for tensor in batch.values(include_nested=True, leaves_only=True):
        _words(tensor).sum()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as eight-byte words, which are summed fastest."""
    if not tensor.is_contiguous() or tensor.nbytes % _WORD:
        return tensor
    flat = tensor.view(-1)
    offset = flat.storage_offset() * flat.element_size()
    return tensor if offset % _WORD else flat.view(torch.int64)
