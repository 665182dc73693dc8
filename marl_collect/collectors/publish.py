"""Publishes a collector's weights, counts their versions, and orders workers to read.

Weights pass three objects. The collector gets the request for an update. The publisher
numbers the weights and writes them to a slot that workers read. The reader in a worker
copies them from there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from marl_collect.collectors import messages
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.weights.layout import WeightLayout, check_same_weights
from marl_collect.weights.sending import State
from marl_collect.weights.shared import WeightVector
from marl_collect.weights.skeleton import split_module

CallWorkers = Callable[..., list[Any]]
"""``Workers.call``."""

WeightUpdate = tuple[Sequence[torch.Tensor], Sequence[int] | None, int]
"""Weights in the order of the layout, the workers (None: all), and the version."""


class Publisher:
    """Owns the only version counter of a collector's weights.

    This one publishes to a collector that acts with the trainer's module itself.

    Attributes:
        policy: provides the tensors to publish.
        workers: their number.
        version: of the last published weights.
    """

    _readers: Sequence["_Reader"] = ()  # The workers, if they read what is published.

    def __init__(self, policy: TrainerPolicy, workers: int = 1) -> None:
        """Start at version 0, that of the initial weights."""
        self.policy = policy
        self.workers = workers
        self.version = 0

    @property
    def can_update(self) -> bool:
        """Whether there is something to publish, here or in the workers."""
        return self.policy.layout is not None

    def versions(self) -> list[int]:
        """Return the version that each worker uses from its next batch on."""
        versions = [reader.newest.version for reader in self._readers]
        return versions or [self.version] * self.workers

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the weights of each worker by name; they are read-only.

        The list is empty if the trainer's module has the weights, or if there are none.
        """
        return []

    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        """Write weights for the next batches: all parts or none."""
        for tensors, _, _ in parts:
            self.policy.load(tensors)

    def warn_if_stale(self) -> None:
        """Warn if the module was trained, but the workers' copies were not updated."""

    def publish(
        self, *parts: tuple[Sequence[torch.Tensor], Sequence[int] | None]
    ) -> None:
        """Publish a new version.

        Args:
            parts: weights in the order of the layout, with its shapes and dtypes, and
                the workers that get them; None for all.
        """
        version = self.version + 1
        self.restore([(*part, version) for part in parts], version)

    def restore(self, parts: Sequence[WeightUpdate], version: int) -> None:
        """Publish weights under their versions, such as those of a state.

        Args:
            parts: for some workers or all; empty if the policy has no weights.
            version: of the last published weights.
        """
        if parts:
            self._write(parts)
        self.version = version
        self.policy.published()


@final
@dataclass(frozen=True, eq=False)
class Published:
    """Weights that workers can read.

    Attributes:
        weights_slot: in the vector.
        version: of the weights.
        state: changes of the module's state since the start.
    """

    weights_slot: int
    version: int = 0
    state: State | None = None


@final
@dataclass(eq=False)
class _Reader:
    """What the trainer knows about a worker that reads weights.

    Attributes:
        newest: the weights that it uses from its next order on.
        ordered: the weights that it has, or was last ordered to read; None if neither.
        state: that it was sent last.
        attached: the slots that it can read.
        order: number of the last order.
    """

    newest: Published
    ordered: Published | None = None
    state: State | None = None
    attached: set[int] = field(default_factory=set)
    order: int = 0


