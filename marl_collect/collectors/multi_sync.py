"""``MultiSyncCollector``: all workers fill one batch with the same weights."""

from functools import partial
from typing import Any, final

from marl_collect.buffers.compact_observations import gather
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages
from marl_collect.collectors.assigning import sized_workers
from marl_collect.collectors.batches import Filled
from marl_collect.collectors.multi_base import MultiCollectorBase
from marl_collect.collectors.options import CollectorArguments
from marl_collect.collectors.remote import RemoteCollector
from marl_collect.collectors.starting import start_workers
from marl_collect.collectors.worker_group import WorkerGroup
from marl_collect.options import constructor


@final
class MultiSyncCollector(MultiCollectorBase):
    """Collects in worker processes; every batch has frames of all workers.

    Row ``b`` of a batch ``[B, T]`` is environment ``b``, worker by worker. The whole
    batch is collected with one version of the weights. The trainer copies nothing: it
    reads the memory that the workers wrote.

    The arguments are the fields of ``CollectorArguments``.
    """

    @constructor(CollectorArguments)
    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        self._workers: WorkerGroup = start_workers(
            parsed.create_env_fn, parsed.policy, parsed
        )
        try:
            sizes = [len(own) for own in self._workers.environments]
            self._frames = parsed.frames_of(sizes)
            layout = self._workers.layout(sum(sizes), max(self._frames))
            # With prefetch one is filled while the user holds one and gets the next.
            self._slots = Slots(layout, prepared=3 if parsed.prefetch else 2)
        except BaseException:
            self._workers.close(10.0)
            raise
        self._pending: int | None = None  # The slot that is being prefetched.
        self._open(parsed, self._workers.weights, sizes)

    def _outline(self) -> str:
        sizes = [len(own) for own in self._workers.environments]
        return f"{sized_workers(sizes)}, [{sum(sizes)}, {max(self._frames)}]"

    def _batch_frames(self) -> int:
        return sum(
            frames * len(own)
            for frames, own in zip(
                self._frames, self._workers.environments, strict=True
            )
        )

    def _collect(self, *, random: bool) -> Filled:
        slot = self._send(random=random) if self._pending is None else self._pending
        self._pending = None
        if not self._options.prefetch:
            return self._receive(slot)
        if self._options.preempts:
            filled = self._receive(slot)
            if self._continues_after(filled.frames):
                self._pending = self._send(random=self._at_random(filled.frames))
            return filled
        # The number of frames is known in advance, so each worker starts its part of
        # the next batch as soon as it is done, with the weights for that batch.
        frames = self._batch_frames()
        following = None
        if self._continues_after(frames):
            following = self._command(random=self._at_random(frames))
        filled = self._receive(slot, following)
        if following is not None:
            self._pending = following.slot
        return filled

    def _send(self, *, random: bool) -> int:
        """Tell all workers to fill a slot, and return it."""
        command = self._command(random=random)
        for index in range(len(self._workers)):
            self._attach(index, command.slot)
        for index in range(len(self._workers)):
            self._workers.collect(index, command)
        return command.slot

    def _command(self, *, random: bool) -> messages.Collect:
        return messages.Collect(
            self._slots.take(),
            random=random,
            reset=self._options.reset_at_each_iter,
            snapshot=self._options.prefetch,
        )

    def _attach(self, index: int, slot: int) -> None:
        own = self._workers.environments[index]
        self._workers.attach(index, self._slots, slot, own, self._frames[index])

    def _receive(self, slot: int, following: messages.Collect | None = None) -> Filled:
        """Wait for all workers, or preempt the others when enough are done.

        Args:
            slot: the slot that they fill.
            following: the command that each worker gets when it is done.
        """
        workers = self._workers
        enough = len(workers)
        if self._options.preempts:
            enough = max(
                1, int(len(workers) * (self._options.preemptive_threshold or 0.0))
            )
        replies: dict[int, messages.Collected] = {}
        while len(replies) < len(workers):
            waiting = [index for index in range(len(workers)) if index not in replies]
            if len(replies) == enough:
                workers.preempt(waiting)
            index, reply = workers.receive(waiting)
            replies[index] = reply
            if following is not None:
                self._attach(index, following.slot)
                workers.collect(index, following)
        ordered = [replies[index] for index in range(len(workers))]
        return Filled(
            self._slots.hand_out(slot),
            ends=[
                reply.frames
                for reply, own in zip(ordered, workers.environments, strict=True)
                for _ in own
            ],
            episodes=[episode for reply in ordered for episode in reply.episodes],
            last=gather(
                [o for reply in ordered for o in reply.last],
                [
                    own.start
                    for reply, own in zip(ordered, workers.environments, strict=True)
                    for _ in reply.last
                ],
            ),
        )

    def _continues_after(self, frames: int) -> bool:
        """Return whether collection continues after a batch of ``frames``."""
        if self._options.endless:
            return True
        return self._statistics.frames + frames < (self._options.total_frames or 0)

    def remote(self) -> RemoteCollector:
        """Return the interface that runs this collector without its iterator."""
        workers = self._workers
        return RemoteCollector(
            layout=self._slots.layout,
            sizes=[len(own) for own in workers.environments],
            place=workers.place,
            collect=self._collect,
            preempt=partial(workers.preempt, range(len(workers))),
            steps=workers.steps,
            running=lambda: workers.running,
            publish=self._weights.publish,
            weights=self._weights.weights,
            begin_episodes=self._begin_episodes,
            reseed=self._reseed,
            states=self._worker_states,
            load=self._load_worker_states,
            attribute=self._attribute,
            explain=self.explain,
            metrics=self._metrics,
        )

    def _settle(self) -> bool:
        """Drop a prefetched batch; return whether there was one."""
        if self._pending is None:
            return False
        slot, self._pending = self._pending, None
        # The tensors are freed at once, which frees the slot.
        self._receive(slot)
        return True

    def _worker_states(self) -> list[Any]:
        # A prefetched batch was not delivered. The state before it is the collector's
        # state, and the batch is collected again.
        return self._workers.ask(messages.GetState(before=self._pending is not None))

    def _metrics(self) -> dict[str, Any]:
        return self._workers.metrics() | {"slots": len(self._slots)}

    def _close(self, timeout: float) -> None:
        self._workers.close(timeout)
        self._slots.close()


MultiSyncDataCollector = MultiSyncCollector
"""TorchRL's older name."""
