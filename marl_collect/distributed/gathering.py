"""What sync and async collection from actors have in common."""

import abc
from collections.abc import Sequence
from typing import Any

from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import Slots
from marl_collect.collectors.backend import Filled
from marl_collect.collectors.options import CollectorOptions
from marl_collect.distributed.actor_group import ActorGroup
from marl_collect.distributed.actor_handle import ActorHandle
from marl_collect.distributed.unpack import slot_layout


class Gathering(abc.ABC):
    """Collects batches from the actors into the trainer's slots."""

    def __init__(self, actors: ActorGroup, options: CollectorOptions) -> None:
        """Gather from ``actors``."""
        self._actors = actors
        self._options = options
        self._slots: dict[tuple[int, int], Slots] = {}

    @property
    @abc.abstractmethod
    def batch_frames(self) -> int:
        """Frames of one batch."""

    @abc.abstractmethod
    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Return one batch; see ``Backend.collect``."""

    @abc.abstractmethod
    def settle(self) -> bool:
        """Drop all batches in progress; return whether there were any."""

    @abc.abstractmethod
    def check(self) -> None:
        """Check that the batches of the current actors fit together.

        Raises:
            ValueError: if they do not.
        """

    @property
    def slots(self) -> int:
        """Number of slots."""
        return sum(len(slots) for slots in self._slots.values())

    def close(self) -> None:
        """Free all memory that no batch uses."""
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

    def release(self, handles: Sequence[ActorHandle]) -> None:
        """End those of these actors that are leaving and have no batch in progress."""
        for actor in handles:
            if actor.leaving and actor.in_flight is None:
                self._actors.retire(actor.index)


def frames_of(actor: ActorHandle) -> int:
    """Return the maximum number of frames per batch of an actor's environments."""
    return actor.known.layout.batch[1]


def staying(actors: ActorGroup) -> dict[int, ActorHandle]:
    """Return the actors that stay after their current batch."""
    return {i: actor for i, actor in actors.handles.items() if not actor.leaving}


def states_of(actors: ActorGroup) -> list[Any]:
    """Return the states of all workers, as before the batches in progress."""
    before = {i: (actor.in_flight is not None,) for i, actor in staying(actors).items()}
    return [state for own in actors.ask_each("states", before) for state in own]
