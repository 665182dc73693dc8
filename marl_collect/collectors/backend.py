"""The methods that each kind of collector implements."""

import abc
from collections.abc import Sequence
from typing import Any

from marl_collect.collectors.batches import Filled
from marl_collect.core.description import EnvDescription


class Backend(abc.ABC):
    """The methods that each kind of collector implements; see ``CollectorBase``."""

    @property
    @abc.abstractmethod
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""

    @abc.abstractmethod
    def _outline(self) -> str:
        """Describe workers, environments and batch shape, for ``repr``.

        It reads local state only, and also works after ``_close``.
        """

    @abc.abstractmethod
    def _batch_frames(self) -> int:
        """Return the frames of one batch."""

    @abc.abstractmethod
    def _collect(self, *, random: bool) -> Filled:
        """Fill one slot, at random or with the policy."""

    @abc.abstractmethod
    def _begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        """Begin new episodes, in all workers or the chosen ones."""

    @abc.abstractmethod
    def _reseed(self, seed: int) -> None:
        """Derive all random numbers from ``seed``, and begin new episodes."""

    @abc.abstractmethod
    def _worker_states(self) -> list[Any]:
        """Return the states that ``_load_worker_states`` takes."""

    @abc.abstractmethod
    def _load_worker_states(self, states: list[Any]) -> tuple[int, ...]:
        """Resume from these states; return the number of each running episode."""

    @abc.abstractmethod
    def _attribute(self, owner: str, name: str) -> list[Any]:
        """Return an attribute of every worker's ``"env"`` or ``"policy"``."""

    @abc.abstractmethod
    def _warn_if_stale(self) -> None:
        """Warn if the module was trained, but the workers' copies were not updated."""

    @abc.abstractmethod
    def explain(self) -> list[str]:
        """Describe, for each worker, how its policy runs, and why."""

    @abc.abstractmethod
    def _metrics(self) -> dict[str, Any]:
        """Return the subclass's own entries of ``stats()``."""

    @abc.abstractmethod
    def _close(self, timeout: float) -> None:
        """Release all resources within ``timeout`` seconds."""
