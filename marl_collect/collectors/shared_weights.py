"""Publishes weights to local workers, in one shared vector or one per worker."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import nn
from typing_extensions import override

from marl_collect.collectors import messages
from marl_collect.collectors.broadcaster import WeightUpdate
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.collectors.transport import Ask, Check, WorkerWeights
from marl_collect.errors import ClosedError
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.status_board import PHASE, WEIGHTS_READ, Phase
from marl_collect.weights.module_settings import Settings
from marl_collect.weights.shared import PLACES, Publisher, WeightLayout
from marl_collect.weights.skeleton import split_module

_PAUSE = 0.0002  # Seconds between two checks. Workers read without delay.


@final
@dataclass(eq=False, slots=True)
class _Published:
    """Weights at a place of a vector; compared by identity.

    Attributes:
        vector: the vector with the weights.
        version: of the weights.
        place: their place in the vector.
        settings: changes of the module's settings since the start.
    """

    vector: "_Vector"
    version: int
    place: int
    settings: Settings | None = None


@final
class _Vector:
    """A shared vector and the weights at each of its places."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self._at: list[_Published | None] = [None] * PLACES
        self.newest = self._at[0] = _Published(self, 0, 0)

    @property
    def replaced(self) -> _Published | None:
        """The weights that the next write overwrites."""
        return self._at[(self.newest.place + 1) % PLACES]

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The newest weights; they are read-only."""
        return self.publisher.read(self.newest.place)

    def begin(self, tensors: Sequence[torch.Tensor], like: _Published) -> None:
        """Write the initial weights, before any worker reads them."""
        self.publisher.write(0, tensors)
        self.newest = self._at[0] = _Published(self, like.version, 0, like.settings)

    def write(
        self, tensors: Sequence[torch.Tensor], version: int, settings: Settings | None
    ) -> None:
        """Write a new version to the place of the version before the newest."""
        place = (self.newest.place + 1) % PLACES
        self._at[place] = None
        self.publisher.write(place, tensors)
        self.newest = self._at[place] = _Published(self, version, place, settings)


@final
@dataclass(eq=False)
class _Reader:
    """What the trainer knows about a worker as a reader of weights.

    Attributes:
        vector: the vector that it has to read.
        attached: the vector that it has mapped.
        has: the weights that it acts with after executing all orders.
        settings: the settings that it was sent last.
        ordered: the weights of its last order.
        order: number of that order.
    """

    vector: _Vector
    attached: _Vector | None = None
    has: _Published | None = None
    settings: Settings | None = None
    ordered: _Published | None = None
    order: int = 0


@final
class SharedWeights(WorkerWeights):
    """Sends every worker its policy, and publishes weights in shared memory.

    All workers read the same vector until an update selects some of them. These get
    separate vectors, permanently. A place of a vector is overwritten only after every
    worker that was ordered to read it has read it.
    """

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        pool: WorkerPool,
        ask: Ask,
        check: Check,
    ) -> None:
        """Publish the policy's weights, if the trainer has them.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            pool: the workers.
            ask: sends a command to workers and waits for replies of a type.
            check: checks that workers are alive and make progress.
        """
        super().__init__(policy, options, factories_of(options, len(pool)))
        self._pool = pool
        self._ask = ask
        self._check = check
        # A restarted worker reads the version of its batch again.
        restart = options.on_worker_failure == "restart"
        self._until_done = restart and options.prefetch
        self._vectors: list[_Vector] = []
        self._readers: list[_Reader] = []
        self._orders = 0
        if isinstance(policy.module, nn.Module) and not any(self._factories):
            assert policy.layout is not None
            self._open(policy.layout)
            vector = self._vectors[0]
            vector.begin(policy.tensors(), vector.newest)
            self._skeleton = split_module(policy.module)

    @property
    @override
    def workers(self) -> int:
        return len(self._pool)

    # Starting

    @property
    @override
    def _are_published(self) -> bool:
        return bool(self._readers)

    @override
    def _attach(self, index: int) -> tuple[Any, int]:
        reader = self._readers[index]
        newest = reader.vector.newest
        reader.attached, reader.has, reader.settings = reader.vector, newest, None
        return reader.vector.publisher.handle, newest.place

    @override
    def _share(self, layout: WeightLayout, sources: range) -> None:
        self._open(layout)
        if not sources:
            vector = self._vectors[0]
            vector.begin(self.policy.tensors(), vector.newest)
        for index in sources[1:]:
            self._separate([index])
        for index in range(self.workers):
            self.use(index, own=index in sources)

    def use(self, index: int, *, own: bool = False) -> None:
        """Attach a policy that a worker built to shared weights.

        Args:
            index: of the worker.
            own: whether its own weights become the shared ones.
        """
        if not self._readers or self._factories[index] is None:
            return
        reader = self._readers[index]
        handle = reader.vector.publisher.handle
        self._ask([index], messages.UseWeights(handle, own), messages.MemoryAttached)
        reader.attached = reader.vector
        reader.has = reader.vector.newest if own else None
        reader.settings = None  # It has those that it was built with.

    # Orders

    def order(self, index: int) -> messages.Weights:
        """Return an order to act with a worker's newest weights."""
        if not self._readers:
            return messages.Weights()
        reader = self._readers[index]
        return self._order(reader, reader.vector.newest)

    def order_again(self, index: int) -> messages.Weights:
        """Return an order with the weights of a worker's last order, after a restart.

        These exist only if places are kept until workers are done. Otherwise the order
        has the newest weights.
        """
        if not self._readers:
            return messages.Weights()
        reader = self._readers[index]
        again = reader.ordered if self._until_done else None
        return self._order(reader, again or reader.vector.newest)

    def forget(self, index: int) -> None:
        """Note that a worker has no order, because it was restarted while idle."""
        if self._readers:
            self._readers[index].ordered = None

    def _order(self, reader: _Reader, published: _Published) -> messages.Weights:
        self._orders += 1
        handle = None
        if reader.attached is not published.vector:
            handle = published.vector.publisher.handle
        settings = published.settings
        weights = messages.Weights(
            order=self._orders,
            version=published.version,
            place=None if reader.has is published else published.place,
            handle=handle,
            settings=None if reader.settings is settings else settings,
        )
        reader.order, reader.ordered, reader.has = self._orders, published, published
        reader.attached, reader.settings = published.vector, settings
        return weights

    # Publishing

    def versions(self) -> list[int]:
        """Return the version that each worker uses from its next order on."""
        found = [reader.vector.newest.version for reader in self._readers]
        return found or [self.version] * self.workers

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the newest weights of each worker, by name."""
        names = self.policy.names
        return [
            dict(zip(names, reader.vector.tensors, strict=True))
            for reader in self._readers
        ]

    def close(self) -> None:
        """Release the memory."""
        for vector in self._vectors:
            vector.publisher.close()
        # Breaks a reference cycle, so the memory is freed at once.
        self._ask = self._check = _closed

    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        if not self._readers:
            raise RuntimeError("The policy has no weights to update.")
        settings = self.policy.settings()
        for part in parts:
            if part.workers is not None:
                self._separate(part.workers)
        targets = [(self._read_by(part.workers), part) for part in parts]
        # Wait for all before writing, so an error leaves all versions complete.
        for vectors, _ in targets:
            for vector in vectors:
                self._wait_until_read(vector)
        for vectors, part in targets:
            for vector in vectors:
                vector.write(part.tensors, part.version, settings)

    def _read_by(self, workers: Sequence[int] | None) -> list[_Vector]:
        """Return the vectors that these workers read, without duplicates."""
        if workers is None and len(self._vectors) == 1:
            return self._vectors
        readers = self._readers
        chosen = readers if workers is None else [readers[w] for w in workers]
        return list(dict.fromkeys(reader.vector for reader in chosen))

    def _separate(self, workers: Sequence[int]) -> None:
        """Give these workers vectors that no other worker reads."""
        chosen = set(workers)
        for index in chosen:
            vector = self._readers[index].vector
            others = [w for w, r in enumerate(self._readers) if r.vector is vector]
            if set(others) <= chosen:
                continue
            assert self.policy.layout is not None
            scheme = self._options.weight_scheme
            own = _Vector(scheme.open(self.policy.layout))
            self._vectors.append(own)
            # Complete from the start, in case the update fails.
            own.begin(vector.tensors, vector.newest)
            self._readers[index].vector = own

    def _wait_until_read(self, vector: _Vector) -> None:
        """Wait until all workers have read the weights that the next write overwrites.

        Raises:
            WorkerError: if a worker dies or hangs before it has read them.
        """
        replaced = vector.replaced
        if replaced is None:
            return
        while waiting := [
            index
            for index, reader in enumerate(self._readers)
            if reader.ordered is replaced and self._needs(index, reader)
        ]:
            self._check(waiting)
            time.sleep(_PAUSE)  # noqa: TID251 - a cell of memory has no event to wait on

    def _needs(self, index: int, reader: _Reader) -> bool:
        """Return whether a worker still has to read the weights of its last order."""
        cells = self._pool.status_board.lines[index].cells
        if cells[WEIGHTS_READ] != reader.order:
            return True
        return self._until_done and cells[PHASE] != Phase.IDLE

    def _open(self, layout: WeightLayout) -> None:
        shared = _Vector(self._options.weight_scheme.open(layout))
        self._vectors.append(shared)
        self._readers = [_Reader(shared) for _ in range(self.workers)]


def _closed(*_: object) -> NoReturn:
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
