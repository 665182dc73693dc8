"""Computes apart from the dtype, device and number of threads that a user has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_on(device: torch.device | str) -> Iterator[None]:
    """Create tensors in float32 on a device, whatever torch's defaults are.

    Observations and rewards are float32 or converted to it, so specs and networks that
    belong to an environment are float32 too.
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


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Compute with a number of torch threads; None keeps the user's.

    Threads wait for each other in a loop. If there are fewer free processors than
    threads, as with a quota of a container, that takes far longer than the computing.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
