"""The trainer's side of a collector's workers: start, prepare, command, wait.

One :class:`Crew` owns the processes, the slots and the shared weights of a
multi-process collector, whichever of sync and async uses it.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, final

import torch
from torch import nn

from marl_collect.collectors import messages, worker
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.single import contents_of, draw_seed
from marl_collect.collectors.trainer_policy import TrainerPolicy, is_random, prepare
from marl_collect.description import EnvDescription
from marl_collect.factories import Factory, check_alike
from marl_collect.layout import Layout, batch_fields
from marl_collect.processes.pool import WorkerPool
from marl_collect.rollout import Plan
from marl_collect.skeleton import take_apart, weight_tensors
from marl_collect.slots import Slots
from marl_collect.weights import WeightLayout, WeightPublisher

_PRELOAD = ("marl_collect.collectors.worker",)
T = TypeVar("T")


@final
class Crew:
    """Workers with their environments, their policy, and the memory they share."""

    def __init__(
        self,
        factories: Sequence[Sequence[Factory]],
        policy: Any,
        options: CollectorOptions,
    ) -> None:
        """Start all workers and wait until they can collect.

        Args:
            factories: of each worker's environments.
            policy: as passed by the user.
            options: of the collector.
        """
        self._options = options
        seed = draw_seed(options.seed)
        self.environments = _number(factories)
        if isinstance(policy, nn.Module):
            take_apart(policy)  # What cannot travel is an error before any start.
        self._pool = WorkerPool(
            worker.main,
            [
                messages.Assignment(
                    tuple(worker_factories),
                    Plan(seed, environments, options.max_frames_per_traj or 0),
                    options.exploration_type,
                    options.num_sub_threads,
                    options.init_fn,
                )
                for worker_factories, environments in zip(
                    factories, self.environments, strict=True
                )
            ],
            start_method=options.start_method,
            preload=_PRELOAD,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            num_threads=options.num_sub_threads,
        )
        self._publisher: WeightPublisher | None = None
        self._told = [0] * len(factories)
        try:
            self.description = self._descriptions()
            ready = self._send_policy(policy, seed)
            self._share_weights(ready)
            self.slots = Slots(self._layout(ready))
            self._attached: set[int] = set()
            for slot in range(len(self.slots)):
                self.attach(slot)
        except BaseException:
            self.close(10.0)
            raise

    def __len__(self) -> int:
        """How many workers there are."""
        return len(self._told)

    def attach(self, slot: int) -> None:
        """Let all workers map a slot, if they have not."""
        if slot in self._attached:
            return
        self._attached.add(slot)
        path = self.slots.segment(slot).path
        self._pool.broadcast(messages.UseSlot(slot, path, self.slots.layout))
        self._everyone(messages.Attached)

    def collect(self, workers: Iterable[int], command: messages.Collect) -> None:
        """Tell ``workers`` to fill their rows."""
        chosen = list(workers)
        for index in chosen:
            self._told[index] = command.version
        self._pool.broadcast(command, chosen)

    def receive(self) -> tuple[int, messages.Collected]:
        """Return the next worker that is done, and what it did."""
        index, reply = self._pool.receive()
        return index, _expect(reply, messages.Collected, index)

    def publish(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write new weights for the commands to come."""
        if self._publisher is not None:
            self._publisher.publish(tensors, self._wait_until_read)
            self.policy.published()
            self.policy.version = self._publisher.version

    def steps(self) -> int:
        """Return how many frames the workers have stepped, as of this moment."""
        return sum(
            self._pool.progress(index).steps * len(environments)
            for index, environments in enumerate(self.environments)
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._pool.pids

    def close(self, timeout: float) -> None:
        """End the workers and give the memory back."""
        self._pool.close(timeout)
        if self._publisher is not None:
            self._publisher.close()
        if hasattr(self, "slots"):
            self.slots.close()

    def _descriptions(self) -> EnvDescription:
        found = self._everyone(messages.Ready)
        first = found[0].description
        for index, ready in enumerate(found):
            check_alike(first, ready.description, f"worker {index}", "worker 0")
        return first

    def _send_policy(self, policy: Any, seed: int) -> messages.PolicyReady:
        factory = self._options.policy_factory
        module = None if is_random(policy) else prepare(policy, self.description, seed)
        self.policy = TrainerPolicy(module)
        factories = factory if isinstance(factory, Sequence) else [factory] * len(self)
        for index, build in enumerate(factories):
            self._pool.send(index, self._command(module, build))
        replies = self._everyone(messages.PolicyReady)
        return replies[0]

    def _command(self, policy: Any, factory: Callable[[], Any] | None) -> object:
        if factory is not None:
            return messages.CallablePolicy(factory, builds=True)
        if is_random(policy):
            return messages.RandomActions()
        if isinstance(policy, nn.Module):
            layout = WeightLayout.plan(weight_tensors(policy))
            return messages.SkeletonPolicy(take_apart(policy), layout)
        return messages.CallablePolicy(policy, builds=False)

    def _share_weights(self, ready: messages.PolicyReady) -> None:
        if ready.layout is None:
            return
        self._publisher = WeightPublisher(ready.layout)
        handle = self._publisher.handle
        if self.policy.names:
            tensors = self.policy.tensors(None)
            self._publisher.publish(tensors, self._wait_until_read)
        else:
            # The policy exists in the workers only: worker 0's weights are everyone's.
            self._pool.send(0, messages.UseWeights(handle, publish=True))
            self._expect_from(0, messages.Attached)
            self._publisher.adopt()
        self.policy.use_names(ready.layout.names)
        self._pool.broadcast(messages.UseWeights(handle))
        self._everyone(messages.Attached)

    def _layout(self, ready: messages.PolicyReady) -> Layout:
        contents = contents_of(self._options, is_init=ready.reads_is_init)
        fields = batch_fields(self.description, ready.outputs, ready.carried, contents)
        size = self.environments[-1].stop
        frames = -(-self._options.frames_per_batch // size)
        return Layout.plan(fields, (size, frames))

    def _everyone(self, kind: type[T]) -> list[T]:
        """Return the reply of every worker, in their order."""
        replies: dict[int, T] = {}
        while len(replies) < len(self):
            waiting = [i for i in range(len(self)) if i not in replies]
            index, reply = self._pool.receive(waiting)
            replies[index] = _expect(reply, kind, index)
        return [replies[index] for index in range(len(self))]

    def _expect_from(self, index: int, kind: type[T]) -> T:
        return _expect(self._pool.receive([index])[1], kind, index)

    def _wait_until_read(self, version: int) -> None:
        """Wait until nobody who was told to use ``version`` still has to read it."""
        while any(
            told == version and self._pool.progress(index).weights_read < version
            for index, told in enumerate(self._told)
        ):
            self._pool.check()
            time.sleep(0.0005)  # noqa: TID251 - a worker reads at once, if it lives


def _number(factories: Sequence[Sequence[Factory]]) -> list[range]:
    """Number the environments over all workers."""
    ranges: list[range] = []
    begin = 0
    for worker_factories in factories:
        ranges.append(range(begin, begin + len(worker_factories)))
        begin += len(worker_factories)
    return ranges


def _expect(reply: Any, kind: type[T], index: int) -> T:
    if not isinstance(reply, kind):
        raise TypeError(
            f"Worker {index} replied {reply!r}, but {kind.__name__} was expected."
        )
    return reply
