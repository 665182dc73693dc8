"""``MultiAsyncCollector``: yields batches of single workers as they arrive."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, final

from typing_extensions import override

from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages
from marl_collect.collectors.assigning import sized_workers
from marl_collect.collectors.backend import Filled
from marl_collect.collectors.in_flight import InFlight
from marl_collect.collectors.multi_base import MultiCollectorBase, WorkersBackend
from marl_collect.collectors.multi_sync import MultiSyncCollector
from marl_collect.collectors.options import CollectorArguments, CollectorOptions
from marl_collect.collectors.worker_group import WorkerGroup, start_workers
from marl_collect.options import Option, function, method, refuse, values


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

    @method(CollectorArguments)
    def __init__(self, parsed: CollectorArguments) -> None:
        """Start the workers and wait until all of them are ready."""
        refuse(parsed, "MultiAsyncCollector")
        workers = start_workers(parsed.create_env_fn, parsed.policy, parsed)
        frames = parsed.own_frames_of(workers.sizes)
        self._open(parsed, AsyncBackend(workers, parsed, frames))


@final
class AsyncBackend(WorkersBackend):
    """Teams of workers that each fill slots of their own."""

    def __init__(
        self,
        workers: WorkerGroup,
        options: CollectorOptions,
        frames: Sequence[int],
        team: int = 1,
    ) -> None:
        """Allocate the slots of workers that are ready.

        Args:
            workers: the workers, which this backend closes.
            options: of the collector.
            frames: per batch of each worker's environments.
            team: number of workers that fill a batch together.
        """
        self._team = team
        self._filling: dict[int, _Batch] = {}  # By team, while it collects.
        self._in_flight = InFlight(options.max_staleness)
        super().__init__(workers, options, frames)

    @override
    def reshape(self, frames: Sequence[int]) -> None:
        self._frames = list(frames)
        self._slots: list[Slots] = []
        for workers in self._teams:
            rows = sum(self._sizes[index] for index in workers)
            layout = self._workers.layout(rows, frames[workers.start])
            # One held by the user, one being filled, one spare.
            self._slots.append(Slots(layout, prepared=3))

    @property
    def _teams(self) -> list[range]:
        """Indices of the workers of each team."""
        starts = range(0, len(self._workers), self._team)
        return [range(start, start + self._team) for start in starts]

    @property
    def batch_frames(self) -> int:
        """Frames of the largest batch."""
        shapes = [slots.layout.batch for slots in self._slots]
        return max(rows * frames for rows, frames in shapes)

    def outline(self) -> str:
        """Describe workers, environments and batch shapes, for ``repr``."""
        shapes = dict.fromkeys(slots.layout.batch for slots in self._slots)
        batches = " or ".join(f"[{rows}, {frames}]" for rows, frames in shapes)
        return f"{sized_workers(self._sizes)}, {batches}"

    def collect(self, *, random: bool, delivered: int) -> Filled:
        """Return the first filled slot, and let its workers fill another one."""
        self._send_where_allowed(random=random, ahead=0)
        team = self._receive()
        batch = self._filling.pop(team)
        tensors = self._slots[team].hand_out(batch.slot)
        filled = self._filled(tensors, self._teams[team], batch.replies)
        # The workers collect their next batch while the user works with this one.
        delivered += filled.frames
        if not self._options.completed(delivered):
            random = self._options.random_after(delivered)
            self._send_where_allowed(random=random, ahead=1)
        return filled

    def _receive(self) -> int:
        """Return the next team whose batch is complete."""
        while True:
            waiting = [i for batch in self._filling.values() for i in batch.waiting]
            index, reply = self._workers.receive(waiting)
            team = index // self._team
            batch = self._filling[team]
            batch.replies[index] = reply
            batch.waiting.remove(index)
            if not batch.waiting:
                self._in_flight.arrive(team)
                return team

    def _send_where_allowed(self, *, random: bool, ahead: int) -> None:
        """Let idle teams collect, as far as ``max_staleness`` allows.

        Args:
            random: act at random.
            ahead: number of batches about to be delivered. The user may update the
                weights after each of them.
        """
        for team in self._in_flight.idle(range(len(self._slots))):
            if not self._in_flight.may_dispatch(ahead):
                return
            self._send(team, random=random)
            self._in_flight.dispatch(team, ahead)

    def _send(self, team: int, *, random: bool) -> None:
        slots, workers = self._slots[team], self._teams[team]
        slot = slots.take()
        begin = 0
        for index in workers:
            rows = range(begin, begin + self._sizes[index])
            self._workers.attach(index, slots, slot, rows, self._frames[index])
            begin = rows.stop
        reset = self._options.reset_at_each_iter
        command = messages.Collect(slot, random, reset, snapshot=True)
        for index in workers:
            self._workers.collect(index, command)
        self._filling[team] = _Batch(slot, list(workers))

    def _settle(self) -> bool:
        """Drop all batches in flight."""
        dropped = bool(self._filling)
        while self._filling:
            team = self._receive()
            self._slots[team].give_back(self._filling.pop(team).slot)
        return dropped

    @override
    def states(self) -> list[Any]:
        # Batches in flight were not delivered, so they are collected again.
        return self._workers.ask_each(
            [
                messages.GetState(before=index // self._team in self._filling)
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


@final
@dataclass
class _Batch:
    """A batch in progress.

    Attributes:
        slot: that its team fills.
        waiting: the workers that are still collecting.
        replies: of the others.
    """

    slot: int
    waiting: list[int]
    replies: dict[int, messages.Collected] = field(default_factory=dict)


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
