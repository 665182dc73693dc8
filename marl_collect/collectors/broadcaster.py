"""Who counts the versions of a collector's weights, and publishes them.

Weights pass three places: the collector, which is asked for an update; the broadcaster,
which compares the weights with those that the workers were started with, numbers them
and writes them where workers find them; and the reader in a worker.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from marl_collect.collectors.trainer_policy import TrainerPolicy


@final
@dataclass(slots=True)  # Frozen ones take longer to make.
class WeightUpdate:
    """Weights, and who acts with them.

    Attributes:
        tensors: in the order of the layout.
        workers: indices, None for all.
        version: of these weights.
    """

    tensors: Sequence[torch.Tensor]
    workers: Sequence[int] | None
    version: int


class WeightBroadcaster(abc.ABC):
    """Owns the version of a collector's weights; the only one who counts it.

    Attributes:
        policy: which tensors are published.
        version: of the weights published last.
    """

    def __init__(self, policy: TrainerPolicy) -> None:
        """Begin at version 0, which the policy is started with."""
        self.policy = policy
        self.version = 0

    @property
    @abc.abstractmethod
    def workers(self) -> int:
        """How many workers there are."""

    @abc.abstractmethod
    def versions(self) -> list[int]:
        """Return the version that each worker acts with from its next batch on."""

    @abc.abstractmethod
    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return the weights of each worker by name, not to be written to.

        None at all if the trainer's module has them, or there are none.
        """

    @abc.abstractmethod
    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        """Write weights for the batches to come: all of the parts, or none."""

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
            workers: indices.

        Raises:
            ValueError: if there is no such worker, or none at all.
            WorkerError: if a worker died that had to read older weights first.
        """
        self._publish([WeightUpdate(tensors, workers, self.version + 1)])

    @final
    def publish_each(self, sources: Mapping[int, Any]) -> None:
        """Publish a new version, with weights of its own for each of these workers.

        Args:
            sources: a module, a state_dict or a TensorDict, by the worker's index.
        """
        version = self.version + 1
        tensors = self.policy.tensors
        self._publish(
            [
                WeightUpdate(tensors(each), [index], version)
                for index, each in sources.items()
            ]
        )

    @final
    def state(self) -> dict[str, Any]:
        """Return copies of all workers' weights with their versions, as plain data."""
        found = self.weights()
        if all(_same(found[0], other) for other in found[1:]):
            found = found[:1]
        return {
            "policy_version": self.version,
            "policy_versions": self.versions(),
            "published": [{name: t.clone() for name, t in o.items()} for o in found],
        }

    @final
    def restore(self, parts: Sequence[WeightUpdate], version: int) -> None:
        """Act with the weights and the versions of a state.

        Args:
            parts: that cover all workers; none if the policy has no weights.
            version: of the weights published last.
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
                raise ValueError(f"worker_ids names worker {worker} of {self.workers}.")
        if not chosen:
            raise ValueError("worker_ids names no worker; None means all of them.")


def _same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one is other or all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@final
class OwnWeights(WeightBroadcaster):
    """Weights of a collector that acts with the trainer's module itself."""

    @property
    def workers(self) -> int:
        """One: the collector itself."""
        return 1

    def versions(self) -> list[int]:
        """Return the version published last."""
        return [self.version]

    def weights(self) -> list[Mapping[str, torch.Tensor]]:
        """Return nothing: the module has them."""
        return []

    def warn_if_stale(self) -> None:
        """Do nothing: the policy that acts is the trained module itself."""

    def _write(self, parts: Sequence[WeightUpdate]) -> None:
        for part in parts:
            self.policy.load(part.tensors)
