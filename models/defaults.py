"""Builds and trains networks apart from torch's default dtype and device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_on(device: torch.device | str) -> Iterator[None]:
    """Create tensors in float32 on a device, whatever torch's defaults are.

    Networks of an environment's spaces read their inputs as float32.
    ``torch.set_default_dtype`` would give them other weights.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        # A device that is set costs time in every call of torch.
        if torch.get_default_device() == torch.device(device):
            yield
        else:
            with torch.device(device):
                yield
    finally:
        torch.set_default_dtype(before)
