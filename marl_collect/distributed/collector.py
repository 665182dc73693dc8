"""``RayCollector``: collects on the nodes of a Ray cluster."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from typing_extensions import override

from marl_collect.collectors.collector import CollectorBase
from marl_collect.collectors.teams import Teams
from marl_collect.collectors.trainer_policy import chosen_policy
from marl_collect.collectors.workers import Workers
from marl_collect.core.factories import Factory
from marl_collect.distributed.pool import STARTS, Actor, RayPool
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.vectors import RayVector
from marl_collect.errors import WorkerError
from marl_collect.options import method
from marl_collect.processes import import_guard
from marl_collect.weights.layout import WeightLayout


@final
class RayCollector(CollectorBase):
    """Collects in actors on a Ray cluster, each of which has worker processes.

    With ``sync=True`` a batch has the frames of all actors, in their order. For equal
    seeds its content equals that of a ``MultiSyncCollector`` over the same factories.
    With ``sync=False`` each batch comes from one actor, as each batch of a
    ``MultiAsyncCollector`` comes from one worker. Batches are in the trainer's own
    memory, and stay valid as long as any of their tensors is held.

    The collector uses the Ray that this process is connected to. Without one, it
    connects to ``RAY_ADDRESS`` or starts a local Ray, which ends with the collector.

    The arguments are the fields of ``RayOptions``.

    Raises:
        ImportError: if Ray is not installed.
        WorkerError: if an actor is lost and cannot be replaced.
    """

    @method(RayOptions)
    def __init__(self, options: RayOptions) -> None:
        """Start the actors and wait until all of them are ready."""
        import_guard.refuse_during_import("a RayCollector")
        policy = chosen_policy(options.policy, options)
        team = options.num_workers_per_collector
        factories = deal(options)
        options.configs(len(factories) // team)  # Does a list of them fit?
        if not isinstance(options.frames_per_batch, int):
            options.frames_of([1] * (len(factories) // team))  # Does the list fit?
        workers = RayWorkers(factories, policy, options)
        self._actors = workers.actors
        frames = options.frames_of_workers(workers.sizes)
        together = None if options.sync else team
        self._open(options, Teams(workers, options, frames, together))

    @property
    def actors(self) -> list[dict[str, Any]]:
        """Index, process id, node id and host of each actor, as of its start."""
        return [{"index": actor.index, **actor.location} for actor in self._actors]


@final
class RayWorkers(Workers):
    """Workers in actors. Those of an actor that is lost are lost together."""

    _most_in_a_row = STARTS
    _options: RayOptions
    _pool: RayPool  # type: ignore[assignment]  # It has the methods of a WorkerPool.

    @property
    def actors(self) -> Sequence[Actor]:
        """What the trainer knows of each actor."""
        return self._pool.actors

    @override
    def _start(self) -> RayPool:  # type: ignore[override]
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


def deal(options: RayOptions) -> list[list[Factory]]:
    """Return the factories of each worker's environments.

    Raises:
        TypeError: if an argument is not a factory.
        ValueError: if the length of a list does not fit.
    """
    create_env_fn, actors = options.create_env_fn, options.num_collectors
    team = options.num_workers_per_collector
    if isinstance(create_env_fn, Sequence):
        if actors is None:
            actors = max(1, len(create_env_fn) // team)
        if len(create_env_fn) == actors:
            create_env_fn = [factory for factory in create_env_fn for _ in range(team)]
    return options.factories(create_env_fn, (actors or 1) * team)
