"""Policy weights on their way from the trainer to the workers.

All parameters and buffers stand in one byte vector, a view per tensor and dtype, at
multiples of 64 bytes. The trainer's shared memory has room for two versions, used in
turn:

    trainer                                        worker
    publish(tensors): wait until everyone told to
    use version v has read it; write v + 2 where
    v stood                                        pull(version): copy the vector it
    collect(..., version) ---------------------->  was told to use, note it as read

So a worker always acts with one whole version, and no lock is taken. A worker's
module lives in views of the worker's own vector: a pull is one copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
import torch

from marl_collect.memory import MemoryHandle, Segment
from marl_collect.weight_copies import WeightCopies

ALIGNMENT = 64
SLOTS = 2


@final
@dataclass(frozen=True)
class WeightLayout:
    """Names, shapes, dtypes and offsets of the tensors in a weight vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def plan(cls, tensors: Mapping[str, torch.Tensor]) -> "WeightLayout":
        """Place ``tensors`` one after the other."""
        offsets: list[int] = []
        end = 0
        for tensor in tensors.values():
            offsets.append(end)
            size = tensor.numel() * tensor.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(
            names=tuple(tensors),
            shapes=tuple(tuple(t.shape) for t in tensors.values()),
            dtypes=tuple(t.dtype for t in tensors.values()),
            offsets=tuple(offsets),
            nbytes=max(end, ALIGNMENT),
        )

    def views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that stand in ``vector``, uint8 ``[nbytes]``."""
        out: list[torch.Tensor] = []
        for shape, dtype, offset in zip(
            self.shapes, self.dtypes, self.offsets, strict=True
        ):
            count = int(np.prod(shape, dtype=np.int64))
            size = count * torch.empty(0, dtype=dtype).element_size()
            out.append(vector[offset : offset + size].view(dtype).view(shape))
        return out


class Reader(Protocol):
    """A worker's end of a transport of weights."""

    def pull(self, version: int) -> bool:
        """Write ``version`` into the worker's vector; return whether it is new."""
        ...

    def publish_own(self) -> None:
        """Make the worker's own weights version 0, for all workers to use."""
        ...


class Handle(Protocol):
    """What a worker needs to read weights; pickles."""

    @property
    def layout(self) -> WeightLayout:
        """Where in a vector each tensor stands."""
        ...

    def attach(self, own: torch.Tensor) -> Reader:
        """Return the reader that fills the worker's vector, uint8 ``[nbytes]``."""
        ...


class Publisher(Protocol):
    """The trainer's end of a transport of weights.

    Attributes:
        version: of the weights published last, -1 before the first.
    """

    version: int

    @property
    def handle(self) -> Handle:
        """What a worker attaches."""
        ...

    def publish(
        self, tensors: Sequence[torch.Tensor], wait_until_read: Callable[[int], None]
    ) -> int:
        """Write a new version and return its number."""
        ...

    def adopt(self) -> None:
        """Count version 0, which a worker has written."""
        ...

    def read(self) -> Sequence[torch.Tensor]:
        """Return the tensors of the newest version, not to be written to."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class WeightScheme(Protocol):
    """A way for weights to reach the workers; ``weight_sync_schemes`` takes one."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Return the trainer's end of a new vector of this layout."""
        ...


@final
class SharedMemoryWeights:
    """Weights through shared memory: the default."""

    def open(self, layout: WeightLayout) -> Publisher:
        """Reserve memory for two versions."""
        return WeightPublisher(layout)


@final
@dataclass(frozen=True)
class WeightsHandle:
    """What a worker needs to read weights from shared memory."""

    memory: MemoryHandle
    layout: WeightLayout

    def attach(self, own: torch.Tensor) -> Reader:
        """Map the trainer's memory."""
        return WeightReader(self, own)


