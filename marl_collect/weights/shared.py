"""The shared memory that carries policy weights to the workers.

A vector has the bytes of all tensors of a policy. The trainer writes it to slots, and
the tensors of a worker's module are views of the worker's own vector:

    trainer                                        worker
    slot = write(tensors, used)
    Weights(slot, handle) ------------------------>  mapped(handle), once
                                                     copy it to the vector
    the slot is free again  <-- WEIGHTS_READ ----

``WorkerWeights`` alone decides which slot holds which version, and which are free.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np
import torch

from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.layout import (
    WeightLayout,
    address,
    is_contiguous,
    readable,
)

# In bytes. A memoryview holds the interpreter lock while it copies; numpy releases it.
# This size takes about 0.1 ms, far less than Python's switch interval of 5 ms.
_SMALL = 1 << 20

# An array of bytes or a memoryview. `target[:] = source` works between equal types.
_Bytes = Any


@final
class SharedMemoryWeights:
    """Sends weights through shared memory: the legal value of ``weight_sync_schemes``.

    It has no options. TorchRL's programs pass an object of this kind.
    """


class WeightVector:
    """Slots that each hold all weights; a slot has a number. They are in shared memory.

    Weights are written as bytes. A torch call takes longer than the copy of a small
    tensor, and several times as long as a numpy call. A memoryview is the fastest. For
    a policy of six small tensors these calls are most of the time of an update.
    """

    def __init__(self, layout: WeightLayout) -> None:
        """Reserve nothing yet."""
        self._layout = layout
        # Of the tensors that were read last. While their memory is held, no other is
        # there.
        self._addresses: list[int] = []
        self._sources: list[_Bytes] = []
        self._segments: list[Segment] = []
        self._tensors: list[list[torch.Tensor]] = []
        self._targets: list[list[_Bytes]] = []

    def write(self, tensors: Sequence[torch.Tensor], used: Iterable[int]) -> int:
        """Write weights to a slot that is not used; return its number.

        Args:
            tensors: the weights, in the order of the layout.
            used: numbers of the slots that must not be written.

        Raises:
            MemoryError: if there is too little shared memory for another slot. The
                message has the required and the free size.
        """
        free = set(range(len(self._segments))).difference(used)
        weights_slot = min(free) if free else self._open()
        self._copy(tensors, self._targets[weights_slot])
        return weights_slot

    def tensors(self, weights_slot: int) -> Sequence[torch.Tensor]:
        """Return the weights in a slot; they are read-only."""
        return self._tensors[weights_slot]

    def handle(self, weights_slot: int) -> Any:
        """Return what a worker needs to read a slot."""
        return self._segments[weights_slot].handle

    def filled(self, call: Callable[..., Any], worker: int) -> int:
        """Let a worker write its own weights to a new slot; return its number."""
        weights_slot = self._open()
        call(
            "publish_weights", weights_slot, self.handle(weights_slot), workers=[worker]
        )
        return weights_slot

    def close(self) -> None:
        """Release the shared memory."""
        self._tensors, self._targets = [], []
        for segment in self._segments:
            segment.close()

    def _open(self) -> int:
        segment = Segment.create(self._layout.nbytes, "The policy's weights")
        vector = torch.from_numpy(np.frombuffer(segment.buffer, np.uint8))
        self._segments.append(segment)
        self._tensors.append(self._layout.views(vector))
        self._targets.append(self._targets_in(vector))
        return len(self._segments) - 1

    def _targets_in(self, vector: torch.Tensor) -> list[_Bytes]:
        """Return where ``_copy`` writes to a vector, uint8 ``[nbytes]``."""
        return list(map(_as_bytes, self._layout.views(vector)))

    def _copy(self, tensors: Sequence[torch.Tensor], targets: list[_Bytes]) -> None:
        """Write all weights, in the order of the layout, from any device."""
        addresses = list(map(address, tensors))
        if addresses != self._addresses or not all(map(is_contiguous, tensors)):
            tensors = readable(tensors)
            self._sources = list(map(_as_bytes, tensors))
            self._addresses = list(map(address, tensors))
        for target, source in zip(targets, self._sources, strict=True):
            target[:] = source


def mapped(handle: MemoryHandle) -> torch.Tensor:
    """Return the memory of a slot in a worker, uint8 ``[nbytes]``."""
    return torch.from_numpy(np.frombuffer(Segment.attach(handle).buffer, np.uint8))


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    # As uint8, because numpy does not have all dtypes of torch.
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if array.nbytes <= _SMALL else array
