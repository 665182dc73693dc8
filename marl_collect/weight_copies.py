"""Copies of tensors into fixed places, by numpy where both are in this memory.

A call of torch costs more than the copy of a small tensor, and several times what one
of numpy costs: for a policy of six small tensors that is most of an update.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]


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
        self._seen: list[torch.Tensor | None] = [None] * len(self._to)
        self._addresses = [0] * len(self._to)
        self._from: list[_Bytes | None] = [None] * len(self._to)

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write one tensor to each place.

        Args:
            tensors: as many, of the same shapes, on any device; other dtypes are
                converted.

        Raises:
            ValueError: naming the tensor whose shape is another.
        """
        for index, tensor in enumerate(tensors):
            # The same memory as last time, unless `tensor.data` was replaced.
            if tensor is not self._seen[index] or (
                tensor.data_ptr() != self._addresses[index]
            ):
                self._look_at(index, tensor)
        # All fit, so that none is written where one does not.
        for index, source in enumerate(self._from):
            if source is None:
                self._targets[index].copy_(tensors[index].detach())
            else:
                np.copyto(self._to[index], source)

    def _look_at(self, index: int, tensor: torch.Tensor) -> None:
        target = self._targets[index]
        if tensor.shape != target.shape:
            raise ValueError(
                f"The weights of {self._names[index]!r} must have shape "
                f"{tuple(target.shape)}, but have {tuple(tensor.shape)}."
            )
        # Anything else goes through torch, and is looked at anew each time.
        plain = (
            tensor.device.type == "cpu"
            and tensor.dtype == target.dtype
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
        )
        self._seen[index] = tensor if plain else None
        self._from[index] = _as_bytes(tensor) if plain else None
        self._addresses[index] = tensor.data_ptr() if plain else 0


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    # numpy does not know every dtype of torch, but bytes.
    array: _Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array