@final
class WeightPublisher:
    """The trainer's end: owns the shared vectors and counts the versions."""

    def __init__(self, layout: WeightLayout) -> None:
        """Reserve memory for two versions.

        Raises:
            MemoryError: naming need and free memory.
        """
        self.layout = layout
        self.version = -1
        self._segment = Segment.create(SLOTS * layout.nbytes, "The policy's weights")
        self._slots = [
            layout.views(_vector(self._segment, slot, layout)) for slot in range(SLOTS)
        ]
        self._copies = [WeightCopies(layout.names, slot) for slot in self._slots]

    @property
    def handle(self) -> WeightsHandle:
        """What a worker attaches."""
        return WeightsHandle(self._segment.handle, self.layout)

    def publish(
        self, tensors: Sequence[torch.Tensor], wait_until_read: Callable[[int], None]
    ) -> int:
        """Write a new version and return its number.

        Args:
            tensors: the weights, in the order of the layout, on any device.
            wait_until_read: called with the version whose place is taken, returns
                when every worker that was told to use it has read it.

        Raises:
            ValueError: naming a tensor whose shape is not that of the layout.
        """
        replaced = self.version + 1 - SLOTS
        if replaced >= 0:
            wait_until_read(replaced)
        self._copies[(self.version + 1) % SLOTS].write(tensors)
        self.version += 1
        return self.version

    def adopt(self) -> None:
        """Count version 0, which a worker has written."""
        self.version = 0

    def read(self) -> Sequence[torch.Tensor]:
        """Return the tensors of the newest version, not to be written to."""
        return self._slots[self.version % SLOTS]

    def close(self) -> None:
        """Give the shared memory back."""
        self._slots.clear()
        self._copies.clear()
        self._segment.close()


@final
class WeightReader:
    """A worker's end: its own vector, and the module that lives in it."""

    def __init__(self, handle: WeightsHandle, own: torch.Tensor) -> None:
        """Attach the trainer's memory; nothing is read yet.

        Args:
            handle: of the trainer's memory.
            own: the worker's vector, uint8 ``[nbytes]``, that its module lives in.
        """
        layout = handle.layout
        self._segment = Segment.attach(handle.memory)
        self._published = [
            _vector(self._segment, slot, layout) for slot in range(SLOTS)
        ]
        self._own = own
        self.version = -1

    def pull(self, version: int) -> bool:
        """Make ``version``, which the trainer keeps until told otherwise, current.

        Returns:
            Whether it was not current before.
        """
        if version == self.version:
            return False
        # Not by numpy, though that is quicker by itself: in workers glibc writes large
        # copies past the caches, and the policy reads these weights next.
        self._own.copy_(self._published[version % SLOTS])
        self.version = version
        return True

    def publish_own(self) -> None:
        """Write the worker's own weights as version 0, for all workers to use."""
        self._published[0].copy_(self._own)
        self.version = 0

    def close(self) -> None:
        """Detach from the trainer's memory."""
        self._published.clear()
        self._segment.close()


def named_weights(
    source: Any, names: Sequence[str], what: str = "weights"
) -> list[torch.Tensor]:
    """Return the tensors called ``names`` from what a user passes as weights.

    Args:
        source: a module, a state_dict, or a TensorDict of parameters such as
            ``TensorDict.from_module(policy)``.
        names: as in ``module.named_parameters()`` and ``named_buffers()``.
        what: where ``source`` was passed, for the message.

    Raises:
        KeyError: listing the names that are missing, and those that were found.
        TypeError: if ``source`` is none of these.
    """
    found = _by_name(source, what)
    missing = [name for name in names if name not in found]
    if missing:
        raise KeyError(
            f"{what} must hold the policy's tensors, but {missing} are missing; "
            f"found {sorted(found)}."
        )
    return [found[name] for name in names]


def _by_name(source: Any, what: str) -> dict[str, torch.Tensor]:
    from tensordict import TensorDictBase

    if isinstance(source, torch.nn.Module) and not isinstance(source, TensorDictBase):
        return dict(source.named_parameters(remove_duplicate=False)) | dict(
            source.named_buffers(remove_duplicate=False)
        )
    if isinstance(source, TensorDictBase):
        items = source.items(include_nested=True, leaves_only=True)
        return {k if isinstance(k, str) else ".".join(k): v for k, v in items}
    if isinstance(source, Mapping):
        return {str(name): tensor for name, tensor in source.items()}
    raise TypeError(
        f"{what} must be a module, a state_dict or a TensorDict, but is a "
        f"{type(source).__name__}."
    )


def _vector(segment: Segment, slot: int, layout: WeightLayout) -> torch.Tensor:
    array = np.frombuffer(
        segment.buffer, np.uint8, layout.nbytes, offset=slot * layout.nbytes
    )
    return torch.from_numpy(array)
