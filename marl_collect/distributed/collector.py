"""``RayCollector``: collects on the nodes of a Ray cluster."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.multi_base import WorkersBackend
from marl_collect.collectors.trainer_policy import chosen_policy
from marl_collect.collectors.worker_group import WorkerGroup
from marl_collect.core.factories import Factory, spread
from marl_collect.distributed.pool import Actor, RayPool
from marl_collect.distributed.ray_options import RayArguments, RayOptions
from marl_collect.options import method
from marl_collect.processes import import_guard


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

    The arguments are the fields of ``RayArguments``.

    Raises:
        ImportError: if Ray is not installed.
        WorkerError: if an actor is lost and cannot be replaced.
    """

    _backend: WorkersBackend

    @method(RayArguments)
    def __init__(self, options: RayArguments) -> None:
        """Start the actors and wait until all of them are ready."""
        import_guard.refuse_during_import("a RayCollector")
        policy = chosen_policy(options.policy, options)
        self._create_env_fn = options.create_env_fn
        self._team = team = options.num_workers_per_collector
        factories = deal(options.create_env_fn, options.num_collectors, options)
        options.check_configs(len(factories) // team)
        if not isinstance(options.frames_per_batch, int):
            options.frames_of([1] * (len(factories) // team))  # Does the list fit?
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._pool = RayPool(options, team)
        self._workers = WorkerGroup(factories, policy, options, self._pool)
        self._arguments = options
        self._frames = self._frames_of(self._pool.actors)
        together = None if options.sync else team
        self._open(
            options, WorkersBackend(self._workers, options, self._frames, together)
        )

    @property
    def actors(self) -> list[dict[str, Any]]:
        """Index, process id, node id and host of each actor, as of its start."""
        return [
            {
                "index": actor.index,
                "pid": actor.location.pid,
                "node": actor.location.node,
                "host": actor.location.host,
            }
            for actor in self._pool.actors
        ]

    def add_collectors(
        self,
        count: int = 1,
        create_env_fn: Factory | Sequence[Factory] | None = None,
    ) -> None:
        """Start further actors; they take part from the next batch on.

        The frames per environment do not change, so sync batches become larger. The new
        environments are numbered after all earlier ones. A batch that is prefetched, or
        that an actor is collecting, is collected again.

        Args:
            count: number of actors.
            create_env_fn: as for the collector; None for the collector's own, if that
                is a single factory.

        Raises:
            ValueError: if there are no factories of environments or policies for them.
        """
        options = self._arguments
        if isinstance(options.policy_factory, Sequence):
            raise ValueError(  # noqa: TRY004 - the type is right, the number is not
                "policy_factory is a list with one entry for each initial worker, so "
                "there is none for new actors: pass a single factory instead."
            )
        if create_env_fn is None:
            create_env_fn = self._create_env_fn
            if isinstance(create_env_fn, Sequence):
                raise ValueError(
                    "create_env_fn was a list, so there are no factories for new "
                    "actors: pass them, add_collectors(count, create_env_fn=[...])."
                )
        factories = deal(create_env_fn, count, options)
        with self._regrouping():
            self._workers.add(factories, self._pool.add)
            if options.sync and isinstance(options.frames_per_batch, int):
                self._frames += self._frames[:1] * len(factories)
            else:
                self._frames += self._frames_of(self._pool.actors[-count:])

    def remove_collectors(self, indices: int | Sequence[int]) -> None:
        """End actors. Others collect the batch again that is in progress.

        Args:
            indices: as in ``actors``.

        Raises:
            ValueError: if an index is unknown, or no actor would be left.
        """
        chosen = {indices} if isinstance(indices, int) else set(indices)
        actors = {actor.index for actor in self._pool.actors}
        if not chosen <= actors or chosen == actors:
            raise ValueError(
                f"Cannot remove the actors {sorted(chosen)}: the collector has the "
                f"actors {sorted(actors)}, and at least one must be left."
            )
        with self._regrouping():
            removed = self._pool.remove(chosen)
            self._workers.remove(removed)
            for worker in reversed(removed):
                del self._frames[worker]

    @contextmanager
    def _regrouping(self) -> Iterator[None]:
        """Change the actors inside the block, between two batches."""
        with self._asking(), self._ending_on(Exception):
            self._backend.drop_unfinished()
            yield
            self._backend.reshape(self._frames)

    def _frames_of(self, actors: Sequence[Actor]) -> list[int]:
        """Return the frames per batch of each environment, by worker."""
        begin = self._pool.actors.index(actors[0]) * self._team
        sizes = self._workers.sizes[begin:]
        environments = [
            sum(sizes[k * self._team : (k + 1) * self._team])
            for k in range(len(actors))
        ]
        frames = self._arguments.frames_of_actors(
            environments, [actor.index for actor in actors]
        )
        return [number for number in frames for _ in range(self._team)]


def deal(
    create_env_fn: Factory | Sequence[Factory],
    actors: int | None,
    options: RayOptions,
) -> list[list[Factory]]:
    """Return the factories of each worker's environments.

    Args:
        create_env_fn: one factory, or a list with one per actor or per worker.
        actors: their number; None for what the list implies.
        options: of the collector.

    Raises:
        TypeError: if an argument is not a factory.
        ValueError: if the length of a list does not fit.
    """
    team = options.num_workers_per_collector
    if isinstance(create_env_fn, Sequence):
        if actors is None:
            actors = max(1, len(create_env_fn) // team)
        if len(create_env_fn) == actors:
            create_env_fn = [factory for factory in create_env_fn for _ in range(team)]
    actors = actors or 1
    return spread(
        create_env_fn,
        actors * team,
        options.envs_per_worker,
        options.create_env_kwargs,
    )
