"""The modes of autograd in which environments and policies are called."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_MESSAGES = ("does not require grad", "not have been used in the graph")
"""Parts of torch's messages when autograd finds no history."""


@contextmanager
def without_gradients() -> Iterator[None]:
    """Disable autograd; note so on an error that this causes."""
    with torch.no_grad():
        try:
            yield
        except RuntimeError as error:
            note_on_gradients(error)
            raise


def recording_writes() -> AbstractContextManager[object]:
    """Leave ``torch.inference_mode`` where memory is created that lasts.

    New tensors of this mode cannot be written outside of it, and torch does not count
    what is written to them.
    """
    return (
        torch.inference_mode(False)
        if torch.is_inference_mode_enabled()
        else nullcontext()
    )


def note_on_gradients(error: BaseException) -> None:
    """Add what to do to an error of code that needs autograd, where it is disabled."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error
        return
    if any(message in text for message in _MESSAGES):
        error.add_note(
            "Environments and policies are called without autograd while frames are "
            "collected. Code that computes gradients, in step() for example, needs "
            "`with torch.enable_grad():`, or the decorator @torch.enable_grad()."
        )
