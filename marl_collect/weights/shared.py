"""The shared memory that carries policy weights to the workers.

The trainer's memory has places for two vectors, so one can be written while workers
still read the other:

    trainer                                        worker
    write(place, tensors, ranges)
    Collect(weights=place, ranges) --------------->  pull(place, ranges)

The ``WeightBroadcaster`` alone decides which place holds which version, when a place
may be overwritten, and which ranges travel. The tensors of a worker's module are views
of the worker's own vector, so a pull copies bytes only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch

from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.layout import (
    WeightLayout,
    address,
    is_contiguous,
    readable,
)

PLACES = 2

# In bytes. A memoryview holds the interpreter lock while it copies; numpy releases it.
# This size takes about 0.1 ms, far less than Python's switch interval of 5 ms.
_SMALL = 1 << 20

# An array of bytes or a memoryview. `target[:] = source` works between equal types.
_Bytes = Any


class Reader(Protocol):
    """The worker's end of a weight transport."""

    def pull(self, place: int, ranges: Iterable[int]) -> None:
        """Copy from the vector at ``place`` into the worker's own vector.

        Args:
            place: its number. The trainer does not change it meanwhile.
            ranges: indices of the layout's ranges to copy.
        """
        ...

    def publish_own(self) -> None:
        """Write the worker's own weights to place 0, for all workers to read."""
        ...


class Handle(Protocol):
    """Gives a worker access to the weights; can be pickled."""

    @property
    def layout(self) -> WeightLayout:
        """The layout of each vector."""
        ...

    def attach(self, vector: torch.Tensor) -> Reader:
        """Return the reader that fills the worker's vector, uint8 ``[nbytes]``."""
        ...


class Publisher(Protocol):
    """The trainer's end of a weight transport, with ``PLACES`` vectors."""

    @property
    def handle(self) -> Handle:
        """The handle that workers attach."""
        ...

    def write(
        self, place: int, tensors: Sequence[torch.Tensor], ranges: Iterable[int]
    ) -> None:
        """Write weights to a place that no worker is reading.

        Args:
            place: its number.
            tensors: all weights, in the order of the layout, on any device.
            ranges: indices of the layout's ranges to write.
        """
        ...

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place; they are read-only."""
        ...

    def close(self) -> None:
        """Release all memory."""
        ...


class WeightScheme(Protocol):
    """Sends weights to the workers; the type of ``weight_sync_schemes``."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Return the trainer's end of a new transport for this layout."""
        ...


@final
class SharedMemoryWeights:
    """Sends weights through shared memory; the default."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Reserve memory."""
        return WeightPublisher(layout)


@final
@dataclass(frozen=True)
class WeightsHandle:
    """Gives a worker access to weights in shared memory."""

    memory: MemoryHandle
    layout: WeightLayout

    def attach(self, vector: torch.Tensor) -> Reader:
        """Attach the trainer's memory."""
        return WeightReader(self, vector)


@final
class WeightWriter:
    """Writes weights to vectors, repeatedly, as bytes.

    A torch call takes longer than the copy of a small tensor, and several times as long
    as a numpy call. A memoryview is the fastest. For a policy of six small tensors
    these calls are most of the time of an update.

    Attributes:
        places: the tensors of each vector.
    """

    def __init__(self, layout: WeightLayout, vectors: Iterable[torch.Tensor]) -> None:
        """Prepare the copies to vectors, each uint8 ``[nbytes]``, on the CPU."""
        self._layout = layout
        self.places = [layout.views(vector) for vector in vectors]
        self._targets = [list(map(_as_bytes, place)) for place in self.places]
        # Of the tensors of each range that were read last. While their memory is held,
        # no other is there.
        self._addresses: list[list[int]] = [[] for _ in layout.ranges]
        self._sources: list[list[_Bytes]] = [[] for _ in layout.ranges]

    def write(
        self, place: int, tensors: Sequence[torch.Tensor], ranges: Iterable[int]
    ) -> None:
        """Write ranges of weights to a vector.

        Args:
            place: index of the vector.
            tensors: all weights, in the order of the layout, from any device.
            ranges: indices of the layout's ranges.
        """
        for index in ranges:
            part = self._layout.ranges[index].tensors
            sources = self._as_bytes(index, tensors[part])
            for target, source in zip(self._targets[place][part], sources, strict=True):
                target[:] = source

    def _as_bytes(self, index: int, tensors: Sequence[torch.Tensor]) -> list[_Bytes]:
        """Return the bytes of a range's tensors."""
        addresses = list(map(address, tensors))
        if addresses != self._addresses[index] or not all(map(is_contiguous, tensors)):
            tensors = readable(tensors)
            self._sources[index] = list(map(_as_bytes, tensors))
            self._addresses[index] = list(map(address, tensors))
        return self._sources[index]


@final
class WeightPublisher:
    """The trainer's end, which owns the shared vectors."""

    def __init__(self, layout: WeightLayout) -> None:
        """Reserve memory.

        Raises:
            MemoryError: if there is too little shared memory. The message has the
                required and the free size.
        """
        self._segment = Segment.create(PLACES * layout.nbytes, "The policy's weights")
        self._layout = layout
        self._writer = WeightWriter(layout, _vectors(self._segment))

    @property
    def handle(self) -> WeightsHandle:
        """The handle that workers attach."""
        return WeightsHandle(self._segment.handle, self._layout)

    def write(
        self, place: int, tensors: Sequence[torch.Tensor], ranges: Iterable[int]
    ) -> None:
        """Write ranges of the weights to a place."""
        self._writer.write(place, tensors, ranges)

    def read(self, place: int) -> Sequence[torch.Tensor]:
        """Return the tensors at a place; they are read-only."""
        return self._writer.places[place]

    def close(self) -> None:
        """Release the shared memory."""
        self._writer = None  # type: ignore[assignment]
        self._segment.close()


@final
class WeightReader:
    """The worker's end, which fills the vector of the worker's module."""

    def __init__(self, handle: WeightsHandle, vector: torch.Tensor) -> None:
        """Attach the trainer's memory; nothing is read yet.

        Args:
            handle: of the trainer's memory.
            vector: the worker's, uint8 ``[nbytes]``; its module's tensors are
                views of it.
        """
        self._published = _vectors(Segment.attach(handle.memory))
        self._vector = vector
        self._own = handle.layout.parts(vector)
        self._parts = [handle.layout.parts(published) for published in self._published]

    def pull(self, place: int, ranges: Iterable[int]) -> None:
        """Copy ranges of the vector at ``place``."""
        # numpy's copy is faster, but in workers its large copies bypass the caches
        # (by glibc's memcpy), and the policy reads these weights next.
        published = self._parts[place]
        for index in ranges:
            self._own[index].copy_(published[index])

    def publish_own(self) -> None:
        """Write the worker's own weights to place 0, for all workers to read."""
        self._published[0].copy_(self._vector)


def _vectors(segment: Segment) -> list[torch.Tensor]:
    """Return the vector of each place."""
    memory = np.frombuffer(segment.buffer, np.uint8)
    return [torch.from_numpy(v) for v in memory.reshape(PLACES, -1)]


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    # As uint8, because numpy does not have all dtypes of torch.
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array) if array.nbytes <= _SMALL else array
