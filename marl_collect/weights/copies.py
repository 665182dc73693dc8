"""Copies tensors into fixed places, without torch if both are in CPU memory.

A torch call takes longer than the copy of a small tensor, and several times as long as
a numpy call. A memoryview is the fastest. For a policy of six small tensors these calls
are most of the time of an update.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, final

import torch

# In bytes. A memoryview holds the interpreter lock while it copies; numpy releases it.
# This size takes about 0.1 ms, far less than Python's switch interval of 5 ms.
_SMALL = 1 << 20

# An array of bytes or a memoryview. `target[:] = source` works between equal types.
_Bytes = Any
_ADDRESS = torch.Tensor.data_ptr
_CONTIGUOUS = torch.Tensor.is_contiguous


@final
class WeightCopies:
    """Writes tensors repeatedly into the same places."""

    def __init__(self, names: Sequence[str], targets: Sequence[torch.Tensor]) -> None:
        """Prepare the copies.

        Args:
            names: of the targets, for error messages.
            targets: contiguous CPU tensors that are written to.
        """
        self._names = tuple(names)
        self._targets = list(targets)
        self._to = [_as_bytes(target) for target in targets]
        # The sources of the last write. None if a tensor cannot be copied as bytes.
        self._seen: list[torch.Tensor | None] = [None] * len(self._to)
        self._addresses = [0] * len(self._to)
        self._from: list[_Bytes | None] = [None] * len(self._to)
        # Targets and sources that are copied as bytes; whether these are all tensors.
        self._pairs: list[tuple[_Bytes, _Bytes]] = []
        self._all_paired = False

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write one tensor to each place, or none if a shape is wrong.

        Args:
            tensors: one per target, of its shape, on any device. Other dtypes are
                converted.

        Raises:
            ValueError: if a tensor has another shape than its target; it is named.
        """
        # Equal tensors have the same memory as in the last call, unless `tensor.data`
        # was replaced.
        if not (
            self._all_paired
            and all(map(is_, tensors, self._seen))
            and list(map(_ADDRESS, tensors)) == self._addresses
            # `tensor.data` may be another view of the same memory.
            and all(map(_CONTIGUOUS, tensors))
        ):
            self._find_sources(tensors)
        # All shapes have been checked. If one is wrong, nothing is written.
        for target, source in self._pairs:
            target[:] = source
        if not self._all_paired:
            for index, found in enumerate(self._from):
                if found is None:
                    self._targets[index].copy_(tensors[index].detach())

    def _find_sources(self, tensors: Sequence[torch.Tensor]) -> None:
        self._all_paired = False  # It stays False if a check raises an error.
        for index, tensor in enumerate(tensors):
            self._find_source(index, tensor)
        both = zip(self._to, self._from, strict=True)
        self._pairs = [(to, source) for to, source in both if source is not None]
        self._all_paired = len(self._pairs) == len(self._to)

    def _find_source(self, index: int, tensor: torch.Tensor) -> None:
        target = self._targets[index]
        if tensor.shape != target.shape:
            raise ValueError(
                f"The weights of {self._names[index]!r} must have shape "
                f"{tuple(target.shape)}, but have {tuple(tensor.shape)}."
            )
        # Other tensors are copied by torch and checked at every write.
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
    # As uint8, because numpy does not have all dtypes of torch.
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if array.nbytes <= _SMALL else array
