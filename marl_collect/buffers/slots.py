"""The trainer's slots: shared memory for batches, reused when a batch is released.

A slot is free, being filled by workers, or held by the user. Handing it out creates
new tensors on its memory. The slot becomes free when the last tensor that shares this
memory is deleted. So a batch is valid as long as any of its tensors exists, and it is
never overwritten. A plain ``for`` loop needs two slots. If all slots are held, another
one is created. It is freed again when no batch has needed it for a while.

A process that is forked while a slot is held maps the memory too, and the trainer
cannot know when that process drops the batch. So such memory is never filled again: the
slot gets new memory, and the old memory is freed with the last process that maps it.
"""

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.layout import Layout
from marl_collect.core.description import Key
from marl_collect.errors import warn
from marl_collect.processes.shared_memory import Segment, readable

_WINDOW = 32
"""Number of batches without need of a slot after which its memory is freed, apart from
twice the number of slots. So a loop that fills all slots again and again keeps them."""

StridedView = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset in elements, shape and strides of a tensor."""

_HINT = (
    "Reduce frames_per_batch, hold fewer batches, or pass compact_obs=True, which "
    "omits the next observations."
)


@final
class _Lent(weakref.ref[NDArray[np.uint8]]):
    """Refers to memory that the user holds, and calls a function when it is gone.

    With a function of C no code of Python runs then, in which Ctrl-C would be lost:
    Python ignores what is raised while an object is deleted.

    Attributes:
        slot: whose memory it is.
    """

    __slots__ = ("slot",)
    slot: int


@final
class Slots:
    """Owns the slots of one collector."""

    def __init__(
        self, layout: Layout, prepared: int = 2, *, shared: bool = True
    ) -> None:
        """Reserve ``prepared`` slots.

        Args:
            layout: of each slot.
            prepared: number of slots.
            shared: whether other processes map them. Otherwise it is ordinary memory,
                which needs no /proc.

        Raises:
            MemoryError: if memory is short. The message has needed and free memory.
        """
        self.layout = layout
        self._views = list(_views(layout))
        self._prepared = prepared
        self._shared = shared
        self._segments: list[Segment | None] = []  # None where a slot was freed.
        self._free: deque[int] = deque()
        self._held: dict[int, _Lent] = {}  # Handed out and not taken since.
        self._gone: deque[_Lent] = deque()  # What the user held, and no longer does.
        self._inherited: set[int] = set()  # A forked process may use the memory.
        self._warned = False
        self._taken = 0  # Number of slots taken since this window of batches began,
        self._spare = sys.maxsize  # and the fewest that were free meanwhile.
        _ALIVE[id(self)] = self
        for _ in range(prepared):
            self._free.append(self._reserve())

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._segments) - len(self.vacant)

    @property
    def vacant(self) -> tuple[int, ...]:
        """Numbers of slots that were freed: processes that map them may drop them."""
        return tuple(k for k, segment in enumerate(self._segments) if segment is None)

    def acquire(self) -> int:
        """Return a slot to fill; a new one if all are held.

        Raises:
            MemoryError: if one more slot does not fit into memory.
        """
        while self._gone:
            self._free.append(self._gone.popleft().slot)
        if self._free:
            slot = self._free.popleft()
            self._held.pop(slot, None)
            if slot in self._inherited:
                self._renew(slot)
            self._free_unneeded()
            return slot
        self._begin_window()
        if not self._warned:
            self._warned = True
            warn_of_held(self._prepared, self.layout.nbytes)
        return self._reserve()

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken and not handed out."""
        self._free.append(slot)

    def segment(self, slot: int) -> Segment:
        """Return the memory of a slot."""
        segment = self._segments[slot]
        assert segment is not None, f"slot {slot} was freed"
        return segment

    def arrays(self, slot: int) -> dict[Key, NDArray[Any]]:
        """Return an array ``[B, T, ...]`` per key on the memory of a slot."""
        return self.layout.arrays(self.segment(slot).buffer)

    def hand_out(self, slot: int) -> dict[Key, torch.Tensor]:
        """Return a tensor ``[B, T, ...]`` per key on the slot's memory.

        The slot is the user's until all of these, and all their views, are gone.
        """
        layout = self.layout
        owner = np.frombuffer(self.segment(slot).buffer, np.uint8, layout.nbytes)
        # Only the storage of the tensors refers to `owner`, so it dies with them.
        self._held[slot] = lent = _Lent(owner, self._gone.append)
        lent.slot = slot
        storage = torch.from_numpy(owner).untyped_storage()
        return {
            key: torch.empty(0, dtype=dtype, device="cpu").set_(storage, *view)
            for key, dtype, view in self._views
        }

    def close(self) -> None:
        """Release all memory that no batch uses."""
        for segment in self._segments:
            if segment is not None:
                segment.close()

    def keep_held(self) -> None:
        """Never fill the memory of held slots again, because a process is forked.

        The new process inherits every batch that is held.
        """
        free = {*self._free.copy(), *(lent.slot for lent in self._gone.copy())}
        self._inherited |= self._held.keys() - free

    def keep_all(self) -> None:
        """Never fill any current memory again: the parent process uses it."""
        self._inherited.update(range(len(self._segments)))

    def _free_unneeded(self) -> None:
        """Free the slots that were free all the time during the last batches."""
        self._spare = min(self._spare, len(self._free))
        self._taken += 1
        if self._taken < _WINDOW + 2 * len(self):
            return
        for _ in range(min(self._spare, len(self) - self._prepared)):
            slot = self._free.pop()
            self._held.pop(slot, None)
            self._inherited.discard(slot)
            self.segment(slot).close()
            self._segments[slot] = None
        self._begin_window()

    def _begin_window(self) -> None:
        self._taken, self._spare = 0, sys.maxsize

    def _reserve(self) -> int:
        segment = self._new_segment()
        for slot in self.vacant[:1]:
            self._segments[slot] = segment
            return slot
        self._segments.append(segment)
        return len(self._segments) - 1

    def _renew(self, slot: int) -> None:
        """Replace the memory of a slot that is neither free nor held."""
        self.segment(slot).close()
        try:
            self._segments[slot] = self._new_segment()
        except BaseException:
            self._free.append(slot)
            raise
        self._inherited.discard(slot)

    def _new_segment(self) -> Segment:
        batch, frames = self.layout.batch
        purpose = f"A batch of {batch} environments x {frames} frames"
        new = Segment.create if self._shared else Segment.ordinary
        return new(self.layout.nbytes, purpose, _HINT)


