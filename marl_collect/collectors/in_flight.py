"""Which workers of an async collector may be told to collect, and in which turn."""

from collections.abc import Iterator, Sequence
from typing import final


@final
class Flights:
    """Knows who is collecting, and how many batches overtook each of them.

    A batch in the making becomes stale with each batch that is handed out before it;
    ``limit`` holds commands back that could make one staler than that.
    """

    def __init__(self, limit: int | None) -> None:
        """Keep staleness within ``limit`` batches, None for any."""
        self._limit = limit
        # Batches handed out since each of these was told to collect, oldest first.
        self._overtaken: dict[int, int] = {}
        self._next = 0

    def __contains__(self, worker: int) -> bool:
        """Whether the worker is collecting."""
        return worker in self._overtaken

    def __iter__(self) -> Iterator[int]:
        """Iterate over those that are collecting, the first told first."""
        return iter(tuple(self._overtaken))

    def idle(self, workers: Sequence[int]) -> list[int]:
        """Return those that are not collecting, by turns."""
        later = [w for w in workers if w >= self._next]
        earlier = [w for w in workers if w < self._next]
        return [w for w in (*later, *earlier) if w not in self._overtaken]

    def may_begin(self, ahead: int) -> bool:
        """Whether one more batch in the making keeps every one within the limit.

        Until a batch arrives, all others in the making may be handed out before it.

        Args:
            ahead: batches on their way to the user, who may update the weights with
                them after these commands.
        """
        if self._limit is None:
            return True
        worst = max([ahead, *self._overtaken.values()])
        return worst + len(self._overtaken) <= self._limit

    def begin(self, worker: int, ahead: int) -> None:
        """Note that a worker was told to collect."""
        self._overtaken[worker] = ahead
        self._next = worker + 1

    def arrive(self, worker: int) -> None:
        """Note that a worker's batch is handed out."""
        del self._overtaken[worker]
        for other in self._overtaken:
            self._overtaken[other] += 1

    def clear(self) -> None:
        """Forget everyone."""
        self._overtaken.clear()
