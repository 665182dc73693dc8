"""One actor, as the trainer knows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from marl_collect.collectors.remote import Placement
from marl_collect.distributed.messages import Order, Ready, Spec


@final
@dataclass
class Flight:
    """An order that an actor is carrying out.

    Attributes:
        order: without the weights.
        wants: the weights of each of its workers.
        result: reference of what it will return.
    """

    order: Order
    wants: list[Any]
    result: Any


@final
@dataclass
class Member:
    """What is known of one actor.

    Attributes:
        index: of the actor; never given to another one.
        spec: what it builds.
        handle: Ray's.
        started: reference of what its start returns.
        ready: what that was, once it is known.
        place: of its environments.
        has: the weights that each of its workers was sent last.
        acted: version of the weights that each of its workers acted with in the batch
            that was received last; empty without weights.
        flight: the order that it is carrying out.
        running: number of each environment's running episode.
        restarts: how often it was started anew.
        fruitless: how often since it last collected something.
        figures: its counters so far; those of the actors that it replaced.
        leaving: whether it goes once its order is carried out.
    """

    index: int
    spec: Spec
    handle: Any = None
    started: Any = None
    ready: Ready | None = None
    place: Placement = field(default_factory=Placement)
    has: list[Any] = field(default_factory=list)
    acted: list[int] = field(default_factory=list)
    flight: Flight | None = None
    running: tuple[int, ...] = ()
    restarts: int = 0
    fruitless: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    leaving: bool = False

    @property
    def known(self) -> Ready:
        """What the actor said of itself when it was ready."""
        assert self.ready is not None, "asked before the actor was ready"
        return self.ready

    @property
    def size(self) -> int:
        """How many environments it has."""
        return sum(self.known.sizes)

    @property
    def acted_in_rows(self) -> list[int]:
        """Version of the weights that acted in each row of the batch received last."""
        sizes = self.known.sizes
        versions = self.acted or [0] * len(sizes)
        return [v for v, size in zip(versions, sizes, strict=True) for _ in range(size)]

    def call(self, group: str, name: str, *args: Any) -> Any:
        """Call a method of the actor; return the reference of its result.

        Args:
            group: of the actor's threads, ``WORK`` or ``WATCH``.
            name: of the method.
            args: references among them arrive as what they refer to.
        """
        return self.handle.call.options(concurrency_group=group).remote(name, *args)

    def forget(self) -> None:
        """Drop every object in Ray's store, whoever may still know of this member."""
        if self.flight is not None:
            self.flight.result = None
            self.flight.wants = []
        self.flight = None
        self.has = []
