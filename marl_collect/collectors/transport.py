"""What a ``WorkerGroup`` needs to know about where its workers run.

``worker_group.LocalTransport`` starts processes of this machine, and
``marl_collect.distributed`` starts the same workers on the nodes of a Ray cluster.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, final

from marl_collect.collectors import messages
from marl_collect.collectors.broadcaster import WeightBroadcaster
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.errors import WorkerError
from marl_collect.processes.status_board import WorkerProgress
from marl_collect.weights.shared import (
    WeightLayout,
    check_factory_weights,
    check_same_weights,
)

Ask = Callable[[Sequence[int], object, type[Any]], list[Any]]
Check = Callable[[Sequence[int]], None]
Replace = Callable[[Exception], object]


class Pool(Protocol):
    """Workers that receive messages and reply; see ``WorkerPool``."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        ...

    def send(self, worker: int, message: object) -> None:
        """Send a message to a worker."""
        ...

    def receive(self, workers: Iterable[int] | None = None) -> tuple[int, Any]:
        """Wait for the next message of some workers; return its sender and it."""
        ...

    def preempt(self, worker: int, *, preempted: bool) -> None:
        """Let the rollouts of a worker end early, or no longer."""
        ...

    def progress(self, worker: int) -> WorkerProgress:
        """Return what a worker is doing."""
        ...

    def resident_bytes(self, worker: int) -> int:
        """Return the resident memory of a worker."""
        ...

    def close(self, timeout: float = ...) -> tuple[WorkerError, ...]:
        """End all workers; return the errors that they raised meanwhile."""
        ...


class WorkerWeights(WeightBroadcaster):
    """Publishes weights to workers, and gives each worker its policy."""

    _skeleton: Any  # Of the trainer's module, if workers get that.

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        factories: Sequence[Callable[[], Any] | None],
    ) -> None:
        """Publish nothing yet.

        Args:
            policy: the trainer's policy.
            options: of the collector.
            factories: of each worker's policy, None for the trainer's.
        """
        super().__init__(policy)
        self._options = options
        self._factories = list(factories)

    @final
    def command(self, index: int) -> object:
        """Return the command that gives a worker its policy with current weights."""
        trust = self._options.trust_policy
        factory = self._factories[index]
        if factory is not None:
            return messages.CallablePolicy(factory, builds=True, trust=trust)
        module = self.policy.module
        if module is None:
            return messages.RandomActions()
        if not self._are_published:
            return messages.CallablePolicy(module, builds=False, trust=trust)
        handle, place = self._attach(index)
        return messages.SkeletonPolicy(self._skeleton, handle, place)

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
            check_same_weights(layout, other, f"worker {index}", "worker 0")
        of_trainer = bool(self.policy.names)
        if of_trainer and self.policy.layout is not None:
            check_factory_weights(self.policy.layout, layout)
        if layout is None:
            return
        self.policy.use_layout(layout)
        # Unless the trainer has weights, all workers get those of worker 0. In a
        # population each worker keeps its own.
        population = isinstance(self._options.policy_factory, Sequence)
        sources = range(self.workers if population else 1)
        self._share(layout, range(0) if of_trainer else sources)

    @property
    @abc.abstractmethod
    def _are_published(self) -> bool:
        """Whether workers read published weights."""

    @abc.abstractmethod
    def _attach(self, index: int) -> tuple[Any, int]:
        """Return the handle and the place of a worker's weights, before it has any."""

    @abc.abstractmethod
    def _share(self, layout: WeightLayout, sources: range) -> None:
        """Publish weights of this layout for the first time.

        Args:
            layout: of every worker's weights.
            sources: workers whose own weights are published: none if the trainer's
                are, the first for all workers, or each worker for itself.
        """

    @abc.abstractmethod
    def use(self, index: int) -> None:
        """Let the policy that a restarted worker built act with published weights."""

    @abc.abstractmethod
    def order(self, index: int) -> messages.Weights:
        """Return an order to act with a worker's newest weights."""

    @abc.abstractmethod
    def order_again(self, index: int) -> messages.Weights:
        """Return an order for a restarted worker that repeats its last one."""

    @abc.abstractmethod
    def forget(self, index: int) -> None:
        """Note that a worker has no order, because it was restarted while idle."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the memory."""


class Transport(abc.ABC):
    """Starts and replaces the workers of a group.

    Attributes:
        most_in_a_row: how often a worker may be replaced before its next batch.
    """

    most_in_a_row = 1

    @abc.abstractmethod
    def start(self, assignments: Sequence[messages.WorkerAssignment]) -> Pool:
        """Start the workers."""

    @abc.abstractmethod
    def weights(
        self, policy: TrainerPolicy, ask: Ask, replace: Replace
    ) -> WorkerWeights:
        """Return the weights of the workers that were started.

        Args:
            policy: the trainer's policy.
            ask: sends a command to workers and waits for replies of a type.
            replace: replaces the worker that raised an error, or raises it again.
        """

    @abc.abstractmethod
    def lost_with(self, worker: int) -> Sequence[int]:
        """Return a failed worker and those that were lost with it."""

    @abc.abstractmethod
    def replaces(self, error: Exception) -> bool:
        """Whether the worker that raised this error may be replaced."""

    @abc.abstractmethod
    def restart(self, arguments: Mapping[int, messages.WorkerAssignment]) -> None:
        """Replace workers that ``lost_with`` returned."""

    @abc.abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return entries of ``stats()`` in addition to those of the group."""
