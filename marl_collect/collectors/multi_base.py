"""What collectors with worker processes share, whether these work together or not."""

import abc
from collections.abc import Sequence
from typing import Any, final

import torch

from marl_collect.collectors import messages
from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.crew import Crew
from marl_collect.description import EnvDescription


class MultiCollectorBase(CollectorBase):
    """A collector whose environments live in the workers of a crew."""

    _crew: Crew

    @abc.abstractmethod
    def _settle(self) -> None:
        """Drop whatever is being collected, so that workers hear what comes next."""

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._crew.description

    @final
    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._crew.pids

    @final
    def steps_so_far(self) -> int:
        """Return the frames stepped so far, also of batches in the making."""
        return self._crew.steps()

    @final
    def _publish(
        self, tensors: list[torch.Tensor], worker_ids: Sequence[int] | None
    ) -> None:
        self._crew.publish(tensors, worker_ids)

    @final
    def _begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        self._settle()
        indices = None if chosen is None else [i for i, yes in enumerate(chosen) if yes]
        self._crew.ask(messages.BeginEpisodes(), indices)

    @final
    def _reseed(self, seed: int) -> None:
        self._settle()
        self._crew.reseed(seed)

    @final
    def _load_worker_states(self, states: list[Any]) -> None:
        self._settle()
        if len(states) != len(self._crew):
            raise ValueError(
                f"The state is of {len(states)} workers, but this collector has "
                f"{len(self._crew)}."
            )
        self._crew.load(states)

    @final
    def explain(self) -> list[str]:
        """Say, for each worker, which path its policy takes, and why."""
        self._check_open()
        return self._crew.ask(messages.Explain())

    @final
    def _warn_if_stale(self) -> None:
        self._policy.warn_if_stale()

    @final
    def _attribute(self, owner: str, name: str) -> list[Any]:
        values = self._crew.ask(messages.GetAttribute(owner, name))
        for value in values:
            if isinstance(value, AttributeError):
                raise value
        return values
