"""Sync collection: all actors fill one batch, with one version of the weights."""

from dataclasses import dataclass
from typing import final

from typing_extensions import override

from marl_collect.buffers.compact_observations import join
from marl_collect.buffers.slots import Slots
from marl_collect.collectors.backend import Filled
from marl_collect.distributed.actor_handle import ActorHandle
from marl_collect.distributed.gathering import Gathering, frames_of
from marl_collect.distributed.messages import Gathered
from marl_collect.distributed.unpack import unpack_batch, unpack_last


@dataclass(frozen=True)
class _Batch:
    """A batch in progress: its slot, and the rows of each actor, in order."""

    slots: Slots
    slot: int
    rows: dict[int, range]
    workers: list[int]


@final
class SyncGathering(Gathering):
    """Gathers one batch from all actors, with the rows in actor order."""

    _pending: _Batch | None = None

    @property
    @override
    def batch_frames(self) -> int:
        return sum(m.size * frames_of(m) for m in self._actors.handles.values())

    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Return one batch of all actors."""
        batch = self._pending or self._send(random=random)
        self._pending = None
        filled = self._receive(batch)
        delivered += filled.frames
        if self._options.prefetch and not self._options.completed(delivered):
            self._pending = self._send(random=self._options.random_after(delivered))
        return filled

    def settle(self) -> bool:
        """Drop a batch that is being prefetched; return whether there was one."""
        if self._pending is None:
            return False
        batch, self._pending = self._pending, None
        self._receive(batch)  # Its tensors die here, which frees the slot.
        return True

    def check(self) -> None:
        """Check that every environment gives the same number of frames.

        Raises:
            ValueError: naming the actors that differ.
        """
        if not isinstance(self._options.frames_per_batch, int):
            return
        handles = list(self._actors.handles.values())
        first = handles[0]
        for other in handles:
            if frames_of(other) != frames_of(first):
                raise ValueError(
                    "All actors must have the same number of environments, or "
                    "frames_per_batch must be a list with the frames of each, but "
                    f"actor {first.index} has {first.size} and actor {other.index} "
                    f"has {other.size}."
                )

    def _send(self, *, random: bool) -> _Batch:
        handles = list(self._actors.handles.values())
        rows: dict[int, range] = {}
        begin = 0
        for actor in handles:
            rows[actor.index] = range(begin, begin + actor.size)
            begin += actor.size
        size = (begin, max(frames_of(actor) for actor in handles))
        ahead = self._options.prefetch
        sent = handles[0].known.layout
        slots = self.slots_for(size, sent, prepared=3 if ahead else 2)
        batch = _Batch(
            slots,
            slots.take(),
            rows,
            [size for actor in handles for size in actor.known.sizes],
        )
        for index in rows:
            self._actors.send(index, random=random, snapshot=ahead)
        return batch

    def _receive(self, batch: _Batch) -> Filled:
        """Wait for all actors, or for enough of them and preempt the others."""
        enough = count = len(batch.rows)
        if self._options.preempts:
            share = self._options.preemptive_threshold or 0.0
            enough = max(1, int(count * share))
        replies: dict[int, tuple[ActorHandle, Gathered]] = {}
        while len(replies) < count:
            waiting = [index for index in batch.rows if index not in replies]
            if len(replies) == enough:
                self._actors.preempt(waiting)
            actor, gathered = self._actors.receive(waiting)
            replies[actor.index] = actor, self._unpack(batch, actor, gathered)
        ordered = [replies[index][1] for index in batch.rows]
        self.release([actor for actor, _ in replies.values()])
        return Filled(
            batch.slots.hand_out(batch.slot),
            ends=[end for gathered in ordered for end in gathered.ends],
            episodes=[episode for gathered in ordered for episode in gathered.episodes],
            sizes=batch.workers,
            last=join(
                [unpack_last(gathered.last) for gathered in ordered],
                [rows.start for rows in batch.rows.values()],
            ),
        )

    def _unpack(
        self, batch: _Batch, actor: ActorHandle, gathered: Gathered
    ) -> Gathered:
        """Copy an actor's batch into the slot; return it without its bytes."""
        own = batch.rows[actor.index]
        whole = batch.slots.layout.arrays(
            batch.slots.segment(batch.slot).buffer, slice(own.start, own.stop)
        )
        unpack_batch(whole, gathered, actor.known.layout, actor.acted_in_rows)
        return gathered.without_content()
