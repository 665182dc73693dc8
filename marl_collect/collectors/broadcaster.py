"""Publishes a collector's weights, counts their versions, and orders workers to read.

Weights pass three objects. The collector gets the request for an update. The
broadcaster numbers the weights and writes them to a place that workers read. The reader
in a worker copies them from there.
"""

import abc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, final

import torch
from torch import nn
from typing_extensions import override

from marl_collect.collectors import messages
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.errors import ClosedError
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.status_board import PHASE, WEIGHTS_READ, Phase
from marl_collect.weights.layout import WeightLayout, check_same_weights, lacking
from marl_collect.weights.sending import State
from marl_collect.weights.shared import PLACES, Handle, Publisher
from marl_collect.weights.skeleton import split_module

CallWorkers = Callable[..., list[Any]]
"""``Workers.call``."""
Check = Callable[[Sequence[int]], None]

_PAUSE = 0.0002  # Seconds between two checks. Workers read without delay.


@final
@dataclass(slots=True)  # Not frozen: creating frozen objects takes longer.
class WeightUpdate:
    """New weights and the workers that get them.

    Attributes:
        tensors: in the order of the layout.
        workers: their indices, None for all.
        version: of these weights.
    """

    tensors: Sequence[torch.Tensor]
    workers: Sequence[int] | None
    version: int


