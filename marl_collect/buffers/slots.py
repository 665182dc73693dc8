"""The trainer's slots: who may write one, and when it is free again.

A slot is free, or being filled by workers, or held by the user. Handing it out
makes fresh tensors on its memory; when the last tensor that shares this memory
dies, the slot is free again. So a batch is valid for as long as any tensor of it
is held, and what is held is never overwritten. A plain ``for`` loop lives on two
slots; if all are held, one more is made.

A process that is forked meanwhile maps the memory too, and nobody learns when it drops
the batches that it inherited. So the memory of a slot that is held while a process is
forked is not filled again: when the slot is, it gets new memory, and the old one goes
with the last process that maps it.
"""

import os
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from typing import final

import numpy as np
import torch

from marl_collect.buffers.layout import Layout
from marl_collect.core.description import Key
from marl_collect.processes.shared_memory import Segment, readable

StridedView = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset in elements, shape and strides."""

_HINT = (
    "Ask for fewer frames_per_batch, hold fewer batches, or pass compact_obs=True, "
    "which leaves the next observations out."
)


@final
class Slots:
    """Owns the slots of one collector."""

    def __init__(self, layout: Layout, prepared: int = 2) -> None:
        """Reserve ``prepared`` slots.

        Raises:
            MemoryError: naming need and free memory.
        """
        self.layout = layout
        self._views = list(_views(layout))
        self._prepared = prepared
        self._segments: list[Segment] = []
        self._free: deque[int] = deque()
        self._held: set[int] = set()  # Handed out, and not taken since.
        self._inherited: set[int] = set()  # Another process may use the memory.
        _ALIVE[id(self)] = self
        for _ in range(prepared):
            self._free.append(self._reserve())

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self._segments)

    def take(self) -> int:
        """Return a slot to fill, a new one if all are held.

        Raises:
            MemoryError: if one more slot does not fit into memory.
        """
        if self._free:
            slot = self._free.popleft()
            self._held.discard(slot)
            if slot in self._inherited:
                self._renew(slot)
            return slot
        if len(self._segments) == self._prepared:
            warnings.warn(
                f"More than {self._prepared} batches are held at once, so each further "
                f"one takes {readable(self.layout.nbytes)} more. This is fine if you "
                "keep them on purpose; otherwise drop or clone what you need of them.",
                stacklevel=2,
            )
        return self._reserve()

    def give_back(self, slot: int) -> None:
        """Make a slot free that was taken and not handed out."""
        self._free.append(slot)

    def segment(self, slot: int) -> Segment:
        """Return the memory of a slot."""
        return self._segments[slot]

    def hand_out(self, slot: int) -> dict[Key, torch.Tensor]:
        """Return a tensor ``[B, T, ...]`` per key on the slot's memory.

        The slot is the user's until all of these, and all their views, are gone.
        """
        layout = self.layout
        self._held.add(slot)
        owner = np.frombuffer(self._segments[slot].buffer, np.uint8, layout.nbytes)
        # Only the storage of the tensors refers to `owner`, so it dies with them.
        weakref.finalize(owner, self._free.append, slot).atexit = False
        storage = torch.from_numpy(owner).untyped_storage()
        return {
            key: torch.empty(0, dtype=dtype).set_(storage, *place)
            for key, dtype, place in self._views
        }

    def close(self) -> None:
        """Give all memory back that no batch uses."""
        for segment in self._segments:
            segment.close()

    def keep_held(self) -> None:
        """Fill no memory again that a process forked now may read.

        It may have inherited every batch that is held.
        """
        self._inherited |= self._held.difference(self._free.copy())

    def keep_all(self) -> None:
        """Fill no memory again that the process which this one is a fork of has."""
        self._inherited.update(range(len(self._segments)))

    def _reserve(self) -> int:
        self._segments.append(self._new_segment())
        return len(self._segments) - 1

    def _renew(self, slot: int) -> None:
        """Give a slot, which is in no list now, new memory."""
        self._segments[slot].close()
        try:
            self._segments[slot] = self._new_segment()
        except BaseException:
            self._free.append(slot)
            raise
        self._inherited.discard(slot)

    def _new_segment(self) -> Segment:
        batch, frames = self.layout.batch
        what = f"A batch of {batch} environments x {frames} frames"
        return Segment.create(self.layout.nbytes, what, _HINT)


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
    # Before and after: another thread may hand a batch out, or drop one, meanwhile.
    os.register_at_fork(
        before=_keep_held, after_in_parent=_keep_held, after_in_child=_keep_all
    )


def _views(layout: Layout) -> Iterator[tuple[Key, torch.dtype, StridedView]]:
    """Yield the dtype of each key's tensor, and its place in a slot's memory."""
    for key, leaf in layout.fields.items():
        dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
        shape = (*layout.batch, *leaf.shape)
        strides = torch.empty(shape, device="meta").stride()
        yield key, dtype, (layout.offsets[key] // dtype.itemsize, shape, strides)
