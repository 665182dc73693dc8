"""Weights in Ray's object store: stored once per version, shared by all readers.

There is one object for each policy, so what has not changed is neither stored nor sent
again. On its node, a worker has a vector in shared memory. The relay writes parts of
the weights there, and the worker reads them like those of a local trainer.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from typing_extensions import override

from marl_collect.collectors.broadcaster import (
    CallWorkers,
    Published,
    WeightUpdate,
    WorkerRecord,
    WorkerWeights,
)
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.distributed.relay import Bytes
from marl_collect.processes.shared_memory import MemoryHandle, Segment
from marl_collect.weights.layout import WeightLayout, lacking
from marl_collect.weights.sending import State
from marl_collect.weights.shared import WeightWriter

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
        return NodeReader(self.layout, shared, own)


@final
@dataclass(frozen=True)
class NodeReader:
    """Copies weights between the vector on the node and the worker's own."""

    layout: WeightLayout
    shared: torch.Tensor
    own: torch.Tensor

    def pull(self, place: int, ranges: Iterable[int]) -> None:
        """Copy ranges of the vector."""
        del place  # The worker is idle while the relay writes, so one is enough.
        own, shared = self.layout.parts(self.own), self.layout.parts(self.shared)
        for index in ranges:
            own[index].copy_(shared[index])

    def publish_own(self) -> None:
        """Write the worker's own weights to the vector."""
        self.shared.copy_(self.own)


@final
@dataclass(eq=False, kw_only=True)
class Stored(Published):
    """Weights in the store.

    Attributes:
        references: Ray's references to the ranges of the layout, in order.
    """

    references: tuple[Any, ...] = ()


@final
class StoredWeights(WorkerWeights[Stored]):
    """Publishes weights in the object store.

    All workers share one object until some of them get weights of their own. An object
    is dropped from the store when no worker uses it any more.
    """

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        factories: Sequence[Callable[[], Any] | None],
        ray: Any,
        call: CallWorkers,
    ) -> None:
        """Store the policy's weights, if the trainer has them.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            factories: of each worker's policy, None for the trainer's.
            ray: the module ``ray``.
            call: lets workers call a method.
        """
        super().__init__(policy, options, factories, call)
        self._ray = ray
        self._owner = os.getpid()
        self._staged: torch.Tensor
        self._writer: WeightWriter
        # The weights written last, and those of each worker.
        self._last = Stored()
        self._wants = [self._last for _ in factories]
        self._records = [WorkerRecord() for _ in factories]
        self._begin()

    @override
    def _share(self, layout: WeightLayout, sources: range) -> None:
        self._staged = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
        self._writer = WeightWriter(layout, [self._staged])
        if not sources:
            self._wants = [self._put(self.policy.tensors(), 0, None)] * self.workers
        for index in sources:
            vector = np.zeros(layout.nbytes, np.uint8)
            handle = NodeVector(layout, into=vector)
            self._call("publish_weights", handle, workers=[index])
            views = layout.views(torch.from_numpy(vector))
            stored = self._put(views, 0, None)
            self._wants[index:] = [stored] * (self.workers - index)
            self._records[index].has = stored

    @override
    def _newest(self, index: int) -> Stored:
        return self._wants[index]

    @override
    def _handle(self, has: Stored | None, published: Stored) -> NodeVector | None:
        """Return a worker's vector, with the parts of these weights that it lacks."""
        if has is published:
            return None
        layout = self.policy.layout
        assert layout is not None
        lacking = self._lacking(has, published)
        parts = [layout.ranges[index] for index in lacking]
        return NodeVector(
            layout,
            tuple(published.references[index] for index in lacking),
            tuple((part.begin, part.end) for part in parts),
        )

    @override
    def close(self) -> None:
        if os.getpid() != self._owner:
            return  # Ray's locks may be held by threads that this fork does not have.
        self._wants = [replace(stored, references=()) for stored in self._wants]
        for record in self._records:
            record.has = record.ordered = None
        self._last = replace(self._last, references=())

    @override
    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        layout = self.policy.layout
        if layout is None or not self._are_published:
            return []
        views: dict[Stored, Mapping[str, torch.Tensor]] = {}
        for stored in dict.fromkeys(self._wants):
            parts = self._ray.get(list(stored.references), timeout=FETCH_SECONDS)
            vector = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
            if parts:
                np.concatenate(parts, out=vector.numpy())
            tensors = layout.views(vector)
            views[stored] = dict(zip(layout.names, tensors, strict=True))
        return [views[stored] for stored in self._wants]

    @override
    def _write_parts(
        self, parts: Sequence[WeightUpdate], settings: State | None
    ) -> None:
        for part in parts:
            stored = self._put(part.tensors, part.version, settings)
            for index in range(self.workers) if part.workers is None else part.workers:
                self._wants[index] = stored

    def _put(
        self, tensors: Sequence[torch.Tensor], version: int, settings: State | None
    ) -> Stored:
        """Store the ranges that are not those of the weights written last."""
        layout = self.policy.layout
        assert layout is not None
        last, self._last = self._last, Stored()  # Until all ranges are stored.
        numbers = layout.renumber(
            tensors, self._writer.places[0], last.numbers, next(self._counter)
        )
        ranges = lacking(numbers, last.numbers)
        self._writer.write(0, tensors, ranges)
        references = list(last.references) or [None] * len(numbers)
        for index in ranges:
            part = layout.ranges[index]
            content = self._staged[part.begin : part.end]
            references[index] = self._ray.put(content.numpy())
        self._last = Stored(
            version=version,
            settings=settings,
            numbers=numbers,
            references=tuple(references),
        )
        return self._last