@final
class WorkerWeights(Publisher):
    """Publishes weights to workers, and gives each worker its policy.

    A vector has several slots. An update takes one that no worker still has to read,
    so it never waits. Each worker has its own newest weights: those of the last update
    that named it. A replacement reads them too.
    """

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        workers: int,
        open_vector: Callable[[WeightLayout], WeightVector],
        last_read: Callable[[int], int],
    ) -> None:
        """Publish the weights of the trainer's policy, if workers act with a copy.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            workers: their number.
            open_vector: returns a vector without slots.
            last_read: returns the number of the last order whose weights a worker is
                known to have copied; see ``WorkerPool.weights_read``.
        """
        super().__init__(policy, workers)
        self._options = options
        self._factories = options.policy_factories(workers)
        # Whether there is a list of factories, one per worker.
        self._is_population = isinstance(options.policy_factory, Sequence)
        self._open_vector = open_vector
        self._last_read = last_read
        self._orders = 0
        self._readers: list[_Reader] = []
        self._vector: WeightVector
        module, layout = policy.module, policy.layout
        if isinstance(module, nn.Module) and not any(self._factories):
            assert layout is not None
            self._share(layout)
            self._skeleton = split_module(module)

    # Starting

    def policy_for(self, index: int) -> Any:
        """Return a worker's policy with current weights, as ``prepare`` takes it."""
        factory = self._factories[index]
        if factory is not None:
            number = index if self._is_population else 0
            trust = self._options.trust_policy
            follows = self.policy.structure
            return messages.FactoryPolicy(factory, number, trust, follows)
        module, layout = self.policy.module, self.policy.layout
        if module is None or layout is None or not self._readers:
            return module
        newest = self._readers[index].newest
        self._readers[index] = _Reader(newest, newest, attached={newest.weights_slot})
        handle = self._vector.handle(newest.weights_slot)
        slot = newest.weights_slot
        return messages.SkeletonPolicy(self._skeleton, layout, handle, slot)

    def share(self, layouts: Sequence[WeightLayout | None], call: CallWorkers) -> None:
        """Publish the weights of policies that workers have built.

        Args:
            layouts: layout of each worker's weights, None if it has none.
            call: lets workers call a method.

        Raises:
            ValueError: if the policy of a worker has other tensors than that of worker
                0 or of the trainer.
        """
        layout = layouts[0]
        if not any(self._factories):
            return
        for index, other in enumerate(layouts):
            why = f"Worker {index} acts with the same network as worker 0"
            check_same_weights(layout, other, "worker 0", why, ordered=True)
        of_trainer = bool(self.policy.names)
        if of_trainer:
            why = (
                "policy supplies the weights of the policies that policy_factory builds"
            )
            check_same_weights(self.policy.layout, layout, "policy", why)
        if layout is None:
            return
        self.policy.layout = layout
        if of_trainer:
            self._share(layout)
            return
        # In a population each worker keeps its own weights. Otherwise all workers get
        # those of worker 0.
        sources = range(self.workers if self._is_population else 1)
        vector = self._vector = self._open_vector(layout)
        own = [Published(vector.filled(call, worker)) for worker in sources]
        self._readers = [_Reader(p, p, attached={p.weights_slot}) for p in own]
        self._readers += [_Reader(own[0]) for _ in range(self.workers - len(own))]

    def _share(self, layout: WeightLayout) -> None:
        """Publish the trainer's weights for the first time."""
        self._vector = self._open_vector(layout)
        first = Published(self._vector.write(self.policy.tensors(), ()))
        self._readers = [_Reader(first) for _ in self._factories]

    def use(self, index: int, layout: WeightLayout | None) -> None:
        """Note that a new or restarted worker has the weights of its factory's policy.

        Args:
            index: of the worker.
            layout: of its policy's weights, None if it has none.

        Raises:
            ValueError: if its policy has other tensors than those of the other workers.
        """
        if self._readers and self._factories[index] is not None:
            why = f"Worker {index} acts with the same network as the first workers"
            expected = self.policy.layout
            check_same_weights(expected, layout, "theirs", why, ordered=True)
            self._readers[index] = _Reader(self._readers[index].newest)

    # Orders

    def order(self, index: int) -> messages.Weights:
        """Return an order to act with a worker's newest weights."""
        if not self._readers:
            return messages.Weights()
        reader = self._readers[index]
        newest = reader.newest
        weights_slot = None if reader.ordered is newest else newest.weights_slot
        handle = None
        if weights_slot is not None and weights_slot not in reader.attached:
            handle = self._vector.handle(weights_slot)
            reader.attached.add(weights_slot)
        state = None if reader.state is newest.state else newest.state
        self._orders += 1
        reader.order, reader.ordered, reader.state = self._orders, newest, newest.state
        return messages.Weights(
            order=self._orders,
            version=newest.version,
            weights_slot=weights_slot,
            handle=handle,
            state=state,
        )

    # Publishing

    @override
    def warn_if_stale(self) -> None:
        self.policy.warn_if_stale(self.version)

    @property
    @override
    def can_update(self) -> bool:
        # A module without weights has attributes, if it is in this process.
        here = self.policy.module is not None
        return bool(self._readers) and (here or bool(self.policy.names))

    @override
    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        names = self.policy.names
        by_slot = {
            slot: dict(zip(names, self._vector.tensors(slot), strict=True))
            for slot in {reader.newest.weights_slot for reader in self._readers}
        }
        return [by_slot[reader.newest.weights_slot] for reader in self._readers]

    @override
    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        if not self._readers:
            raise RuntimeError("The policy has no weights to update.")
        state = self.policy.state()
        used = {reader.newest.weights_slot for reader in self._readers}
        used |= {
            reader.ordered.weights_slot
            for index, reader in enumerate(self._readers)
            if reader.ordered is not None and self._last_read(index) != reader.order
        }
        newest: dict[int, Published] = {}
        for tensors, workers, version in parts:
            weights_slot = self._vector.write(tensors, used)
            used.add(weights_slot)
            published = Published(weights_slot, version, state)
            chosen = range(self.workers) if workers is None else workers
            newest |= dict.fromkeys(chosen, published)
        # Only now, so an error leaves all workers with their weights.
        for index, published in newest.items():
            self._readers[index].newest = published

    def close(self) -> None:
        """Release the memory; also if publishing has failed half-way."""
        if hasattr(self, "_vector"):
            self._vector.close()
