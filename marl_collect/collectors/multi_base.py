"""The common base of ``MultiSyncCollector`` and ``MultiAsyncCollector``."""

import abc
from collections.abc import Sequence
from typing import Any, final

from typing_extensions import override

from marl_collect.collectors import messages
from marl_collect.collectors.assigning import chosen_workers
from marl_collect.collectors.backend import Backend
from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.checkpoint import (
    check_environments,
    warn_if_not_resumed,
    warn_of_a_dropped_batch,
)
from marl_collect.collectors.options import CollectorArguments
from marl_collect.collectors.worker_group import start_workers
from marl_collect.core.description import EnvDescription


class MultiCollectorBase(CollectorBase):
    """A collector whose environments run in worker processes."""

    _backend: "WorkersBackend"

    @final
    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._backend.pids


class WorkersBackend(Backend):
    """A backend whose environments run in worker processes."""

    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        self._options = parsed
        self._workers = start_workers(parsed.create_env_fn, parsed.policy, parsed)
        self.weights = self._workers.weights
        self._sizes = [len(own) for own in self._workers.environments]

    @abc.abstractmethod
    def _settle(self) -> bool:
        """Drop unfinished batches; return whether there were any."""

    @final
    @property
    @override
    def description(self) -> EnvDescription:
        return self._workers.description

    @final
    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._workers.pids

    @final
    @override
    def steps(self) -> int:
        return self._workers.steps()

    @final
    @override
    def begin_episodes(self, chosen: Sequence[bool] | None) -> None:
        indices = chosen_workers(chosen, len(self._workers))
        states = None if indices is None else self.states()
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
            )
            return
        self._workers.ask(messages.BeginEpisodes(), indices)

    @final
    @override
    def reseed(self, seed: int) -> None:
        self._settle()
        self._workers.reseed(seed)

    @final
    @override
    def load(self, states: list[Any]) -> tuple[int, ...]:
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
    @override
    def explain(self) -> list[str]:
        return self._workers.ask(messages.Explain())

    @final
    @override
    def attribute(self, owner: str, name: str) -> list[Any]:
        values = self._workers.ask(messages.GetAttribute(owner, name))
        for value in values:
            if isinstance(value, AttributeError):
                raise value
        return values
