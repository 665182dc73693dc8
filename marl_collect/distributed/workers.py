"""The trainer's side of the workers of all actors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from typing_extensions import override

from marl_collect.collectors.workers import Workers
from marl_collect.distributed.pool import STARTS, Actor, RayPool
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.vectors import RayVector
from marl_collect.errors import WorkerError
from marl_collect.weights.layout import WeightLayout


@final
class RayWorkers(Workers):
    """Workers in actors. Those of an actor that is lost are lost together."""

    _most_in_a_row = STARTS
    _options: RayOptions
    _pool: RayPool

    @property
    def actors(self) -> Sequence[Actor]:
        """What the trainer knows of each actor."""
        return self._pool.actors

    @override
    def _start(self) -> RayPool:
        return RayPool(self._options, [member.assignment for member in self._members])

    @property
    @override
    def _open_vector(self) -> Callable[[WeightLayout], RayVector]:
        return partial(RayVector, ray=self._pool.cluster.ray)

    @override
    def _lost_with(self, worker: int) -> Sequence[int]:
        actor = self._pool.actor_of(worker)
        return (worker,) if actor.lost is None else actor.workers

    @override
    def _replaces(self, error: Exception, cause: WorkerError) -> bool:
        actor = self._pool.actor_of(cause.worker)
        if actor.lost is None and super()._replaces(error, cause):
            return True
        # An exception that cannot be pickled arrives as a WorkerError.
        died = error is cause and cause.problem != "failed"
        return died and self._pool.has_restarts(actor)

    @override
    def _restart(self, workers: Sequence[int]) -> None:
        self._pool.restart(workers)

    @override
    def metrics(self) -> dict[str, Any]:
        return super().metrics() | {
            "actors": len(self._pool.actors),
            "restarts": self._pool.lost_actors,
            "worker_restarts": self._pool.lost_workers,
        }
