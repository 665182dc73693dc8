"""Weights in Ray's object store: stored once per version, shared by all readers.

There is one object for each policy, so what has not changed is neither stored nor sent
again. On its node, a worker has a vector in shared memory. The relay writes parts of
the weights there, and the worker reads them like those of a local trainer.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from marl_collect.collectors import messages
from marl_collect.collectors.broadcaster import WeightUpdate
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.collectors.transport import Ask, WorkerWeights
from marl_collect.distributed.relay import Bytes
from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import WeightLayout, WeightWriter
from marl_collect.weights.skeleton import split_module

FETCH_SECONDS = 60.0
"""Timeout for an object that Ray reports as available."""


@final
@dataclass(frozen=True, eq=False)
class NodeVector:
    """Handle of a worker's vector on its node.

    Attributes:
        layout: of the vector.
        references: to the parts that are written there before the worker reads.
        ranges: begin and end of these parts, in bytes.
        memory: of the vector; the pool fills it in, and drops the references.
        into: memory of the trainer for what the worker publishes.
    """

    layout: WeightLayout
    references: tuple[Any, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    memory: MemoryHandle | None = None
    into: Bytes | None = None

    def attach(self, own: torch.Tensor) -> "NodeReader":
        """Map the vector in the worker."""
        assert self.memory is not None, "The pool has not placed this vector."
        segment = Segment.attach(self.memory)
        shared = torch.frombuffer(segment.buffer, dtype=torch.uint8)
        return NodeReader(shared, own, len(self.layout.ranges))


@final
@dataclass(frozen=True)
class NodeReader:
    """Copies weights between the vector on the node and the worker's own."""

    shared: torch.Tensor
    own: torch.Tensor
    count: int

    def pull(self, place: int) -> Sequence[int]:
        """Copy the whole vector: the policy may have written what has not changed."""
        del place  # The worker is idle while the relay writes, so one is enough.
        self.own.copy_(self.shared)
        return range(self.count)

    def publish_own(self) -> None:
        """Write the worker's own weights to the vector."""
        self.shared.copy_(self.own)


@final
@dataclass(frozen=True, eq=False)
class Stored:
    """Weights in the store; compared by identity.

    Attributes:
        references: Ray's references to the ranges of the layout, in order.
        version: of the weights.
        settings: settings of the policy that have changed since the start.
    """

    references: tuple[Any, ...] = ()
    version: int = 0
    settings: Settings | None = None


@final
@dataclass(eq=False)
class _Reader:
    """What the trainer knows about a worker as a reader of weights.

    Attributes:
        wants: the weights that it uses from its next order on.
        has: the weights that its vector has; None if it has none.
        settings: the settings that it was sent last.
        ordered: the weights of its last order.
    """

    wants: Stored
    has: Stored | None = None
    settings: Settings | None = None
    ordered: Stored | None = None


