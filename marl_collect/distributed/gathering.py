"""What sync and async collection from actors have in common."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import Slots
from marl_collect.collectors.batches import Filled
from marl_collect.collectors.options import CollectorOptions
from marl_collect.distributed.actor_group import Fleet
from marl_collect.distributed.actor_handle import Member
from marl_collect.distributed.unpack import slot_layout


@dataclass(frozen=True)
class Counters:
    """What a gathering asks of the collector that it works for.

    Attributes:
        frames: handed out so far.
    """

    frames: Callable[[], int]


class Gathering(abc.ABC):
    """Gets batches out of a fleet, into slots of the trainer."""

    def __init__(
        self, fleet: Fleet, options: CollectorOptions, counters: Counters
    ) -> None:
        """Gather from ``fleet``."""
        self._fleet = fleet
        self._options = options
        self._counters = counters
        self._slots: dict[tuple[int, int], Slots] = {}

    @property
    @abc.abstractmethod
    def batch_frames(self) -> int:
        """Frames of one batch."""

    @property
    @abc.abstractmethod
    def workers(self) -> list[int]:
        """How many environments each worker has in the batch collected last."""

    @abc.abstractmethod
    def collect(self, *, random: bool) -> Filled:
        """Return one batch."""

    @abc.abstractmethod
    def settle(self) -> bool:
        """Drop whatever is being collected; return whether there was anything."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check that the actors that there are now can be gathered from.

        Raises:
            ValueError: if they do not fit together.
        """

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return sum(len(slots) for slots in self._slots.values())

    def close(self) -> None:
        """Give all memory back that no batch uses."""
        for slots in self._slots.values():
            slots.close()

    def slots_for(self, batch: tuple[int, int], sent: Layout, prepared: int) -> Slots:
        """Return the slots for batches ``[B, T]`` from actors that send ``sent``."""
        if batch not in self._slots:
            layout = slot_layout(
                sent,
                batch,
                ragged=self._options.ragged,
                versions=self._options.track_policy_version,
            )
            self._slots[batch] = Slots(layout, prepared=prepared)
        return self._slots[batch]

    def enough(self, arrived: int) -> bool:
        """Whether nothing more has to be collected, once ``arrived`` are counted."""
        total = self._options.total_frames
        if total is None or self._options.endless:
            return False
        return self._counters.frames() + arrived >= total

    def let_go(self, members: Sequence[Member]) -> None:
        """End those of these actors that are to leave, and are done."""
        for member in members:
            if member.leaving and member.flight is None:
                self._fleet.retire(member.index)


def frames_of(member: Member) -> int:
    """Return how many frames an actor's environments give per batch, at most."""
    return member.known.layout.batch[1]


def staying(fleet: Fleet) -> dict[int, Member]:
    """Return the actors that do not leave after the batch that they are collecting."""
    return {i: member for i, member in fleet.members.items() if not member.leaving}


def states_of(fleet: Fleet) -> list[Any]:
    """Return the states of all workers, before what they are collecting."""
    before = {i: (member.flight is not None,) for i, member in staying(fleet).items()}
    return [state for own in fleet.ask_each("states", before) for state in own]
