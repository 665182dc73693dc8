"""``Teams`` of workers, which fill the batches of collectors with workers."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from marl_collect.buffers.compact_observations import gather
from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages
from marl_collect.collectors.arguments import sized_workers
from marl_collect.collectors.delivery import FilledSlot
from marl_collect.collectors.options import CollectorOptions, refuse_ranks
from marl_collect.collectors.publish import Publisher
from marl_collect.collectors.workers import Workers
from marl_collect.core.batch import consecutive
from marl_collect.errors import warn
from marl_collect.processes.closing import ERROR_CLOSE_SECONDS
from marl_collect.processes.context import result
from marl_collect.rollout.env_calls import EnvCall
from marl_collect.rollout.episodes import EndedEpisodes
from marl_collect.rollout.loop import Collected


@final
class Teams:
    """Teams of workers that each fill slots of their own.

    A team starts its next batch when its last one is delivered. A single team of all
    workers does so with ``prefetch`` only. It then does not wait for its slowest
    worker: each worker starts its part of the next batch as soon as it is done.

    Attributes: see ``Source``.
    """

    works_in_forks = False
    keeps_state = False

    def __init__(
        self,
        workers: Workers,
        options: CollectorOptions,
        frames: Sequence[int],
        team: int | None = None,
    ) -> None:
        """Allocate the slots of workers that are ready.

        Args:
            workers: the workers, which ``close`` ends.
            options: of the collector.
            frames: per batch of each worker's environments.
            team: number of workers that fill a batch together; None for all of them.
        """
        self._options = options
        self._workers = workers
        self._team = team
        self._collects_ahead = team is not None or options.prefetch
        # By team, the oldest first. Others are idle.
        self._unfinished: dict[int, _Batch] = {}
        self._next_team = 0
        self.description = workers.description
        self.sizes = workers.sizes
        # Of each worker in its team's slots.
        self._rows: list[range] = []
        self.weights: Publisher = workers.weights
        self.statistics = workers.statistics
        self._frames = list(frames)
        try:
            self._teams, self._slots = self._allocate()
        except BaseException:
            workers.close(ERROR_CLOSE_SECONDS)
            raise
        layout = self._slots[0].layout
        self.shape = (layout, self.sizes, self._frames) if team is None else None

    def _allocate(self) -> tuple[list[range], list[Slots]]:
        """Return the workers of each team, and its slots.

        Raises:
            ValueError: if ``cat_results`` needs equal workers, or several ranks need
                equal batches, but they differ.
        """
        if self._options.cat_results is not None and len(set(self.sizes)) > 1:
            raise ValueError(
                "cat_results joins batches of workers with equally many environments, "
                f"but the workers have {self.sizes}: omit cat_results."
            )
        size = self._team or len(self._workers)
        starts = range(0, len(self._workers), size)
        teams = [range(start, start + size) for start in starts]
        of_worker = list(map(operator.mul, self._frames, self.sizes))
        of_team = {sum(of_worker[k] for k in team) for team in teams}
        self.batch_frames = max(of_team)
        self.equal_batches = len(of_team) == 1 and not self._options.preempts
        if not self.equal_batches:
            refuse_ranks(self._options, "batches of several sizes")
        # The user holds one while another is filled. One that is filled ahead may be
        # delivered while the user still holds the last.
        prepared = 3 if self._collects_ahead else 2
        all_slots: list[Slots] = []
        for workers in teams:
            sizes = [self.sizes[index] for index in workers]
            self._rows += consecutive(sizes)
            frames = max(self._frames[index] for index in workers)
            layout = self._workers.layout(sum(sizes), frames)
            all_slots.append(Slots(layout, prepared=prepared))
        return teams, all_slots

    def outline(self) -> str:
        """Describe workers, environments and batch shape."""
        shapes = dict.fromkeys(slots.layout.batch for slots in self._slots)
        batches = " or ".join(f"[{rows}, {frames}]" for rows, frames in shapes)
        return f"{sized_workers(self.sizes)}, {batches}"

    def fill(self, *, random: bool, delivered: int) -> FilledSlot:
        """Fill one slot; see ``Source``."""
        self._start_teams(random=random, ahead=0)
        # Only of a single team is it known which batch is the next to be delivered. Its
        # frames are known in advance if no worker is preempted.
        if self._team is None and self._collects_ahead and not self._options.preempts:
            expected = delivered + self.batch_frames
            if not self._options.completed(expected):
                random = self._options.random_after(expected)
                self._unfinished[0].next_command = self._command(0, random=random)
        team, batch = self._receive()
        filled = self._filled(team, batch, delivered)
        delivered += filled.frames
        if self._collects_ahead and not self._options.completed(delivered):
            # The workers collect their next batch while the user works with this one.
            self._start_teams(random=self._options.random_after(delivered), ahead=1)
        return filled

    def _start_teams(self, *, random: bool, ahead: int) -> None:
        """Let idle teams collect in turn, as far as ``max_staleness`` allows.

        Args:
            random: act at random.
            ahead: number of batches about to be delivered. The user may update the
                weights after each of them.
        """
        teams = range(len(self._teams))
        for team in (*teams[self._next_team :], *teams[: self._next_team]):
            if team in self._unfinished:
                continue
            if not self._may_start(ahead):
                return
            command = self._command(team, random=random)
            self._collect(self._teams[team], command)
            self._unfinished[team] = _Batch(
                command.slot, list(self._teams[team]), staleness=ahead
            )
            self._next_team = team + 1

    def _may_start(self, ahead: int) -> bool:
        """Return whether no batch exceeds ``max_staleness`` if another one is started.

        The staleness of a batch grows with each batch that is delivered before it. In
        the worst case all other batches are delivered before the new one.
        """
        limit = self._options.max_staleness
        if limit is None:
            return True
        worst = max([ahead, *(batch.staleness for batch in self._unfinished.values())])
        return worst + len(self._unfinished) <= limit

    def _command(self, team: int, *, random: bool) -> messages.Collect:
        slots = self._slots[team]
        return messages.Collect(
            slots.acquire(),
            random=random,
            reset=self._options.reset_at_each_iter,
            mark=self._collects_ahead,
            vacant=slots.vacant,
        )

    def _collect(self, workers: Sequence[int], command: messages.Collect) -> None:
        """Let workers of a team fill their rows of a slot."""
        slots = self._slots[self._team_of(workers[0])]
        parts = {k: (self._rows[k], self._frames[k]) for k in workers}
        self._workers.attach(slots, command.slot, parts)
        self._workers.collect(workers, command)

    def _receive(self) -> tuple[int, "_Batch"]:
        """Wait for the next complete batch; return its team and it.

        With ``preemptive_threshold``, the slowest workers are preempted when enough
        others are done.
        """
        workers, threshold = self._workers, self._options.preemptive_threshold
        while True:
            index, reply = workers.wait(
                index for batch in self._unfinished.values() for index in batch.waiting
            )
            team = self._team_of(index)
            batch = self._unfinished[team]
            batch.replies[index] = reply
            batch.waiting.remove(index)
            next_command = batch.next_command
            if next_command is not None:
                self._collect([index], next_command)
            if not batch.waiting:
                break
            if self._options.preempts:
                enough = max(1, int(len(self._teams[team]) * (threshold or 0.0)))
                if len(batch.replies) == enough:
                    workers.preempt(batch.waiting)
        del self._unfinished[team]
        for other in self._unfinished.values():
            other.staleness += 1
        if next_command is not None:
            self._unfinished[team] = _Batch(next_command.slot, list(self._teams[team]))
        return team, batch

    def drop_unfinished(self) -> bool:
        """Drop unfinished batches; return whether there were any."""
        dropped = bool(self._unfinished)
        while self._unfinished:
            team, batch = self._receive()
            self._slots[team].give_back(batch.slot)
        return dropped

    def states(self) -> list[Any]:
        """Return every worker's state: before its unfinished batch, or now.

        An unfinished batch is not delivered, so it is collected again from this state.
        """
        before = {
            worker: (self._team_of(worker) in self._unfinished,)
            for worker in range(len(self._workers))
        }
        return self._workers.call_each("state", before)

    def metrics(self) -> dict[str, Any]:
        """Return entries of ``stats()`` in addition to ``statistics``."""
        slots = sum(len(slots) for slots in self._slots)
        return self._workers.metrics() | {"slots": slots}

    def close(self, timeout: float) -> None:
        """End the workers, then release the slots."""
        self._workers.close(timeout)
        for slots in self._slots:
            slots.close()

    def _rewind(self, fresh: Sequence[int]) -> bool:
        """Let workers return to the beginning of batches that are not delivered.

        Args:
            fresh: workers that begin new episodes instead.

        Returns:
            Whether there were such batches.
        """
        states = self.states()
        if not self.drop_unfinished():
            return False
        self._workers.load(dict(enumerate(states)), fresh)
        if not self.description.repeats:
            warn(
                f"{self.description.name} does not repeat its episodes, and an "
                "unfinished batch was dropped: all environments begin new episodes, "
                "not only the selected ones."
            )
        return True

    def _team_of(self, worker: int) -> int:
        return worker // len(self._teams[0])

    def _filled(self, team: int, batch: "_Batch", delivered: int) -> FilledSlot:
        """Return a batch whose rows a team has filled, worker by worker."""
        workers, replies = self._teams[team], batch.replies
        last = [
            (self._rows[index].start + rows, frame, observations)
            for index in workers
            for rows, frame, observations in replies[index].last
        ]
        slots = self._slots[team]
        tensors = slots.hand_out(batch.slot)
        for index in workers:
            rows, end = self._rows[index], self._frames[index]
            if end < slots.layout.batch[1]:  # The user may have changed the rest.
                for key, tensor in tensors.items():
                    rest = tensor[rows.start : rows.stop, end:]
                    rest.fill_(-1 if key == TRAJ_IDS else 0)
        return FilledSlot(
            tensors,
            ends=[replies[k].frames for k in workers for _ in self._rows[k]],
            episodes=EndedEpisodes.join([replies[k].episodes for k in workers]),
            sizes=[self.sizes[k] for k in workers],
            last=gather(last, delivered),
        )

    def steps(self) -> int:
        """Return the frames stepped so far, from any thread."""
        return self._workers.steps()

    def begin_episodes(
        self, workers: Sequence[int] | None = None, seed: int | None = None
    ) -> None:
        """Begin new episodes; see ``Source``."""
        if workers is None:
            self.drop_unfinished()
        elif self._rewind(workers):
            return
        self._workers.begin_episodes(workers, seed)

    def load(self, states: list[Any]) -> None:
        """Resume from these states."""
        self.drop_unfinished()
        self._workers.load(dict(enumerate(states)))

    def set_level(self, level: int) -> None:
        """Set the curriculum's level; see ``Source``."""
        self._workers.level = level

    def explain(self) -> list[str]:
        """Return how each worker's policy ran when it last replied, and why."""
        return self._workers.explain()

    def attribute(self, owner: str, name: str) -> list[Any]:
        """Return an attribute of every worker's ``"env"`` or ``"policy"``."""
        replies = self._workers.call("attribute", owner, name)
        return [result(reply, index) for index, reply in enumerate(replies)]

    def call_env(self, call: EnvCall) -> list[Any]:
        """Call a method of environments; see ``Source``."""
        calls = {
            worker: part
            for worker, rows in enumerate(consecutive(self.sizes))
            if (part := call.in_rows(rows)).rows
        }
        replies = self._workers.call_env(calls)
        pairs = zip(calls, replies, strict=True)
        return [result(reply, worker) for worker, of in pairs for reply in of]


@final
@dataclass
class _Batch:
    """A batch that a team fills.

    Attributes:
        slot: that is filled.
        waiting: the workers that are still collecting.
        replies: of the others.
        staleness: number of batches that were delivered since it was started.
        next_command: what each worker collects when it is done, if that is known.
    """

    slot: int
    waiting: list[int]
    replies: dict[int, Collected] = field(default_factory=dict)
    staleness: int = 0
    next_command: messages.Collect | None = None
