"""Async: every batch is one actor's, first come, first served."""

from typing import final

from marl_collect.collectors.batches import Filled
from marl_collect.collectors.in_flight import InFlight
from marl_collect.collectors.options import CollectorOptions
from marl_collect.distributed.actor_group import Fleet
from marl_collect.distributed.actor_handle import Member
from marl_collect.distributed.gathering import Counters, Gathering, frames_of
from marl_collect.distributed.messages import Gathered
from marl_collect.distributed.unpack import kept_apart, take_in


@final
class ByTurns(Gathering):
    """An actor is told to collect again, with the newest weights, once it is heard."""

    def __init__(
        self, fleet: Fleet, options: CollectorOptions, counters: Counters
    ) -> None:
        """Gather from ``fleet``, within ``max_staleness``."""
        super().__init__(fleet, options, counters)
        self._in_flight = InFlight(options.max_staleness)
        self._workers: tuple[int, ...] = ()

    @property
    def batch_frames(self) -> int:
        """Frames of the largest batch."""
        return max(m.size * frames_of(m) for m in self._fleet.members.values())

    @property
    def workers(self) -> list[int]:
        """How many environments each worker has in the batch collected last."""
        return list(self._workers)

    def collect(self, *, random: bool) -> Filled:
        """Return the batch of the first actor that is done."""
        self._send_where_allowed(random=random, ahead=0)
        member, gathered = self._fleet.receive(self._in_flight)
        self._in_flight.arrive(member.index)
        filled = self._take_in(member, gathered)
        self._workers = member.known.sizes
        self.let_go([member])
        # The actor goes on at once, while the user's code works on its batch.
        if not self.enough(filled.frames):
            self._send_where_allowed(random=random, ahead=1)
        return filled

    def settle(self) -> bool:
        """Drop all batches in the making; return whether there were any."""
        dropped = bool(list(self._in_flight))
        while left := list(self._in_flight):
            member, _ = self._fleet.receive(left)
            self._in_flight.arrive(member.index)
            self.let_go([member])
        return dropped

    def check(self) -> None:
        """Take any actors: each has batches of its own."""

    def _send_where_allowed(self, *, random: bool, ahead: int) -> None:
        """Let idle actors collect, as far as ``max_staleness`` allows."""
        for index in self._in_flight.idle(list(self._fleet.members)):
            if not self._in_flight.may_dispatch(ahead):
                return
            self._fleet.send(index, random=random, snapshot=True)
            self._in_flight.dispatch(index, ahead)

    def _take_in(self, member: Member, gathered: Gathered) -> Filled:
        sent = member.known.layout
        # The user's batch, and the next one.
        slots = self.slots_for((member.size, sent.batch[1]), sent, prepared=2)
        slot = slots.take()
        arrays = slots.layout.arrays(slots.segment(slot).buffer)
        take_in(arrays, gathered, sent, member.acted_in_rows)
        return Filled(
            slots.hand_out(slot),
            ends=list(gathered.ends),
            episodes=list(gathered.episodes),
            last=kept_apart(gathered.last),
        )
