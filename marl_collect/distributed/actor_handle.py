"""The trainer's view of one actor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from marl_collect.collectors.backend import Placement
from marl_collect.distributed.messages import ActorReady, Order, Spec


@final
@dataclass
class InFlightBatch:
    """A batch that an actor is collecting.

    Attributes:
        order: the order, without weights.
        wants: the weights that each of its workers has to act with.
        result: reference to the result.
    """

    order: Order
    wants: list[Any]
    result: Any


@final
@dataclass
class ActorHandle:
    """The trainer's state of one actor.

    Attributes:
        index: of the actor; never reused.
        spec: what it builds.
        ray_handle: Ray's handle of the actor.
        started: reference to the result of its start.
        ready: that result, once it has arrived.
        place: of its environments.
        has: the weights last sent to each of its workers.
        acted: version of the weights that each of its workers acted with in the batch
            that was received last; empty without weights.
        in_flight: the batch that it is collecting.
        running: number of each environment's running episode.
        restarts: how often it was restarted.
        failed_starts: number of starts since its last batch.
        metrics: its counters so far, without those of the actors it replaced.
        leaving: whether it ends after its current order.
    """

    index: int
    spec: Spec
    ray_handle: Any = None
    started: Any = None
    ready: ActorReady | None = None
    place: Placement = field(default_factory=Placement)
    has: list[Any] = field(default_factory=list)
    acted: list[int] = field(default_factory=list)
    in_flight: InFlightBatch | None = None
    running: tuple[int, ...] = ()
    restarts: int = 0
    failed_starts: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    leaving: bool = False

    @property
    def known(self) -> ActorReady:
        """What the actor reported when it was ready."""
        assert self.ready is not None, "The actor is not ready yet."
        return self.ready

    @property
    def size(self) -> int:
        """Number of its environments."""
        return sum(self.known.sizes)

    @property
    def acted_in_rows(self) -> list[int]:
        """Version of the weights that acted in each row of the batch received last."""
        sizes = self.known.sizes
        versions = self.acted or [0] * len(sizes)
        return [v for v, size in zip(versions, sizes, strict=True) for _ in range(size)]

    def call(self, group: str, name: str, *args: Any) -> Any:
        """Call a method of the actor; return a reference to its result.

        Args:
            group: the actor's thread group, ``WORK`` or ``WATCH``.
            name: of the method.
            args: of the method; Ray replaces references by their values.
        """
        return self.ray_handle.call.options(concurrency_group=group).remote(name, *args)

    def forget(self) -> None:
        """Drop all references into Ray's store, even if this handle is still held."""
        if self.in_flight is not None:
            self.in_flight.result = None
            self.in_flight.wants = []
        self.in_flight = None
        self.has = []
