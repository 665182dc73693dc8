"""The collector whose environments live on the nodes of a Ray cluster."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn

from marl_collect.collectors.assigning import (
    chosen_workers,
    draw_seed,
    sized_workers,
)
from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.batches import Filled
from marl_collect.collectors.checkpoint import (
    check_environments,
    warn_if_elsewhere,
    warn_of_a_dropped_batch,
)
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    check_policy,
    is_random,
    needs_description,
    prepare,
)
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, warn_if_pinned
from marl_collect.distributed.actor_group import Fleet
from marl_collect.distributed.async_gathering import ByTurns
from marl_collect.distributed.cluster import Cluster
from marl_collect.distributed.gathering import Counters, Gathering, states_of, staying
from marl_collect.distributed.ray_options import RayArguments
from marl_collect.distributed.specs import Specs
from marl_collect.distributed.sync_gathering import Together
from marl_collect.distributed.vectors import StoredWeights
from marl_collect.options import constructor
from marl_collect.processes import import_guard
from marl_collect.weights.shared import check_alike_weights, check_built
from marl_collect.weights.skeleton import take_apart


@final
class RayCollector(CollectorBase):
    """Collects in actors on a Ray cluster, each of which runs a local collector.

    With ``sync=True`` a batch has the frames of all actors, in their order, and for
    equal seeds the same content as a ``MultiSyncCollector`` over the same factories.
    Else every batch is one actor's, as those of a ``MultiAsyncCollector`` are one
    worker's. Batches are the trainer's own memory, and live for as long as any tensor
    of them is held.

    This process joins the Ray that it is connected to; without one, it connects to
    ``RAY_ADDRESS`` or starts a local Ray, which ends with the collector.

    The arguments are the fields of
    ``RayArguments``.

    Raises:
        ImportError: without Ray.
        WorkerError: if an actor is lost and cannot be replaced.
    """

    @constructor(RayArguments)
    def __init__(self, options: RayArguments) -> None:
        """Start the actors and wait until all of them are ready."""
        import_guard.refuse_during_import("a RayCollector")
        policy = options.policy
        check_policy(policy, options.policy_factory)
        if isinstance(policy, nn.Module) and options.policy_factory is None:
            take_apart(policy)  # What cannot travel is an error before any start.
        self._specs = Specs(options.create_env_fn, options)
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        self._seed = draw_seed(options.seed)
        self._index = 0
        self._cluster = Cluster(options.ray_init_config)
        self._fleet = Fleet(self._cluster, options, self._seed)
        try:
            self._begin(policy, options)
            counters = Counters(lambda: self.frames)
            kind = Together if options.sync else ByTurns
            self._gathering: Gathering = kind(self._fleet, options, counters)
            self._gathering.check()
        except BaseException:
            self._fleet.close(2.0)
            self._cluster.close()
            raise
        self._open(options, self._fleet.weights, self._sizes())

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._description

    @property
    def actors(self) -> list[dict[str, Any]]:
        """Index, process id, node id and host of each actor, as of its start."""
        return [
            {
                "index": index,
                "pid": member.known.pid,
                "node": member.known.node,
                "host": member.known.host,
            }
            for index, member in self._fleet.refreshed().items()
        ]

    def steps_so_far(self) -> int:
        """Return the frames stepped so far, also of batches in the making."""
        return sum(self._fleet.steps())

    def explain(self) -> list[str]:
        """Say, for each worker, which path its policy takes, and why."""
        self._check_open()
        return [line for own in self._fleet.ask("explain") for line in own]

    # Elastic

    def add_collectors(
        self,
        count: int = 1,
        create_env_fn: Factory | Sequence[Factory] | None = None,
    ) -> None:
        """Start further actors; they take part from the next order on.

        Every environment gives as many frames per batch as before, so sync batches
        become larger. Their environments are numbered after all that there were.

        Args:
            count: of actors.
            create_env_fn: as for the collector; None for its own, if that is one.
        """
        with self.pause():
            self._check_open()
            dealt = self._specs.more(create_env_fn, count)
            self._add(dealt)
            self._gathering.check()

    def remove_collectors(self, indices: int | Sequence[int]) -> None:
        """End actors, after the batch that they are collecting.

        Args:
            indices: as in ``actors``.

        Raises:
            ValueError: if there is no such actor, or none would be left.
        """
        chosen = {indices} if isinstance(indices, int) else set(indices)
        with self.pause():
            self._check_open()
            found = set(self._fleet.members)
            if not chosen <= found or chosen == found:
                raise ValueError(
                    f"Some of the actors {sorted(found)} can be removed, but not "
                    f"{sorted(chosen)}: one must be left."
                )
            for index in sorted(chosen):
                self._fleet.retire(index)

    # What its kind decides

    def _begin(self, policy: Any, common: CollectorOptions) -> None:
        """Start the actors with the policy, and give all of them its weights."""
        specs, fleet = self._specs, self._fleet
        module = None
        if not is_random(policy):
            description: Any = None
            if needs_description(policy, trust=common.trust_policy):
                spec = specs.spec(0, specs.factories[0], self._seed)
                description = fleet.describe(specs.first_factory, spec)
            trust = common.trust_policy
            module = prepare(policy, description, self._seed, trust=trust)
        fleet.weights = StoredWeights(
            self._cluster.ray,
            TrainerPolicy(module, policy),
            lambda: list(staying(fleet)),
            specs.workers,
        )
        if common.policy_factory is None:
            specs.use_policy(module)
            fleet.weights.begin()
        self._add(specs.factories)
        if common.policy_factory is not None:
            self._share_built()
        members = list(fleet.members.values())
        self._description = members[0].known.description
        warn_if_pinned(self._description, sum(member.size for member in members))

    def _add(self, dealt: Sequence[Sequence[Factory]]) -> None:
        fresh = {}
        for factories in dealt:
            fresh[self._index] = self._specs.spec(self._index, factories, self._seed)
            self._index += 1
        self._fleet.begin(fresh)

    def _share_built(self) -> None:
        """Make worker 0's weights everyone's, or in a population each its own.

        Weights of the trainer, if it has any, come before both.
        """
        fleet, population = self._fleet, self._specs.population
        indices = list(fleet.members)
        found = fleet.ask_each("vectors", dict.fromkeys(indices, ()))
        layout = found[0][0]
        for index, (other, _) in zip(indices, found, strict=True):
            check_alike_weights(layout, other, f"actor {index}", "actor 0")
        given = fleet.weights.policy.layout
        if given is not None and given.names:
            check_built(given, layout)
        if layout is None:
            return
        if given is not None and given.names:
            fleet.weights.policy.use_layout(layout)
            fleet.weights.begin()
            return
        first = {indices[0]: found[0][1][:1]}
        each = {index: own for index, (_, own) in zip(indices, found, strict=True)}
        fleet.weights.adopt(layout, each if population else first)

    def _sizes(self) -> list[int]:
        members = self._fleet.members.values()
        return [size for member in members for size in member.known.sizes]

    def _outline(self) -> str:
        try:
            frames = f"{self._batch_frames():,} frames a batch"
            return f"{sized_workers(self._sizes())}, {frames}"
        except (AssertionError, ValueError):  # Lost actors say nothing of themselves.
            return "actors are being replaced"

    def _batch_frames(self) -> int:
        return self._gathering.batch_frames

    def _collect(self, *, random: bool) -> Filled:
        filled = self._gathering.collect(random=random)
        self._delivery.resize(self._gathering.workers)
        return filled

    def _begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        each = self._specs.workers
        chosen_workers(chosen, each * len(self._fleet.members))
        begins = {index: n * each for n, index in enumerate(self._fleet.members)}
        states = None if chosen is None else self._worker_states()
        if self._gathering.settle() and states is not None:
            # The frames that were dropped are collected again by who goes on.
            running = self._load_worker_states(states)
            warn_if_elsewhere(self.description, states, running, stacklevel=4)
            warn_of_a_dropped_batch(self.description)
        parts = {
            index: (None if chosen is None else chosen[begin : begin + each],)
            for index, begin in begins.items()
            if index in self._fleet.members  # Some may have been about to leave.
        }
        self._fleet.ask_each("begin_episodes", parts)

    def _reseed(self, seed: int) -> None:
        self._gathering.settle()
        self._fleet.reseed(seed)
        self._seed = seed

    def _worker_states(self) -> list[Any]:
        return states_of(self._fleet)

    def _load_worker_states(self, states: list[Any]) -> tuple[int, ...]:
        sizes = {i: m.known.sizes for i, m in staying(self._fleet).items()}
        known = [size for own in sizes.values() for size in own]
        if len(states) != len(known):
            raise ValueError(
                f"The state is of {len(states)} workers, but this collector has "
                f"{len(known)}."
            )
        for worker, (state, size) in enumerate(zip(states, known, strict=True)):
            check_environments(state, size, worker)
        self._gathering.settle()
        left = list(states)
        running = self._fleet.load(
            {i: [left.pop(0) for _ in own] for i, own in sizes.items()}
        )
        self._seed = states[0]["seed"]
        return running

    def _attribute(self, owner: str, name: str) -> list[Any]:
        values: list[Any] = []
        for own in self._fleet.ask("attribute", owner, name):
            if isinstance(own, AttributeError):
                raise own
            values += own
        return values

    def _warn_if_stale(self) -> None:
        self._policy.warn_if_stale(self.policy_version)

    def _metrics(self) -> dict[str, Any]:
        return self._fleet.figures() | {"slots": self._gathering.slots}

    def _close(self, timeout: float) -> None:
        if self._foreign:  # The actors are those of the process that goes on.
            return
        self._fleet.close(timeout)
        # A thread that collects hears of it at once; Ray is stopped after that.
        if self._lock.acquire(timeout=timeout):
            self._lock.release()
        self._cluster.close()
        self._gathering.close()
