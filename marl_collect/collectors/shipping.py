"""How the policy and its weights get to the workers, at the start and later."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import nn

from marl_collect.collectors import messages
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.publishing import Publishing
from marl_collect.collectors.trainer_policy import TrainerPolicy
from marl_collect.processes.pool import WorkerPool
from marl_collect.skeleton import take_apart, weight_tensors
from marl_collect.weights import WeightLayout

Ask = Callable[[Sequence[int], object, type[Any]], list[Any]]
Check = Callable[[Sequence[int]], None]


@final
class PolicyShipping:
    """Makes every worker's policy, and keeps its weights those of the trainer."""

    def __init__(
        self,
        policy: TrainerPolicy,
        options: CollectorOptions,
        pool: WorkerPool,
        ask: Ask,
        check: Check,
    ) -> None:
        """Publish the policy's weights, if the trainer has them.

        Args:
            policy: as the trainer holds it.
            options: of the collector.
            pool: the workers.
            ask: sends a command to workers and waits for replies of a type.
            check: looks whether workers are well.
        """
        self._policy = policy
        self._options = options
        self._pool = pool
        self._ask = ask
        self._check = check
        self._factories = factories_of(options, len(pool))
        self._publishing: Publishing | None = None
        if isinstance(policy.module, nn.Module):
            weights = weight_tensors(policy.module)
            layout = WeightLayout.plan(weights)
            self._publishing = self._new_publishing(layout)
            self._publishing.publish(list(weights.values()), None)
            if options.policy_factory is None:
                self._skeleton = take_apart(policy.module)

    def command(self, index: int) -> object:
        """Return what makes a worker's policy, with its weights as they are now."""
        trust = self._options.trust_policy
        factory = self._factories[index]
        if factory is not None:
            return messages.CallablePolicy(factory, builds=True, trust=trust)
        module = self._policy.module
        if module is None:
            return messages.RandomActions()
        if self._publishing is None:
            return messages.CallablePolicy(module, builds=False, trust=trust)
        handle = self._publishing.handle(index)
        return messages.SkeletonPolicy(
            self._skeleton, handle, self._publishing.version(index)
        )

    def share(self, layout: WeightLayout | None) -> None:
        """Make the weights of policies that were built in the workers shared ones.

        Args:
            layout: of these weights, None if there are none.
        """
        if not any(self._factories):
            return
        population = isinstance(self._options.policy_factory, Sequence)
        given = self._publishing is not None
        if self._publishing is not None:
            check_built(self._publishing.layout, layout)
        if layout is None:
            return
        if self._publishing is None:
            self._publishing = self._new_publishing(layout)
            if population:
                self._publishing.separate(range(len(self._pool)))
        for index in range(len(self._pool)):
            # Worker 0's weights become everyone's, and in a population each worker's
            # its own, unless the trainer has given some.
            own = not given and (population or index == 0)
            self.use(index, own=own)
            if own:
                self._publishing.adopt(index)
        self._policy.use_names(layout.names)

    def use(self, index: int, *, own: bool = False) -> None:
        """Let a policy that a worker built live in shared weights.

        Args:
            index: of the worker.
            own: its own weights become the shared ones.
        """
        if self._publishing is not None and self._factories[index] is not None:
            handle = self._publishing.handle(index)
            self._ask([index], messages.UseWeights(handle, own), messages.Attached)

    def tell(self, index: int) -> int:
        """Return the version of the weights that a worker is told to use now."""
        return 0 if self._publishing is None else self._publishing.tell(index)

    def forget(self, index: int) -> None:
        """Note that a worker was told nothing: it is new, and collects nothing."""
        if self._publishing is not None:
            self._publishing.forget(index)

    def publish(
        self, tensors: Sequence[torch.Tensor], worker_ids: Sequence[int] | None
    ) -> None:
        """Write new weights for the commands to come, to all workers or to some."""
        if self._publishing is None:
            raise RuntimeError("The policy has no weights to update.")
        if worker_ids:
            self._separate(self._publishing, worker_ids)
        self._publishing.publish(tensors, worker_ids)
        self._policy.published()

    def weights(self) -> list[dict[str, torch.Tensor]]:
        """Return every worker's weights by name, none if the policy has none."""
        publishing = self._publishing
        if publishing is None:
            return []
        names = publishing.layout.names
        return [
            dict(zip(names, publishing.read(index), strict=True))
            for index in range(len(self._pool))
        ]

    def close(self) -> None:
        """Give the weights' memory back."""
        if self._publishing is not None:
            self._publishing.close()

    def _separate(self, publishing: Publishing, worker_ids: Sequence[int]) -> None:
        count = len(self._pool)
        for index in worker_ids:
            if not 0 <= index < count:
                raise ValueError(f"worker_ids names worker {index} of {count}.")
        for index, handle in publishing.separate(worker_ids):
            self._ask([index], messages.UseWeights(handle), messages.Attached)

    def _new_publishing(self, layout: WeightLayout) -> Publishing:
        options = self._options
        restart = options.on_worker_failure == "restart"
        return Publishing(
            layout,
            self._pool,
            options.weight_scheme,
            self._check,
            until_done=restart and options.prefetch,
        )


def check_built(given: WeightLayout, built: WeightLayout | None) -> None:
    """Check that the weights of ``policy`` fit what ``policy_factory`` builds.

    Raises:
        ValueError: naming the first difference.
    """
    ours, theirs = (
        {}
        if each is None
        else {
            name: f"{dtype} {list(shape)}"
            for name, dtype, shape in zip(
                each.names, each.dtypes, each.shapes, strict=True
            )
        }
        for each in (given, built)
    )
    different = sorted(
        name for name in ours | theirs if ours.get(name) != theirs.get(name)
    )
    if different:
        name = different[0]
        raise ValueError(
            "policy supplies the weights of what policy_factory builds, so both must "
            f"have the same ones, but {name!r} is {ours.get(name, 'missing')} in "
            f"policy and {theirs.get(name, 'missing')} in what policy_factory builds."
        )


def factories_of(
    options: CollectorOptions, count: int
) -> list[Callable[[], Any] | None]:
    """Return the policy factory of each of ``count`` workers.

    Raises:
        ValueError: if a list does not fit the workers.
    """
    factory = options.policy_factory
    if not isinstance(factory, Sequence):
        return [factory] * count
    if len(factory) != count:
        raise ValueError(
            f"policy_factory has {len(factory)} entries, expected one for each of "
            f"{count} workers, or one for all."
        )
    return list(factory)