class WeightBroadcaster(abc.ABC):
    """Owns the only version counter of a collector's weights.

    Attributes:
        policy: provides the tensors to publish.
        version: of the last published weights.
    """

    def __init__(self, policy: TrainerPolicy) -> None:
        """Start at version 0, that of the initial weights."""
        self.policy = policy
        self.version = 0

    @property
    @abc.abstractmethod
    def workers(self) -> int:
        """Number of workers."""

    @abc.abstractmethod
    def versions(self) -> list[int]:
        """Return the version that each worker uses from its next batch on."""

    @abc.abstractmethod
    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the weights of each worker by name; they are read-only.

        The list is empty if the trainer's module has the weights, or if there are none.
        """

    @abc.abstractmethod
    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        """Write weights for the next batches: all parts or none."""

    def warn_if_stale(self) -> None:
        """Warn if the module was trained, but the workers' copies were not updated."""
        self.policy.warn_if_stale(self.version)

    @final
    def publish(
        self,
        tensors: Sequence[torch.Tensor],
        workers: Sequence[int] | None = None,
    ) -> None:
        """Publish a new version, for all workers or some.

        Args:
            tensors: in the order of the layout, with its shapes and dtypes.
            workers: their indices, None for all.

        Raises:
            ValueError: if a worker does not exist, or if ``workers`` is empty.
            WorkerError: if a worker died before it had read older weights.
        """
        self._publish([WeightUpdate(tensors, workers, self.version + 1)])

    @final
    def publish_each(self, sources: Mapping[int, Any]) -> None:
        """Publish a new version with different weights for each of these workers.

        Args:
            sources: a module, a state_dict or a TensorDict by worker index.
        """
        version = self.version + 1
        tensors = self.policy.tensors
        self._publish(
            [
                WeightUpdate(tensors(source), [index], version)
                for index, source in sources.items()
            ]
        )

    @final
    def state(self) -> dict[str, Any]:
        """Return copies of all workers' weights with their versions, as plain data."""
        published = self.weights()
        if all(_same(published[0], other) for other in published[1:]):
            published = published[:1]
        return {
            "policy_version": self.version,
            "policy_versions": self.versions(),
            "published": [
                {name: tensor.clone() for name, tensor in weights.items()}
                for weights in published
            ],
        }

    @final
    def restore(self, parts: Sequence[WeightUpdate], version: int) -> None:
        """Restore the weights and versions of a state.

        Args:
            parts: for all workers; empty if the policy has no weights.
            version: of the last published weights.
        """
        if parts:
            self._write(parts)
        self.version = version
        self.policy.published()

    def _publish(self, parts: Sequence[WeightUpdate]) -> None:
        for part in parts:
            self._check_workers(part.workers)
        self._write(parts)
        self.version += 1
        self.policy.published()

    def _check_workers(self, chosen: Sequence[int] | None) -> None:
        if chosen is None:
            return
        for worker in chosen:
            if not 0 <= worker < self.workers:
                raise ValueError(
                    f"worker_ids names worker {worker} of {self.workers}: indices are "
                    f"0 to {self.workers - 1}."
                )
        if not chosen:
            raise ValueError("worker_ids names no worker; None selects all of them.")


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one is other or all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@final
class OwnWeights(WeightBroadcaster):
    """Weights of a collector that acts with the trainer's module itself."""

    @property
    def workers(self) -> int:
        """One; the collector itself."""
        return 1

    def versions(self) -> list[int]:
        """Return the last published version."""
        return [self.version]

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return an empty list, because the module has the weights."""
        return []

    def warn_if_stale(self) -> None:
        """Do nothing: the policy that acts is the trained module itself."""

    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        for part in parts:
            self.policy.load(part.tensors)


@dataclass(eq=False, kw_only=True)
class Published:
    """Weights that workers can read; compared by identity.

    Attributes:
        version: of the weights.
        settings: changes of the module's settings since the start.
        place: where a worker's reader finds them.
        numbers: of the layout's ranges; equal numbers mean equal bytes.
    """

    version: int = 0
    settings: State | None = None
    place: int = 0
    numbers: tuple[int, ...] = ()


P = TypeVar("P", bound=Published)


@dataclass(eq=False)
class WorkerRecord(Generic[P]):
    """What the trainer knows about a worker that reads weights.

    Attributes:
        has: the weights that it acts with after executing all orders, None if unknown.
        settings: the settings that it was sent last.
        ordered: the weights of its last order.
        order: number of that order.
    """

    has: P | None = None
    settings: State | None = None
    ordered: P | None = None
    order: int = 0


class WorkerWeights(WeightBroadcaster, Generic[P]):
    """Publishes weights to workers, and gives each worker its policy."""

    _records: list[WorkerRecord[P]]
    _skeleton: Any  # Of the trainer's module, if workers get that.
    # Whether the weights of a worker's last order exist until it is done.
    _keeps_ordered = True

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        factories: Sequence[Callable[[], Any] | None],
        call: CallWorkers,
    ) -> None:
        """Publish nothing yet.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            factories: of each worker's policy, None for the trainer's.
            call: lets workers call a method.
        """
        super().__init__(policy)
        self._options = options
        self._factories = list(factories)
        self._call = call
        self._orders = 0
        self._are_published = False
        self._counter = itertools.count()  # Of contents of ranges.

    @property
    @override
    def workers(self) -> int:
        return len(self._factories)

    @property
    def _is_population(self) -> bool:
        """Whether there is a list of factories, one per worker."""
        return isinstance(self._options.policy_factory, Sequence)

    # Starting

    def _begin(self) -> None:
        """Publish the weights of the trainer's policy, if workers act with a copy."""
        module, layout = self.policy.module, self.policy.layout
        if isinstance(module, nn.Module) and not any(self._factories):
            assert layout is not None
            self._share(layout, range(0))
            self._are_published = True
            self._skeleton = split_module(module)

    @final
    def policy_for(self, index: int) -> Any:
        """Return a worker's policy with current weights, as ``prepare`` takes it."""
        factory = self._factories[index]
        if factory is not None:
            number = index if self._is_population else 0
            trust = self._options.trust_policy
            return messages.FactoryPolicy(factory, number, trust)
        module = self.policy.module
        if module is None:
            return None
        if not self._are_published:
            return module
        newest, record = self._newest(index), self._records[index]
        handle = self._handle(None, newest)
        record.has, record.settings = newest, None
        assert handle is not None
        return messages.SkeletonPolicy(self._skeleton, handle, newest.place)

    @final
    def share(self, layouts: Sequence[WeightLayout | None]) -> None:
        """Publish the weights of policies that workers have built.

        Args:
            layouts: layout of each worker's weights, None if it has none.

        Raises:
            ValueError: if the policy of a worker has other tensors than that of worker
                0 or of the trainer.
        """
        layout = layouts[0]
        if not any(self._factories):
            return
        for index, other in enumerate(layouts):
            why = f"Worker {index} acts with the same network as worker 0"
            check_same_weights(layout, other, "worker 0", why)
        of_trainer = bool(self.policy.names)
        if of_trainer:
            why = (
                "policy supplies the weights of the policies that policy_factory builds"
            )
            check_same_weights(self.policy.layout, layout, "policy", why)
        if layout is None:
            return
        for other in layouts:
            _check_same_order(layout, other)
        self.policy.use_layout(layout)
        # Unless the trainer has weights, all workers get those of worker 0. In a
        # population each worker keeps its own.
        sources = range(self.workers if self._is_population else 1)
        self._share(layout, range(0) if of_trainer else sources)
        self._are_published = True

    @final
    def use(self, index: int, layout: WeightLayout | None) -> None:
        """Note that a new or restarted worker has the weights of its factory's policy.

        Args:
            index: of the worker.
            layout: of its policy's weights, None if it has none.

        Raises:
            ValueError: if its policy has other tensors than those of the other workers.
        """
        if self._are_published and self._factories[index] is not None:
            why = f"Worker {index} acts with the same network as the first workers"
            check_same_weights(self.policy.layout, layout, "theirs", why)
            _check_same_order(self.policy.layout, layout)
            record = self._records[index]
            record.has = record.settings = None

    @abc.abstractmethod
    def _share(self, layout: WeightLayout, sources: range) -> None:
        """Publish weights of this layout for the first time.

        Args:
            layout: of every worker's weights.
            sources: workers whose own weights are published: none if the trainer's
                are, the first for all workers, or each worker for itself.
        """

    @abc.abstractmethod
    def _newest(self, index: int) -> P:
        """Return the weights that a worker uses from its next order on."""

    @abc.abstractmethod
    def _handle(self, has: P | None, published: P) -> Handle | None:
        """Return what a worker needs for reading weights, None if it has it."""

    # Orders

    @final
    def order(self, index: int) -> messages.Weights:
        """Return an order to act with a worker's newest weights."""
        return self._order(index, None)

    @final
    def order_again(self, index: int) -> messages.Weights:
        """Return an order for a restarted worker that repeats its last one.

        It has the newest weights if those of the last order may be overwritten.
        """
        repeats = self._are_published and self._keeps_ordered
        return self._order(index, self._records[index].ordered if repeats else None)

    @final
    def forget(self, index: int) -> None:
        """Note that a worker has no order, because it was restarted while idle."""
        if self._are_published:
            self._records[index].ordered = None

    def _order(self, index: int, published: P | None) -> messages.Weights:
        if not self._are_published:
            return messages.Weights()
        published = published or self._newest(index)
        record, settings = self._records[index], published.settings
        self._orders += 1
        weights = messages.Weights(
            order=self._orders,
            version=published.version,
            place=None if record.has is published else published.place,
            ranges=self._lacking(record.has, published),
            handle=self._handle(record.has, published),
            settings=None if record.settings is settings else settings,
        )
        record.order, record.settings = self._orders, settings
        record.ordered = record.has = published
        return weights

    @final
    def _lacking(self, has: P | None, published: P) -> tuple[int, ...]:
        """Return the indices of the ranges that a worker lacks of these weights."""
        return lacking(published.numbers, has.numbers if has else ())

    # Publishing

    @override
    def versions(self) -> list[int]:
        if not self._are_published:
            return [self.version] * self.workers
        return [self._newest(index).version for index in range(self.workers)]

    @override
    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        if not self._are_published:
            raise RuntimeError("The policy has no weights to update.")
        # What a factory built has settings of its own.
        settings = None if any(self._factories) else self.policy.settings()
        self._write_parts(parts, settings)

    @abc.abstractmethod
    def _write_parts(
        self, parts: Sequence[WeightUpdate], settings: State | None
    ) -> None:
        """Write weights with these settings: all parts or none."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory."""


