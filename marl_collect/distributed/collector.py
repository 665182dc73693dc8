"""``RayCollector``: collects on the nodes of a Ray cluster."""

import os
import threading
from collections.abc import Sequence
from typing import Any, final

import torch
from typing_extensions import override

from marl_collect.collectors.assigning import (
    chosen_workers,
    draw_seed,
    sized_workers,
)
from marl_collect.collectors.backend import Backend, Filled
from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.checkpoint import (
    check_environments,
    warn_if_not_resumed,
    warn_of_a_dropped_batch,
)
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    check_can_be_sent,
    chosen_policy,
    is_random,
    needs_description,
    prepare,
)
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, warn_if_pinned
from marl_collect.distributed.actor_group import ActorGroup
from marl_collect.distributed.async_gathering import AsyncGathering
from marl_collect.distributed.cluster import Cluster
from marl_collect.distributed.gathering import Gathering, states_of, staying
from marl_collect.distributed.ray_options import RayArguments
from marl_collect.distributed.specs import Specs
from marl_collect.distributed.sync_gathering import SyncGathering
from marl_collect.distributed.vectors import StoredWeights
from marl_collect.options import constructor
from marl_collect.processes import import_guard
from marl_collect.weights.shared import check_factory_weights, check_same_weights


@final
class RayCollector(CollectorBase):
    """Collects in actors on a Ray cluster, each of which runs a local collector.

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

    _backend: "RayBackend"

    @constructor(RayArguments)
    def __init__(self, options: RayArguments) -> None:
        """Start the actors and wait until all of them are ready."""
        import_guard.refuse_during_import("a RayCollector")
        self._open(options, RayBackend(options))

    @property
    def actors(self) -> list[dict[str, Any]]:
        """Index, process id, node id and host of each actor, as of its start."""
        return self._backend.actors

    def add_collectors(
        self,
        count: int = 1,
        create_env_fn: Factory | Sequence[Factory] | None = None,
    ) -> None:
        """Start further actors; they take part from the next batch on.

        The frames per environment do not change, so sync batches become larger. The new
        environments are numbered after all earlier ones.

        Args:
            count: number of actors.
            create_env_fn: as for the collector; None for the collector's own, if that
                is a single factory.
        """
        with self.pause():
            self._check_open()
            self._backend.add(count, create_env_fn)

    def remove_collectors(self, indices: int | Sequence[int]) -> None:
        """End actors, after their current batch.

        Args:
            indices: as in ``actors``.

        Raises:
            ValueError: if an index is unknown, or no actor would be left.
        """
        with self.pause():
            self._check_open()
            self._backend.remove(
                {indices} if isinstance(indices, int) else set(indices)
            )


@final
class RayBackend(Backend):
    """Actors on a Ray cluster, and the trainer's slots for their batches."""

    def __init__(self, options: RayArguments) -> None:
        """Start the actors and wait until all of them are ready."""
        self._options = options
        self._owner = os.getpid()
        self._collecting = threading.RLock()
        policy = chosen_policy(options.policy, options)
        check_can_be_sent(policy, options)
        self._specs = Specs(options.create_env_fn, options)
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._seed = draw_seed(options.seed)
        self._index = 0
        self._cluster = Cluster(options.ray_init_config)
        self._actors = ActorGroup(self._cluster, options, self._seed)
        try:
            self._begin(policy)
            kind = SyncGathering if options.sync else AsyncGathering
            self._gathering: Gathering = kind(self._actors, options)
            self._gathering.check()
        except BaseException:
            self._actors.close(2.0)
            self._cluster.close()
            raise
        self.weights = self._actors.weights

    @property
    @override
    def description(self) -> EnvDescription:
        return self._description

    @property
    def actors(self) -> list[dict[str, Any]]:
        """Index, process id, node id and host of each actor, as of its start."""
        return [
            {
                "index": index,
                "pid": actor.known.pid,
                "node": actor.known.node,
                "host": actor.known.host,
            }
            for index, actor in self._actors.refreshed().items()
        ]

    @override
    def steps(self) -> int:
        return sum(self._actors.steps())

    def explain(self) -> list[str]:
        """Say, for each worker, which path its policy takes, and why."""
        return [line for own in self._actors.ask("explain") for line in own]

    def add(
        self, count: int, create_env_fn: Factory | Sequence[Factory] | None
    ) -> None:
        """Start further actors."""
        self._start(self._specs.more(create_env_fn, count))
        self._gathering.check()

    def remove(self, indices: set[int]) -> None:
        """End actors, after their current batch."""
        found = set(self._actors.handles)
        if not indices <= found or indices == found:
            raise ValueError(
                f"Cannot remove the actors {sorted(indices)}: the collector has the "
                f"actors {sorted(found)}, and at least one must be left."
            )
        for index in sorted(indices):
            self._actors.retire(index)

    def _begin(self, policy: Any) -> None:
        """Start the actors with the policy and its weights."""
        common, specs, actors = self._options, self._specs, self._actors
        module = None
        if not is_random(policy):
            description: Any = None
            if needs_description(policy, trust=common.trust_policy):
                spec = specs.spec(0, specs.factories[0], self._seed)
                description = actors.describe(specs.first_factory, spec)
            trust = common.trust_policy
            module = prepare(policy, description, self._seed, trust=trust)
        actors.weights = StoredWeights(
            self._cluster.ray,
            TrainerPolicy(module, policy),
            lambda: list(staying(actors)),
            specs.workers,
        )
        if common.policy_factory is None:
            specs.use_policy(module)
            actors.weights.begin()
        self._start(specs.factories)
        if common.policy_factory is not None:
            self._share_built()
        handles = list(actors.handles.values())
        self._description = handles[0].known.description
        warn_if_pinned(self._description, sum(actor.size for actor in handles))

    def _start(self, dealt: Sequence[Sequence[Factory]]) -> None:
        fresh = {}
        for factories in dealt:
            fresh[self._index] = self._specs.spec(self._index, factories, self._seed)
            self._index += 1
        self._actors.begin(fresh)

    def _share_built(self) -> None:
        """Give worker 0's weights to all workers; in a population each keeps its own.

        Weights of the trainer, if it has any, take precedence.
        """
        actors, population = self._actors, self._specs.population
        indices = list(actors.handles)
        found = actors.ask_each("vectors", dict.fromkeys(indices, ()))
        layout = found[0][0]
        for index, (other, _) in zip(indices, found, strict=True):
            check_same_weights(layout, other, f"actor {index}", "actor 0")
        given = actors.weights.policy.layout
        if given is not None and given.names:
            check_factory_weights(given, layout)
        if layout is None:
            return
        if given is not None and given.names:
            actors.weights.policy.use_layout(layout)
            actors.weights.begin()
            return
        first = {indices[0]: found[0][1][:1]}
        each = {index: own for index, (_, own) in zip(indices, found, strict=True)}
        actors.weights.adopt(layout, each if population else first)

    def _sizes(self) -> list[int]:
        handles = self._actors.handles.values()
        return [size for actor in handles for size in actor.known.sizes]

    def outline(self) -> str:
        """Describe workers, environments and batch frames, for ``repr``."""
        try:
            frames = f"{self.batch_frames:,} frames a batch"
            return f"{sized_workers(self._sizes())}, {frames}"
        except (AssertionError, ValueError):  # Lost actors say nothing of themselves.
            return "actors are being replaced"

    @property
    @override
    def batch_frames(self) -> int:
        return self._gathering.batch_frames

    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Return a batch of all actors, or of one; see ``Gathering``."""
        with self._collecting:
            return self._gathering.collect(random=random, delivered=delivered)

    @override
    def begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        each = self._specs.workers
        chosen_workers(chosen, each * len(self._actors.handles))
        begins = {index: n * each for n, index in enumerate(self._actors.handles)}
        states = None if chosen is None else self.states()
        if self._gathering.settle() and states is not None:
            # The environments that are not reset repeat the dropped frames.
            running = self.load(states)
            warn_if_not_resumed(self.description, states, running)
            warn_of_a_dropped_batch(self.description)
        parts = {
            index: (None if chosen is None else chosen[begin : begin + each],)
            for index, begin in begins.items()
            if index in self._actors.handles  # Actors that were leaving are gone now.
        }
        self._actors.ask_each("begin_episodes", parts)

    @override
    def reseed(self, seed: int) -> None:
        self._gathering.settle()
        self._actors.reseed(seed)
        self._seed = seed

    @override
    def states(self) -> list[Any]:
        return states_of(self._actors)

    @override
    def load(self, states: list[Any]) -> tuple[int, ...]:
        sizes = {i: m.known.sizes for i, m in staying(self._actors).items()}
        known = [size for own in sizes.values() for size in own]
        if len(states) != len(known):
            raise ValueError(
                f"The state has {len(states)} workers, but this collector has "
                f"{len(known)}: load it into a collector with as many workers."
            )
        for worker, (state, size) in enumerate(zip(states, known, strict=True)):
            check_environments(state, size, worker)
        self._gathering.settle()
        left = list(states)
        running = self._actors.load(
            {i: [left.pop(0) for _ in own] for i, own in sizes.items()}
        )
        self._seed = states[0]["seed"]
        return running

    @override
    def attribute(self, owner: str, name: str) -> list[Any]:
        values: list[Any] = []
        for own in self._actors.ask("attribute", owner, name):
            if isinstance(own, AttributeError):
                raise own
            values += own
        return values

    @override
    def metrics(self) -> dict[str, Any]:
        return self._actors.metrics() | {"slots": self._gathering.slots}

    @override
    def close(self, timeout: float) -> None:
        if os.getpid() != self._owner:
            return  # The actors belong to the process that was forked.
        self._actors.close(timeout)
        # A thread that is collecting must notice this before Ray is stopped.
        if self._collecting.acquire(timeout=timeout):
            self._collecting.release()
        self._cluster.close()
        self._gathering.close()