@final
class StoredWeights(WorkerWeights):
    """Gives every worker its policy, and publishes weights in the object store.

    All workers share one object until some of them get weights of their own. An object
    is dropped from the store when no worker uses it any more.
    """

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        factories: Sequence[Callable[[], Any] | None],
        ray: Any,
        ask: Ask,
    ) -> None:
        """Store the policy's weights, if the trainer has them.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            factories: of each worker's policy, None for the trainer's.
            ray: the module ``ray``.
            ask: sends a command to workers and waits for replies of a type.
        """
        super().__init__(policy, options, factories)
        self._ray = ray
        self._ask = ask
        self._owner = os.getpid()
        self._staged: torch.Tensor | None = None
        self._writer: WeightWriter
        self._newest = self._common = Stored()
        self._readers = [_Reader(self._common) for _ in factories]
        if isinstance(policy.module, nn.Module) and not any(factories):
            assert policy.layout is not None
            self._begin(policy.layout)
            self._skeleton = split_module(policy.module)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._readers)

    def add(self, factories: Sequence[Callable[[], Any] | None]) -> None:
        """Expect further workers, which use the weights that all workers got last."""
        self._factories += factories
        self._readers += [_Reader(self._common) for _ in factories]

    def remove(self, indices: Sequence[int]) -> None:
        """Forget workers."""
        for index in sorted(indices, reverse=True):
            del self._readers[index], self._factories[index]

    # Starting

    @property
    @override
    def _are_published(self) -> bool:
        return self._staged is not None

    @override
    def _attach(self, index: int) -> tuple[Any, int]:
        reader = self._readers[index]
        reader.has = reader.settings = None
        vector = self._vector(reader, reader.wants)
        reader.has = reader.wants
        return vector, 0

    @override
    def _share(self, layout: WeightLayout, sources: range) -> None:
        if not sources:
            self._begin(layout)
            return
        self._stage(layout)
        for index, reader in enumerate(self._readers):
            if index in sources:
                vector = np.zeros(layout.nbytes, np.uint8)
                command = messages.UseWeights(NodeVector(layout, into=vector), True)
                self._ask([index], command, messages.MemoryAttached)
                views = layout.views(torch.from_numpy(vector))
                reader.has = reader.wants = self._put(views, 0, None)
            else:
                reader.wants = self._readers[0].wants
        self._common = self._readers[0].wants

    def use(self, index: int) -> None:
        """Note that a restarted worker has the weights with which it was built."""
        if self._factories[index] is not None:
            self._readers[index].has = self._readers[index].settings = None

    # Orders

    def order(self, index: int) -> messages.Weights:
        """Return an order to act with a worker's newest weights."""
        reader = self._readers[index]
        return self._order(reader, reader.wants)

    def order_again(self, index: int) -> messages.Weights:
        """Return an order with the weights of a worker's last order."""
        reader = self._readers[index]
        return self._order(reader, reader.ordered or reader.wants)

    def forget(self, index: int) -> None:
        """Note that a worker has no order, because it was restarted while idle."""
        self._readers[index].ordered = None

    def close(self) -> None:
        """Drop everything from the store."""
        if os.getpid() != self._owner:
            return  # Ray's locks may be held by threads that this fork does not have.
        for reader in self._readers:
            reader.wants = replace(reader.wants, references=())
            reader.has = reader.ordered = None
        self._newest = self._common = replace(self._common, references=())

    def _order(self, reader: _Reader, stored: Stored) -> messages.Weights:
        if self._staged is None:
            return messages.Weights()
        fresh = reader.has is not stored
        settings = stored.settings
        weights = messages.Weights(
            version=stored.version,
            place=0 if fresh else None,
            handle=self._vector(reader, stored) if fresh else None,
            settings=None if reader.settings is settings else settings,
        )
        reader.has = reader.ordered = stored
        reader.settings = settings
        return weights

    def _vector(self, reader: _Reader, stored: Stored) -> NodeVector:
        """Return a worker's vector, with the parts of these weights that it lacks."""
        layout = self.policy.layout
        assert layout is not None
        held = reader.has.references if reader.has else (None,) * len(layout.ranges)
        lacks = [
            number
            for number, reference in enumerate(stored.references)
            if held[number] is not reference
        ]
        return NodeVector(
            layout,
            tuple(stored.references[number] for number in lacks),
            tuple((layout.ranges[n].begin, layout.ranges[n].end) for n in lacks),
        )

    # Publishing

    def versions(self) -> list[int]:
        """Return the version that each worker uses from its next order on."""
        if self._staged is None:
            return [self.version] * self.workers
        return [reader.wants.version for reader in self._readers]

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return each worker's weights by name; equal weights share one dict."""
        layout = self.policy.layout
        if layout is None or self._staged is None:
            return []
        views: dict[Stored, Mapping[str, torch.Tensor]] = {}
        for stored in dict.fromkeys(reader.wants for reader in self._readers):
            parts = self._ray.get(list(stored.references), timeout=FETCH_SECONDS)
            vector = torch.zeros(layout.nbytes, dtype=torch.uint8)
            if parts:
                np.concatenate(parts, out=vector.numpy())
            tensors = layout.views(vector)
            views[stored] = dict(zip(layout.names, tensors, strict=True))
        return [views[reader.wants] for reader in self._readers]

    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        if self._staged is None:
            raise RuntimeError("The policy has no weights to update.")
        settings = self.policy.settings()
        for part in parts:
            stored = self._put(part.tensors, part.version, settings)
            if part.workers is None:
                self._common = stored
            for index in range(self.workers) if part.workers is None else part.workers:
                self._readers[index].wants = stored

    def _begin(self, layout: WeightLayout) -> None:
        """Store the weights of the trainer's module as version 0."""
        self._stage(layout)
        self._common = self._put(self.policy.tensors(), 0, None)
        for reader in self._readers:
            reader.wants = self._common

    def _stage(self, layout: WeightLayout) -> None:
        self._staged = torch.zeros(layout.nbytes, dtype=torch.uint8)
        versions = np.zeros((1, len(layout.ranges)), np.int64)
        self._writer = WeightWriter(layout, [self._staged], versions)

    def _put(
        self,
        tensors: Sequence[torch.Tensor],
        version: int,
        settings: Settings | None,
    ) -> Stored:
        """Store the ranges that are not those of the newest weights."""
        assert self._staged is not None
        layout = self.policy.layout
        assert layout is not None
        references = list(self._newest.references) or [None] * len(layout.ranges)
        self._newest = Stored()  # Until all ranges are stored.
        changed = self._writer.write(0, tensors)
        for number, weights in enumerate(layout.ranges):
            if references[number] is None or number in changed:
                content = self._staged[weights.begin : weights.end]
                references[number] = self._ray.put(content.numpy())
        self._newest = Stored(tuple(references), version, settings)
        return self._newest
