"""The common base of ``MultiSyncCollector`` and ``MultiAsyncCollector``."""

import abc
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, final

import torch
from typing_extensions import override

from marl_collect.buffers.compact_observations import gather
from marl_collect.collectors import messages
from marl_collect.collectors.assigning import chosen_workers
from marl_collect.collectors.backend import Backend, Filled
from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.checkpoint import (
    check_environments,
    warn_if_not_resumed,
    warn_of_a_dropped_batch,
)
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.worker_group import WorkerGroup
from marl_collect.core.description import EnvDescription, Key
from marl_collect.processes.closing import ERROR_CLOSE_SECONDS
from marl_collect.rollout.episodes import EndedEpisodes


class MultiCollectorBase(CollectorBase):
    """A collector whose environments run in worker processes."""

    _backend: "WorkersBackend"

    @final
    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._backend.pids


class WorkersBackend(Backend):
    """A backend whose environments run in workers."""

    def __init__(
        self, workers: WorkerGroup, options: CollectorOptions, frames: Sequence[int]
    ) -> None:
        """Allocate the slots of workers that are ready.

        Args:
            workers: the workers, which this backend closes.
            options: of the collector.
            frames: per batch of each worker's environments.
        """
        self._options = options
        self._workers = workers
        self.weights = workers.weights
        try:
            self.reshape(frames)
        except BaseException:
            workers.close(ERROR_CLOSE_SECONDS)
            raise

    @abc.abstractmethod
    def reshape(self, frames: Sequence[int]) -> None:
        """Allocate slots for the current workers, none of which is collecting.

        Args:
            frames: per batch of each worker's environments.
        """

    @abc.abstractmethod
    def _settle(self) -> bool:
        """Drop unfinished batches; return whether there were any."""

    @final
    def drop_unfinished(self, begin: Sequence[int] = ()) -> bool:
        """Let workers return to the beginning of batches that are not delivered.

        Args:
            begin: workers that begin new episodes instead.

        Returns:
            Whether there were such batches.
        """
        states = self.states()
        if not self._settle():
            return False
        self._workers.load(states, begin=begin)
        warn_of_a_dropped_batch(self.description)
        resumed = [i for i in range(len(self._workers)) if i not in begin]
        warn_if_not_resumed(
            self.description,
            [states[i] for i in resumed],
            self._workers.running_of(resumed),
        )
        return True

    @final
    def _filled(
        self,
        tensors: Mapping[Key, torch.Tensor],
        workers: Sequence[int],
        replies: Mapping[int, messages.Collected],
    ) -> Filled:
        """Return a batch whose rows some workers have filled, one after the other."""
        sizes = [self._sizes[index] for index in workers]
        ordered = [replies[index] for index in workers]
        starts = accumulate(sizes, initial=0)
        return Filled(
            tensors,
            ends=[
                reply.frames
                for reply, size in zip(ordered, sizes, strict=True)
                for _ in range(size)
            ],
            episodes=EndedEpisodes.join([reply.episodes for reply in ordered]),
            sizes=sizes,
            last=gather(
                [observation for reply in ordered for observation in reply.last],
                [
                    start
                    for reply, start in zip(ordered, starts, strict=False)
                    for _ in reply.last
                ],
            ),
        )

    @final
    @property
    def _sizes(self) -> list[int]:
        """Number of environments of each worker."""
        return self._workers.sizes

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
        if indices is None:
            self._settle()
        elif self.drop_unfinished(begin=indices):
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
        for index, (state, size) in enumerate(zip(states, self._sizes, strict=True)):
            check_environments(state, size, index)
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
