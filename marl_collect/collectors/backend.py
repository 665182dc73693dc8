"""``Backend``: the interface that every kind of collector implements."""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from marl_collect.buffers.compact_observations import LastObservations
from marl_collect.buffers.layout import Layout
from marl_collect.collectors.broadcaster import WeightBroadcaster
from marl_collect.core.description import EnvDescription, Key
from marl_collect.rollout.episodes import Episode, Plan


@dataclass(frozen=True)
class Filled:
    """One filled slot.

    Attributes:
        tensors: ``[B, T, ...]`` per key; views of the slot's memory.
        ends: number of valid frames of each environment; T unless the batch is ragged.
        episodes: the episodes that ended in it.
        sizes: number of environments of each worker in it.
        last: the observations that ``compact_obs`` stores separately.
    """

    tensors: Mapping[Key, torch.Tensor]
    ends: list[int]
    episodes: list[Episode]
    sizes: Sequence[int]
    last: LastObservations | None = None

    @property
    def frames(self) -> int:
        """Number of valid frames of all environments."""
        return sum(self.ends)


class Backend(abc.ABC):
    """Fills slots: environments, policy and memory of one kind of collector.

    ``CollectorBase`` turns it into an iterator over batches. In an actor of
    ``marl_collect.distributed``, ``Actor`` runs one for the trainer.

    Attributes:
        weights: the policy's weights.
        works_in_forks: whether a forked process may use it as well.
        keeps_state: whether ``states`` works after ``close`` too.
    """

    weights: WeightBroadcaster
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


@final
@dataclass(frozen=True)
class Placement:
    """The range of environments that one of several collectors runs.

    Attributes:
        first: index of its first environment.
        episodes: number of the last episode that each environment began in a
            collector that this one replaces; () if it replaces none.
        generation: how often the collector was restarted.
        given_seeds: seeds of each environment's first episodes; () derives them.
    """

    first: int = 0
    episodes: tuple[int, ...] = ()
    generation: int = 0
    given_seeds: tuple[tuple[int, ...], ...] = ()

    def part(self, plan: Plan, own: range) -> Plan:
        """Return the plan for some of the environments.

        Args:
            plan: provides the seed and the limit.
            own: their indices within the collector.
        """
        return replace(
            plan,
            environments=range(self.first + own.start, self.first + own.stop),
            episodes=self.episodes[own.start : own.stop],
            generation=self.generation,
            given_seeds=self.given_seeds[own.start : own.stop],
        )


class HostedBackend(Backend):
    """A backend that an actor can run, as one of several, for a remote collector."""

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Layout of its slots."""

    @property
    @abc.abstractmethod
    def sizes(self) -> list[int]:
        """Number of each worker's environments."""

    @property
    @abc.abstractmethod
    def running(self) -> tuple[int, ...]:
        """Number of each environment's running episode."""

    @abc.abstractmethod
    def worker_weights(self) -> Sequence[Mapping[str, torch.Tensor]]:
        """Return every worker's weights by name; empty if there are none."""

    @abc.abstractmethod
    def place(self, place: Placement) -> None:
        """Number environments and episodes, before the first ``collect``."""

    @abc.abstractmethod
    def preempt(self) -> None:
        """End the running ``collect`` early, from any thread.

        The next ``collect`` is not affected.
        """
