"""What a ``WorkerGroup`` needs to know about where its workers run.

``worker_group.LocalTransport`` starts processes of this machine, and
``marl_collect.distributed`` starts the same workers on the nodes of a Ray cluster.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from marl_collect.collectors import messages
from marl_collect.collectors.broadcaster import Ask, WorkerWeights
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.errors import WorkerError
from marl_collect.processes.status_board import WorkerProgress

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
    ) -> WorkerWeights[Any]:
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