@final
@dataclass(eq=False, kw_only=True)
class VectorPlace(Published):
    """Weights at a place of a shared vector.

    Attributes:
        vector: the vector.
    """

    vector: "SharedVector"


@final
class SharedVector:
    """A shared vector and the weights at each of its places.

    Attributes:
        publisher: writes to the vector.
        newest: the weights that were written last.
    """

    def __init__(
        self, publisher: Publisher, layout: WeightLayout, counter: Iterator[int]
    ) -> None:
        """Begin with what is at place 0: zeros, or what a worker writes there.

        Args:
            publisher: writes to the vector.
            layout: of the vector.
            counter: numbers the contents of ranges, in all vectors that workers read.
        """
        self.publisher = publisher
        self._layout = layout
        self._counter = counter
        self._at: list[VectorPlace | None] = [None] * PLACES
        numbers = (next(counter),) * len(layout.ranges)
        self.newest = self._at[0] = VectorPlace(vector=self, numbers=numbers)

    @property
    def replaced(self) -> VectorPlace | None:
        """The weights that the next write overwrites."""
        return self._at[(self.newest.place + 1) % PLACES]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The newest weights; they are read-only."""
        return self.publisher.read(self.newest.place)

    def write(
        self, tensors: Sequence[torch.Tensor], version: int, settings: State | None
    ) -> None:
        """Write a new version to the place of the version before the newest."""
        newest = self.newest
        numbers = self._layout.renumber(
            tensors, self.tensors, newest.numbers, next(self._counter)
        )
        place = (newest.place + 1) % PLACES
        # If the write is interrupted, the next one writes all ranges.
        replaced, self._at[place] = self._at[place], None
        ranges = lacking(numbers, replaced.numbers if replaced else ())
        self.publisher.write(place, tensors, ranges)
        self.newest = self._at[place] = VectorPlace(
            version=version,
            settings=settings,
            place=place,
            numbers=numbers,
            vector=self,
        )


@final
class SharedWeights(WorkerWeights[VectorPlace]):
    """Publishes weights in shared memory, in one vector or one per worker.

    All workers read the same vector until an update selects some of them. These get
    separate vectors, permanently. A place of a vector is overwritten only after every
    worker that was ordered to read it has read it.
    """

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        pool: WorkerPool,
        call: CallWorkers,
        check: Check,
    ) -> None:
        """Publish the policy's weights, if the trainer has them.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            pool: the workers.
            call: lets workers call a method.
            check: checks that workers are alive and make progress.
        """
        super().__init__(policy, options, factories_of(options, len(pool)), call)
        self._pool = pool
        self._check = check
        # A restarted worker reads the version of its batch again.
        self._keeps_ordered = options.on_worker_failure == "restart" and bool(
            options.prefetch
        )
        self._records = [WorkerRecord() for _ in range(self.workers)]
        self._vectors: list[SharedVector] = []  # Of each worker.
        self._begin()

    @override
    def _share(self, layout: WeightLayout, sources: range) -> None:
        self._vectors = [self._open(layout)] * self.workers
        if not sources:
            self._vectors[0].write(self.policy.tensors(), 0, None)
        for index in sources[1:]:
            self._vectors[index] = self._open(layout)
        for index in sources:
            vector = self._vectors[index]
            handle = vector.publisher.handle
            self._call("publish_weights", handle, workers=[index])
            self._records[index].has = vector.newest

    def _open(self, layout: WeightLayout) -> SharedVector:
        publisher = self._options.weight_scheme.open(layout)
        return SharedVector(publisher, layout, self._counter)

    @override
    def _newest(self, index: int) -> VectorPlace:
        return self._vectors[index].newest

    @override
    def _handle(self, has: VectorPlace | None, published: VectorPlace) -> Handle | None:
        vector = published.vector
        return None if has and has.vector is vector else vector.publisher.handle

    @override
    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        names = self.policy.names
        return [
            dict(zip(names, vector.tensors, strict=True)) for vector in self._vectors
        ]

    @override
    def close(self) -> None:
        for vector in set(self._vectors):
            vector.publisher.close()
        # Breaks a reference cycle, so the memory is freed at once.
        self._call = self._check = _closed

    @override
    def _write_parts(
        self, parts: Sequence[WeightUpdate], settings: State | None
    ) -> None:
        for part in parts:
            if part.workers is not None:
                self._separate(part.workers)
        targets = [
            (
                dict.fromkeys(
                    self._vectors
                    if part.workers is None
                    else [self._vectors[index] for index in part.workers]
                ),
                part,
            )
            for part in parts
        ]
        # Wait for all before writing, so an error leaves all versions complete.
        for vectors, _ in targets:
            for vector in vectors:
                self._wait_until_read(vector)
        for vectors, part in targets:
            for vector in vectors:
                vector.write(part.tensors, part.version, settings)

    def _separate(self, workers: Sequence[int]) -> None:
        """Give these workers vectors that no other worker reads."""
        for index in set(workers):
            shared = self._vectors[index]
            others = [w for w, vector in enumerate(self._vectors) if vector is shared]
            if set(others) <= set(workers):
                continue
            assert self.policy.layout is not None
            vector = self._open(self.policy.layout)
            # Complete from the start, in case the update fails.
            newest = shared.newest
            vector.write(shared.tensors, newest.version, newest.settings)
            self._vectors[index] = vector

    def _wait_until_read(self, vector: SharedVector) -> None:
        """Wait until all workers have read the weights that the next write overwrites.

        Raises:
            WorkerError: if a worker dies or hangs before it has read them.
        """
        replaced = vector.replaced
        if replaced is None:
            return
        while waiting := [
            index
            for index, record in enumerate(self._records)
            if record.ordered is replaced and self._needs(index, record)
        ]:
            self._check(waiting)
            time.sleep(_PAUSE)  # noqa: TID251 - a cell of memory has no event to wait on

    def _needs(self, index: int, record: WorkerRecord[VectorPlace]) -> bool:
        """Return whether a worker still has to read the weights of its last order."""
        cells = self._pool.status_board.lines[index].cells
        if cells[WEIGHTS_READ] != record.order:
            return True
        return self._keeps_ordered and cells[PHASE] != Phase.IDLE


def _check_same_order(one: WeightLayout | None, other: WeightLayout | None) -> None:
    if one != other:
        raise ValueError(
            "All workers need the same network, but the policies that policy_factory "
            "built have their tensors in different orders, or tie different ones."
        )


def _closed(*_: object, **__: object) -> NoReturn:
    raise ClosedError("the pool of workers is closed")


def factories_of(
    options: CollectorOptions, count: int
) -> list[Callable[[], Any] | None]:
    """Return the policy factory of each of ``count`` workers.

    Raises:
        ValueError: if a list has another length.
        TypeError: if an entry is not callable.
    """
    factory = options.policy_factory
    if not isinstance(factory, Sequence):
        return [factory] * count
    if len(factory) != count:
        raise ValueError(
            f"policy_factory has {len(factory)} entries, expected one for each of "
            f"{count} workers, or one for all."
        )
    missing = [index for index, build in enumerate(factory) if not callable(build)]
    if missing:
        raise TypeError(
            f"policy_factory must have callables only, but entry {missing[0]} is "
            f"{factory[missing[0]]!r}."
        )
    return list(factory)
