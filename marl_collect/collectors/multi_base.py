"""The common base of ``MultiSyncCollector`` and ``MultiAsyncCollector``."""

import abc
from collections.abc import Sequence
from typing import Any, final

from marl_collect.collectors import messages
from marl_collect.collectors.assigning import chosen_workers
from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.checkpoint import (
    check_environments,
    warn_if_not_resumed,
    warn_of_a_dropped_batch,
)
from marl_collect.collectors.worker_group import WorkerGroup
from marl_collect.core.description import EnvDescription


class MultiCollectorBase(CollectorBase):
    """A collector whose environments run in worker processes."""

    _workers: WorkerGroup

    @abc.abstractmethod
    def _settle(self) -> bool:
        """Drop unfinished batches; return whether there were any."""

    @final
    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._workers.description

    @final
    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._workers.pids

    @final
    def steps_so_far(self) -> int:
        """Return the frames stepped so far, including batches in flight."""
        return self._workers.steps()

    @final
    def _at_random(self, arrived: int) -> bool:
        """Return whether actions are random after ``arrived`` more frames."""
        warm_up = self._options.init_random_frames or 0
        return self._statistics.frames + arrived < warm_up

    @final
    def _begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        indices = chosen_workers(chosen, len(self._workers))
        states = None if indices is None else self._worker_states()
        if self._settle() and states is not None:
            # Workers that are not reset collect the dropped frames again.
            assert indices is not None
            self._workers.load(states, begin=indices)
            warn_of_a_dropped_batch(self.description)
            resumed = [i for i in range(len(self._workers)) if i not in indices]
            warn_if_not_resumed(
                self.description,
                [states[i] for i in resumed],
                self._workers.running_of(resumed),
                stacklevel=4,
            )
            return
        self._workers.ask(messages.BeginEpisodes(), indices)

    @final
    def _reseed(self, seed: int) -> None:
        self._settle()
        self._workers.reseed(seed)

    @final
    def _load_worker_states(self, states: list[Any]) -> tuple[int, ...]:
        if len(states) != len(self._workers):
            raise ValueError(
                f"The state has {len(states)} workers, but this collector has "
                f"{len(self._workers)}: build it with the arguments it was saved with."
            )
        for index, (state, own) in enumerate(
            zip(states, self._workers.environments, strict=True)
        ):
            check_environments(state, len(own), index)
        self._settle()
        self._workers.load(states)
        return self._workers.running

    @final
    def explain(self) -> list[str]:
        """Describe, for each worker, how its policy runs, and why."""
        with self._asking():
            return self._workers.ask(messages.Explain())

    @final
    def _warn_if_stale(self) -> None:
        self._policy.warn_if_stale(self.policy_version)

    @final
    def _attribute(self, owner: str, name: str) -> list[Any]:
        values = self._workers.ask(messages.GetAttribute(owner, name))
        for value in values:
            if isinstance(value, AttributeError):
                raise value
        return values
