"""Copies of tensors into fixed places, without torch where both are in this memory.

A call of torch costs more than the copy of a small tensor, and several times what one
of numpy costs; Python's own memoryview costs least. For a policy of six small tensors
these calls are most of an update.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, final

import torch

# Bytes. Other threads wait while a memoryview copies, and do not while numpy does: this
# many take some 0.1 ms, far less than the 5 ms that Python lets a thread run anyway.
_SMALL = 1 << 20

# An array of bytes, or a memoryview: both take `target[:] = source`, from their kind.
_Bytes = Any
_ADDRESS = torch.Tensor.data_ptr
_CONTIGUOUS = torch.Tensor.is_contiguous


@final
class WeightCopies:
    """Writes tensors into places that stay the same, again and again."""

    def __init__(self, names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
        """Write into ``targets``, contiguous tensors of this process' memory.

        Args:
            names: of the targets, for messages.
            targets: where the tensors are written.
        """
        self._names = tuple(names)
        self._targets = list(targets)
        self._to = [_as_bytes(target) for target in targets]
        # Of last time; None where a tensor is not plain bytes in this memory.
        self._seen: list[torch.Tensor | None] = [None] * len(self._to)
        self._addresses = [0] * len(self._to)
        self._from: list[_Bytes | None] = [None] * len(self._to)
        # Where bytes go and come from; whether all tensors are among them.
        self._pairs: list[tuple[_Bytes, _Bytes]] = []
        self._all_paired = False

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write one tensor to each place.

        Args:
            tensors: as many, of the same shapes, on any device; other dtypes are
                converted.

        Raises:
            ValueError: naming the tensor whose shape is another.
        """
        # The same memory as last time, unless some `tensor.data` was replaced.
        if not (
            self._all_paired
            and all(map(is_, tensors, self._seen))
            and list(map(_ADDRESS, tensors)) == self._addresses
            # `tensor.data` may be another view of the same memory.
            and all(map(_CONTIGUOUS, tensors))
        ):
            self._look_at_all(tensors)
        # All fit, so that none is written where one does not.
        for target, source in self._pairs:
            target[:] = source
        if not self._all_paired:
            for index, found in enumerate(self._from):
                if found is None:
                    self._targets[index].copy_(tensors[index].detach())

    def _look_at_all(self, tensors: Sequence[torch.Tensor]) -> None:
        self._all_paired = False  # Where one does not fit, the pairs stay incomplete.
        for index, tensor in enumerate(tensors):
            self._look_at(index, tensor)
        both = zip(self._to, self._from, strict=True)
        self._pairs = [(to, source) for to, source in both if source is not None]
        self._all_paired = len(self._pairs) == len(self._to)

    def _look_at(self, index: int, tensor: torch.Tensor) -> None:
        target = self._targets[index]
        if tensor.shape != target.shape:
            raise ValueError(
                f"The weights of {self._names[index]!r} must have shape "
                f"{tuple(target.shape)}, but have {tuple(tensor.shape)}."
            )
        # Anything else goes through torch and is checked again each time.
        plain = (
            tensor.device.type == "cpu"
            and tensor.dtype == target.dtype
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
        )
        self._seen[index] = tensor if plain else None
        self._from[index] = _as_bytes(tensor) if plain else None
        self._addresses[index] = _ADDRESS(tensor) if plain else 0


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    # numpy does not know every dtype of torch, but bytes.
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if array.nbytes <= _SMALL else array
