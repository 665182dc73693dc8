"""``Backend``: the interface that every kind of collector implements."""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from marl_collect.buffers.compact_observations import LastObservations
from marl_collect.buffers.layout import Layout
from marl_collect.collectors.broadcaster import WeightBroadcaster
from marl_collect.core.description import EnvDescription, Key
from marl_collect.rollout.episodes import Episode


@dataclass(frozen=True)
class Filled:
    """One filled slot.

    Attributes:
        tensors: ``[B, T, ...]`` per key; views of the slot's memory. Empty if the batch
            is in the arrays of ``Backend.room``.
        ends: number of valid frames of each environment; T unless the batch is ragged.
        episodes: the episodes that ended in it.
        sizes: number of environments of each worker in it.
        last: the observations that ``compact_obs`` stores separately.
    """

    tensors: Mapping[Key, torch.Tensor]
    ends: list[int]
    episodes: Sequence[Episode]
    sizes: Sequence[int]
    last: LastObservations | None = None

    @property
    def frames(self) -> int:
        """Number of valid frames of all environments."""
        return sum(self.ends)


class Backend(abc.ABC):
    """Fills slots: environments, policy and memory of one kind of collector.

    ``CollectorBase`` turns it into an iterator over batches.

    Attributes:
        weights: the policy's weights.
        room: returns arrays ``[B, T, ...]`` to fill instead of a slot, if there are
            any. A backend whose workers are other processes does not call it.
        works_in_forks: whether a forked process may use it as well.
        keeps_state: whether ``states`` works after ``close`` too.
    """

    weights: WeightBroadcaster
    room: Callable[[Layout], Mapping[Key, NDArray[Any]]]
    works_in_forks = False
    keeps_state = False

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""

    @property
    @abc.abstractmethod
    def batch_frames(self) -> int:
        """Frames of one batch."""

    @property
    def shape(self) -> tuple[Layout, Sequence[int]] | None:
        """Layout of all batches and environments of each worker; None if they vary."""
        return None

    @abc.abstractmethod
    def outline(self) -> str:
        """Describe workers, environments and batch shape, for ``repr``.

        It reads local state only, and also works after ``close``.
        """

    @abc.abstractmethod
    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Fill one slot.

        Args:
            random: take random actions instead of the policy's.
            delivered: frames of all earlier batches; limits how far to prefetch.
        """

    @abc.abstractmethod
    def steps(self) -> int:
        """Return the frames stepped so far, from any thread."""

    @abc.abstractmethod
    def begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        """Begin new episodes, in all workers or the chosen ones."""

    @abc.abstractmethod
    def reseed(self, seed: int) -> None:
        """Derive all random numbers from ``seed``, and begin new episodes."""

    @abc.abstractmethod
    def states(self) -> list[Any]:
        """Return the state of every worker, for ``load``."""

    @abc.abstractmethod
    def load(self, states: list[Any]) -> tuple[int, ...]:
        """Resume from these states; return the number of each running episode."""

    @abc.abstractmethod
    def attribute(self, owner: str, name: str) -> list[Any]:
        """Return an attribute of every worker's ``"env"`` or ``"policy"``."""

    @abc.abstractmethod
    def explain(self) -> list[str]:
        """Describe, for each worker, how its policy runs, and why."""

    @abc.abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return the backend's own entries of ``stats()``."""

    @abc.abstractmethod
    def close(self, timeout: float) -> None:
        """Release all resources within ``timeout`` seconds."""
