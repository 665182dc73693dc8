"""Async collection: each batch comes from one actor, in order of arrival."""

from typing import final

from typing_extensions import override

from marl_collect.collectors.backend import Filled
from marl_collect.collectors.in_flight import InFlight
from marl_collect.collectors.options import CollectorOptions
from marl_collect.distributed.actor_group import ActorGroup
from marl_collect.distributed.actor_handle import ActorHandle
from marl_collect.distributed.gathering import Gathering, frames_of
from marl_collect.distributed.messages import Gathered
from marl_collect.distributed.unpack import unpack_batch, unpack_last


@final
class AsyncGathering(Gathering):
    """Gathers one actor's batch at a time, and orders the next one from that actor."""

    def __init__(self, actors: ActorGroup, options: CollectorOptions) -> None:
        """Gather from ``actors``, within ``max_staleness``."""
        super().__init__(actors, options)
        self._in_flight = InFlight(options.max_staleness)

    @property
    def batch_frames(self) -> int:
        """Frames of the largest batch."""
        return max(m.size * frames_of(m) for m in self._actors.handles.values())

    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Return the batch of the first actor that is done."""
        self._send_where_allowed(random=random, ahead=0)
        actor, gathered = self._actors.receive(self._in_flight)
        self._in_flight.arrive(actor.index)
        filled = self._unpack(actor, gathered)
        self.release([actor])
        # The actor collects on while the user's code works on its batch.
        if not self._options.completed(delivered + filled.frames):
            self._send_where_allowed(random=random, ahead=1)
        return filled

    @override
    def settle(self) -> bool:
        dropped = bool(list(self._in_flight))
        while left := list(self._in_flight):
            actor, _ = self._actors.receive(left)
            self._in_flight.arrive(actor.index)
            self.release([actor])
        return dropped

    def check(self) -> None:
        """Accept any actors: each has batches of its own."""

    def _send_where_allowed(self, *, random: bool, ahead: int) -> None:
        """Let idle actors collect, as far as ``max_staleness`` allows."""
        for index in self._in_flight.idle(list(self._actors.handles)):
            if not self._in_flight.may_dispatch(ahead):
                return
            self._actors.send(index, random=random, snapshot=True)
            self._in_flight.dispatch(index, ahead)

    def _unpack(self, actor: ActorHandle, gathered: Gathered) -> Filled:
        sent = actor.known.layout
        # The user's batch, and the next one.
        slots = self.slots_for((actor.size, sent.batch[1]), sent, prepared=2)
        slot = slots.take()
        arrays = slots.layout.arrays(slots.segment(slot).buffer)
        unpack_batch(arrays, gathered, sent, actor.acted_in_rows)
        return Filled(
            slots.hand_out(slot),
            ends=list(gathered.ends),
            episodes=list(gathered.episodes),
            sizes=actor.known.sizes,
            last=unpack_last(gathered.last),
        )
