"""Which workers read which weights: one shared vector, or several for a population."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from marl_collect.processes.board import PHASE, WEIGHTS_READ, Phase
from marl_collect.processes.pool import WorkerPool
from marl_collect.weights import Handle, Publisher, WeightLayout, WeightScheme

_PAUSE = 0.0002  # Seconds between two looks; a worker reads at once, if it lives.


@final
class Publishing:
    """Owns the shared weight vectors of a collector.

    All workers read the same vector until weights are meant for some of them only;
    these then get vectors of their own, for good.
    """

    def __init__(
        self,
        layout: WeightLayout,
        pool: WorkerPool,
        scheme: WeightScheme,
        check: Callable[[Sequence[int]], None],
        *,
        until_done: bool = False,
    ) -> None:
        """Open one vector for all workers of ``pool``.

        Args:
            layout: of the weights.
            pool: the workers.
            scheme: how weights reach them.
            check: looks whether workers are well, while one waits for them.
            until_done: keep a version not only until the workers have read it, but
                until they are done with it: one that is started anew reads it again.
        """
        self.layout = layout
        self._pool = pool
        self._scheme = scheme
        self._check = check
        self._until_done = until_done
        shared = scheme.open(layout)
        self._publishers: list[Publisher] = [shared]
        self._of = [shared] * len(pool)
        self._waits = self._wait_for_readers()
        self._told = [-1] * len(pool)

    def handle(self, worker: int) -> Handle:
        """Return what a worker attaches."""
        return self._of[worker].handle

    def version(self, worker: int) -> int:
        """Return the newest version that the worker may use."""
        return self._of[worker].version

    def adopt(self, worker: int) -> None:
        """Count version 0, which this worker has written."""
        self._of[worker].adopt()

    def read(self, worker: int) -> Sequence[torch.Tensor]:
        """Return the newest weights of a worker, not to be written to."""
        return self._of[worker].read()

    def tell(self, worker: int) -> int:
        """Return the newest version, which the worker is told to use now."""
        self._told[worker] = self._of[worker].version
        return self._told[worker]

    def forget(self, worker: int) -> None:
        """Expect a worker to read nothing until it is told to."""
        self._told[worker] = -1

    def separate(self, workers: Sequence[int]) -> list[tuple[int, Handle]]:
        """Give workers vectors of their own; return those that are new."""
        fresh: list[tuple[int, Handle]] = []
        for worker in workers:
            if sum(other is self._of[worker] for other in self._of) > 1:
                publisher = self._scheme.open(self.layout)
                # The version counts on, so that the worker notices the change.
                publisher.version = self._of[worker].version
                self._publishers.append(publisher)
                self._of[worker] = publisher
                self._waits = self._wait_for_readers()
                fresh.append((worker, publisher.handle))
        return fresh

    def publish(
        self, tensors: Sequence[torch.Tensor], workers: Sequence[int] | None
    ) -> None:
        """Write a new version, for all workers or for some."""
        waits = self._waits
        if workers is not None:
            waits = {self._of[w]: waits[self._of[w]] for w in workers}
        for publisher, wait in waits.items():
            publisher.publish(tensors, wait)

    def close(self) -> None:
        """Give the memory back."""
        for publisher in self._publishers:
            publisher.close()

    def _wait_for_readers(self) -> dict[Publisher, Callable[[int], None]]:
        # Of each publisher that has any.
        return {own: partial(self._wait, own) for own in dict.fromkeys(self._of)}

    def _wait(self, publisher: Publisher, version: int) -> None:
        """Wait until nobody who was told to use ``version`` still has to read it.

        Raises:
            WorkerError: if a worker died, or hangs, before it has read.
        """
        while version in self._told and any(
            self._needs(w, version) for w in self._readers(publisher)
        ):
            self._check(self._readers(publisher))
            time.sleep(_PAUSE)  # noqa: TID251 - there is nothing to wait on but a cell

    def _readers(self, publisher: Publisher) -> list[int]:
        return [w for w, own in enumerate(self._of) if own is publisher]

    def _needs(self, worker: int, version: int) -> bool:
        if self._told[worker] != version:
            return False
        cells = self._pool.board.lines[worker].cells
        # The cell holds the version read last plus one: 0 is none.
        if cells[WEIGHTS_READ] <= version:
            return True
        return self._until_done and cells[PHASE] != Phase.IDLE