def warn_of_held(number: int, nbytes: int) -> None:
    """Warn that more than ``number`` batches of this size are held."""
    warn(
        f"More than {number} batches are held at once. Each further one needs "
        f"{readable(nbytes)} more. This is fine if you keep them on purpose; otherwise "
        "clone the data that you need and drop the batches."
    )


_ALIVE: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


def _alive() -> list[Slots]:
    return [slots for ref in _ALIVE.valuerefs() if (slots := ref()) is not None]


def _keep_held() -> None:
    for slots in _alive():
        slots.keep_held()


def _keep_all() -> None:
    for slots in _alive():
        slots.keep_all()


if hasattr(os, "register_at_fork"):
    # Before and after, because another thread may hand out or drop a batch meanwhile.
    os.register_at_fork(
        before=_keep_held, after_in_parent=_keep_held, after_in_child=_keep_all
    )


def _views(layout: Layout) -> Iterator[tuple[Key, torch.dtype, StridedView]]:
    """Yield the dtype and the view of each key's tensor in a slot's memory."""
    for key, leaf in layout.fields.items():
        dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
        n_envs, frames = layout.batch
        shape = (n_envs, frames, *leaf.shape)
        if layout.is_time_major(leaf):
            memory = torch.empty((frames, n_envs, *leaf.shape), device="meta")
            strides = memory.transpose(0, 1).stride()
        else:
            strides = torch.empty(shape, device="meta").stride()
        yield key, dtype, (layout.offsets[key] // dtype.itemsize, shape, strides)
