"""Publishes a collector's weights and counts their versions.

Weights pass three objects. The collector gets the request for an update. The
broadcaster numbers the weights and writes them to a place that workers read. The reader
in a worker copies them from there.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from marl_collect.collectors.trainer_policy import TrainerPolicy


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
