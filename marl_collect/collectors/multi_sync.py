"""``MultiSyncCollector``: all workers fill one batch with the same weights."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, final

from typing_extensions import override

from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages
from marl_collect.collectors.assigning import sized_workers
from marl_collect.collectors.backend import Filled
from marl_collect.collectors.multi_base import MultiCollectorBase, WorkersBackend
from marl_collect.collectors.options import CollectorArguments
from marl_collect.collectors.worker_group import start_workers
from marl_collect.options import method


@final
class MultiSyncCollector(MultiCollectorBase):
    """Collects in worker processes; every batch has frames of all workers.

    Row ``b`` of a batch ``[B, T]`` is environment ``b``, worker by worker. The whole
    batch is collected with one version of the weights. The trainer copies nothing: it
    reads the memory that the workers wrote.

    The arguments are the fields of ``CollectorArguments``.
    """

    @method(CollectorArguments)
    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        workers = start_workers(parsed.create_env_fn, parsed.policy, parsed)
        frames = parsed.frames_of(workers.sizes)
        self._open(parsed, SyncBackend(workers, parsed, frames))


@final
class SyncBackend(WorkersBackend):
    """Workers that fill one slot together."""

    _pending: int | None = None  # The slot that is being prefetched.

    @override
    def reshape(self, frames: Sequence[int]) -> None:
        self._frames = list(frames)
        ends = list(accumulate(self._sizes, initial=0))
        self._rows = [range(begin, end) for begin, end in pairwise(ends)]
        layout = self._workers.layout(ends[-1], max(frames))
        # With prefetch one is filled while the user holds one and gets the next.
        self._slots = Slots(layout, prepared=3 if self._options.prefetch else 2)

    @property
    @override
    def shape(self) -> tuple[Layout, Sequence[int]]:
        return self._slots.layout, self._sizes

    @property
    @override
    def batch_frames(self) -> int:
        return sum(f * size for f, size in zip(self._frames, self._sizes, strict=True))

    @override
    def outline(self) -> str:
        rows = sum(self._sizes)
        return f"{sized_workers(self._sizes)}, [{rows}, {max(self._frames)}]"

    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Let all workers fill one slot, and start the next one with ``prefetch``."""
        slot = self._send(random=random) if self._pending is None else self._pending
        self._pending = None
        if not self._options.prefetch:
            return self._receive(slot)
        if self._options.preempts:
            filled = self._receive(slot)
            delivered += filled.frames
            if not self._options.completed(delivered):
                self._pending = self._send(random=self._options.random_after(delivered))
            return filled
        # The number of frames is known in advance, so each worker starts its part of
        # the next batch as soon as it is done, with the weights for that batch.
        delivered += self.batch_frames
        following = None
        if not self._options.completed(delivered):
            following = self._command(random=self._options.random_after(delivered))
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
        rows = self._rows[index]
        self._workers.attach(index, self._slots, slot, rows, self._frames[index])

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
        return self._filled(self._slots.hand_out(slot), range(len(workers)), replies)

    def _settle(self) -> bool:
        """Drop a prefetched batch; return whether there was one."""
        if self._pending is None:
            return False
        slot, self._pending = self._pending, None
        # The tensors are freed at once, which frees the slot.
        self._receive(slot)
        return True

    @override
    def states(self) -> list[Any]:
        # A prefetched batch was not delivered. The state before it is the collector's
        # state, and the batch is collected again.
        return self._workers.ask(messages.GetState(before=self._pending is not None))

    @override
    def metrics(self) -> dict[str, Any]:
        return self._workers.metrics() | {"slots": len(self._slots)}

    @override
    def close(self, timeout: float) -> None:
        self._workers.close(timeout)
        self._slots.close()


MultiSyncDataCollector = MultiSyncCollector
"""TorchRL's older name."""
