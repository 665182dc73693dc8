"""Lets checks of values, and what depends on them, run without Python.

``project`` of TorchRL's bounded specs reads in Python whether a value is within its
bounds, and clamps it only if it is not. With noise the answer differs from frame to
frame, so no recording would stay valid. Clamping a value that is within its bounds does
not change it.

``torch.nn.functional.one_hot`` reads the smallest and the largest index to check them.
Both differ from frame to frame. ``scatter_``, which writes the ones, checks the indices
itself.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SPECS = "torchrl.data.tensor_specs"
_LOCK = threading.RLock()  # Two threads at once would restore each other's function.


@contextmanager
def without_branches() -> Iterator[None]:
    """Clamp and encode without branches in this thread while this context is open."""
    with _UncheckedOneHot(), _unconditional_clamps():
        yield


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:  # noqa: A002 - torch's name
    if num_classes < 0:
        return torch.nn.functional.one_hot(input)
    zeros = input.new_zeros((*input.shape, num_classes))
    return zeros.scatter_(-1, input.unsqueeze(-1), 1)


class _UncheckedOneHot(TorchFunctionMode):
    """Encodes indices without reading them in Python."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace ``one_hot``."""
        del types
        if func is torch.nn.functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def _unconditional_clamps() -> Iterator[None]:
    specs = sys.modules.get(SPECS)
    if specs is None:  # No module of the policy can have a spec.
        yield
        return
    bounded: Any = specs.Bounded
    thread = threading.get_ident()
    with _LOCK:
        replaced, original = vars(bounded).get("project"), bounded.project

        def project(spec: Any, value: Any) -> Any:
            if threading.get_ident() != thread:
                return original(spec, value)
            return spec._project(value)  # noqa: SLF001

        bounded.project = project
        try:
            yield
        finally:
            if replaced is None:
                del bounded.project
            else:
                bounded.project = replaced
