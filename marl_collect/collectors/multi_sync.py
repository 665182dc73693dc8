"""The collector whose workers fill one batch together, with one set of weights."""

from collections.abc import Sequence
from typing import Any, Unpack, final

import torch

from marl_collect.collectors.base import CollectorBase
from marl_collect.collectors.batches import Filled
from marl_collect.collectors.crew import Crew
from marl_collect.collectors.messages import Collect
from marl_collect.collectors.options import CollectorKeywords, CollectorOptions
from marl_collect.collectors.trainer_policy import check_policy
from marl_collect.description import EnvDescription
from marl_collect.factories import Factory, spread
from marl_collect.rollout import Episode


@final
class MultiSyncCollector(CollectorBase):
    """Collects in worker processes; every batch has the frames of all of them.

    Row ``b`` of a batch ``[B, T]`` is environment ``b``, worker by worker. The whole
    batch is collected with one version of the weights. The trainer copies nothing: it
    reads the memory that the workers wrote.

    Args:
        create_env_fn: a factory, for ``num_workers`` workers, or a list of factories.
        policy: a module on TensorDicts, maybe lazy or on meta; None for random actions.
        options: see :class:`~marl_collect.collectors.options.CollectorOptions`.
    """

    def __init__(
        self,
        create_env_fn: Factory | Sequence[Factory],
        policy: Any = None,
        **options: Unpack[CollectorKeywords],
    ) -> None:
        """Start the workers and wait until all of them are ready."""
        self._closed = True
        parsed = CollectorOptions.parse(options)
        check_policy(policy, parsed.policy_factory)
        factories = spread(
            create_env_fn,
            parsed.num_workers,
            parsed.envs_per_worker,
            parsed.create_env_kwargs,
        )
        if parsed.num_threads is not None:
            torch.set_num_threads(parsed.num_threads)
        self._crew = Crew(factories, policy, parsed)
        self._open(parsed, self._crew.policy)

    @property
    def description(self) -> EnvDescription:
        """Groups and spaces of the environments."""
        return self._crew.description

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._crew.pids

    def steps_so_far(self) -> int:
        """Return the frames stepped so far, also of the batch in the making."""
        return self._crew.steps()

    def _batch_frames(self) -> int:
        batch, frames = self._crew.slots.layout.batch
        return batch * frames

    def _collect(self, *, random: bool) -> Filled:
        crew = self._crew
        slot = crew.slots.take()
        crew.attach(slot)
        version = self._policy.version
        reset = self._options.reset_at_each_iter
        crew.collect(range(len(crew)), Collect(slot, version, random, reset))
        replies: dict[int, tuple[Episode, ...]] = {}
        while len(replies) < len(crew):
            index, reply = crew.receive()
            replies[index] = reply.episodes
        episodes = [e for index in sorted(replies) for e in replies[index]]
        return Filled(crew.slots.hand_out(slot), episodes, (version, version))

    def _publish(self, tensors: list[torch.Tensor]) -> None:
        self._crew.publish(tensors)

    def _close(self, timeout: float) -> None:
        self._crew.close(timeout)
