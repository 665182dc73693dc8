"""Decides which workers of an async collector may start a batch, and in what order."""

from collections.abc import Iterator, Sequence
from typing import final


@final
class InFlight:
    """Tracks the workers that are collecting, and how stale their batches become.

    The staleness of a batch in flight grows by one with each batch that is delivered
    before it. A batch is not dispatched if any staleness could exceed ``limit``.
    """

    def __init__(self, limit: int | None) -> None:
        """Limit staleness to ``limit`` batches; None means no limit."""
        self._limit = limit
        # Batches delivered since the dispatch, by worker. Oldest dispatch first.
        self._overtaken: dict[int, int] = {}
        self._next = 0

    def __contains__(self, worker: int) -> bool:
        """Whether the worker is collecting."""
        return worker in self._overtaken

    def __iter__(self) -> Iterator[int]:
        """Iterate over the workers that are collecting, in order of dispatch."""
        return iter(tuple(self._overtaken))

    def idle(self, workers: Sequence[int]) -> list[int]:
        """Return the workers that are not collecting, in round-robin order."""
        later = [w for w in workers if w >= self._next]
        earlier = [w for w in workers if w < self._next]
        return [w for w in (*later, *earlier) if w not in self._overtaken]

    def may_dispatch(self, ahead: int) -> bool:
        """Return whether all batches stay within the limit after another dispatch.

        In the worst case all other batches in flight are delivered before this one.

        Args:
            ahead: batches about to be delivered; the user may update the weights after
                each of them.
        """
        if self._limit is None:
            return True
        worst = max([ahead, *self._overtaken.values()])
        return worst + len(self._overtaken) <= self._limit

    def dispatch(self, worker: int, ahead: int) -> None:
        """Record that a worker starts to collect."""
        self._overtaken[worker] = ahead
        self._next = worker + 1

    def arrive(self, worker: int) -> None:
        """Record that a worker's batch is delivered."""
        del self._overtaken[worker]
        for other in self._overtaken:
            self._overtaken[other] += 1

    def clear(self) -> None:
        """Forget all workers."""
        self._overtaken.clear()
