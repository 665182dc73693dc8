"""Devices that users name, and memory of the host for copies to and from devices."""

from typing import Any

import torch


def pins(device: torch.device) -> bool:
    """Return whether memory is pinned for copies from or to ``device``."""
    return device.type == "cuda"


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory of the host for copies from or to ``device``.

    Args:
        nbytes: its size.
        device: of the other side.

    Returns:
        uint8 ``[nbytes]``, in pinned memory for a GPU.
    """
    pinned = nbytes > 0 and pins(device)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def usable_device(name: str, choice: Any, *, here: bool = True) -> torch.device:
    """Return the device that a user has chosen.

    Args:
        name: of the argument.
        choice: a device or its name, such as ``"cuda:0"``.
        here: whether it is used on this machine, which may have fewer GPUs than others.

    Raises:
        ValueError: if it is no device, holds no data, or does not exist here.
    """
    try:
        device = torch.device(choice)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{name} must be a device such as 'cpu' or 'cuda:0', but is {choice!r}."
        ) from error
    if device.type == "meta":
        raise ValueError(f"{name} is 'meta', which holds no data: use 'cpu'.")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"{name} is {choice}, but torch finds no GPU: use 'cpu', or install "
                "torch with CUDA."
            )
        count = torch.cuda.device_count()
        if here and (device.index or 0) >= count:
            raise ValueError(
                f"{name} is {choice}, but torch finds GPUs 0 to {count - 1} only."
            )
    return device
