"""``MultiAsyncCollector``: yields batches of single workers as they arrive."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, final

from typing_extensions import override

from marl_collect.buffers.compact_observations import gather
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages
from marl_collect.collectors.assigning import sized_workers
from marl_collect.collectors.backend import Filled
from marl_collect.collectors.in_flight import InFlight
from marl_collect.collectors.multi_base import MultiCollectorBase, WorkersBackend
from marl_collect.collectors.multi_sync import MultiSyncCollector
from marl_collect.collectors.options import CollectorArguments
from marl_collect.options import Option, constructor, function, refuse, values
from marl_collect.processes.closing import ERROR_CLOSE_SECONDS


@final
class MultiAsyncCollector(MultiCollectorBase):
    """Collects in worker processes; every batch is from one worker.

    A batch ``[B, T]`` has the B environments of its worker and ``frames_per_batch``
    frames (or the worker's entry, if that is a list). When its batch is delivered, a
    worker starts the next one with the newest weights. No rollout is copied or dropped.
    Workers that are ready at the same time are served in turn. The weights of a batch
    may be older than the last published ones; see ``max_staleness``.

    The arguments are the fields of ``CollectorArguments``.
    """

    @constructor(CollectorArguments)
    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        refuse(parsed, "MultiAsyncCollector")
        self._open(parsed, AsyncBackend(parsed))


@final
class AsyncBackend(WorkersBackend):
    """Workers that each fill their own slots."""

    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and allocate the slots."""
        super().__init__(parsed)
        sizes = self._sizes
        asked = parsed.frames_per_batch
        each = [asked] * len(sizes) if isinstance(asked, int) else list(asked)
        self._frames = [-(-f // size) for f, size in zip(each, sizes, strict=True)]
        self._slots: list[Slots] = []
        try:
            for size, frames in zip(sizes, self._frames, strict=True):
                # One held by the user, one being filled, one spare.
                self._slots.append(
                    Slots(self._workers.layout(size, frames), prepared=3)
                )
        except BaseException:
            self.close(ERROR_CLOSE_SECONDS)
            raise
        self._filling: dict[int, int] = {}  # Slot by worker, while it collects.
        self._in_flight = InFlight(parsed.max_staleness)

    @property
    def batch_frames(self) -> int:
        """Frames of the largest batch."""
        return max(f * size for f, size in zip(self._frames, self._sizes, strict=True))

    def outline(self) -> str:
        """Describe workers, environments and batch shapes, for ``repr``."""
        shapes = dict.fromkeys(zip(self._sizes, self._frames, strict=True))
        batches = " or ".join(f"[{rows}, {frames}]" for rows, frames in shapes)
        return f"{sized_workers(self._sizes)}, {batches}"

    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Return the first filled slot, and let its worker fill another one."""
        self._send_where_allowed(random=random, ahead=0)
        index, reply = self._workers.receive(self._filling)
        slot = self._filling.pop(index)
        self._in_flight.arrive(index)
        tensors = self._slots[index].hand_out(slot)
        # The worker collects its next batch while the user works with this one.
        size = self._sizes[index]
        delivered += reply.frames * size
        if not self._options.completed(delivered):
            random = self._options.random_after(delivered)
            self._send_where_allowed(random=random, ahead=1)
        ends = [reply.frames] * size
        last = gather(reply.last, [0] * len(reply.last))
        return Filled(tensors, ends, list(reply.episodes), [size], last)

    def _send_where_allowed(self, *, random: bool, ahead: int) -> None:
        """Let idle workers collect, as far as ``max_staleness`` allows.

        Args:
            random: act at random.
            ahead: number of batches about to be delivered. The user may update the
                weights after each of them.
        """
        for index in self._in_flight.idle(range(len(self._workers))):
            if not self._in_flight.may_dispatch(ahead):
                return
            self._send(index, random=random, ahead=ahead)

    def _send(self, index: int, *, random: bool, ahead: int) -> None:
        slots = self._slots[index]
        slot = slots.take()
        own = range(self._sizes[index])
        self._workers.attach(index, slots, slot, own, self._frames[index])
        reset = self._options.reset_at_each_iter
        command = messages.Collect(slot, random, reset, snapshot=True)
        self._workers.collect(index, command)
        self._filling[index] = slot
        self._in_flight.dispatch(index, ahead)

    def _settle(self) -> bool:
        """Drop all batches in flight."""
        dropped = bool(self._filling)
        while self._filling:
            index, _ = self._workers.receive(self._filling)
            self._slots[index].give_back(self._filling.pop(index))
        self._in_flight.clear()
        return dropped

    @override
    def states(self) -> list[Any]:
        # Batches in flight were not delivered, so they are collected again.
        return self._workers.ask_each(
            [
                messages.GetState(before=index in self._filling)
                for index in range(len(self._workers))
            ]
        )

    @override
    def metrics(self) -> dict[str, Any]:
        slots = sum(len(slots) for slots in self._slots)
        return self._workers.metrics() | {"slots": slots}

    @override
    def close(self, timeout: float) -> None:
        self._workers.close(timeout)
        for slots in self._slots:
            slots.close()


@dataclass(frozen=True)
class MultiArguments(CollectorArguments):
    """The arguments of ``MultiCollector``."""

    _: KW_ONLY
    sync: Annotated[bool, Option("whether all workers fill one batch together")]


@function(MultiArguments)
def MultiCollector(  # noqa: N802 - TorchRL's name
    parsed: MultiArguments,
) -> MultiSyncCollector | MultiAsyncCollector:
    """Return a MultiSyncCollector if ``sync``, otherwise a MultiAsyncCollector."""
    kind = MultiSyncCollector if parsed.sync else MultiAsyncCollector
    return kind(**values(CollectorArguments, parsed))


MultiaSyncDataCollector = MultiAsyncCollector
"""TorchRL's older name."""
