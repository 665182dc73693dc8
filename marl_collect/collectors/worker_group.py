"""The trainer's side of a collector's workers: starts them, sends commands, waits.

A ``WorkerGroup`` owns the processes and the shared weights of a sync or async
collector. Slots belong to the collector.
"""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, final

import torch

from marl_collect.buffers.layout import BatchContents, Layout, batch_fields
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages, worker
from marl_collect.collectors.assigning import assign, draw_seed
from marl_collect.collectors.backend import Placement
from marl_collect.collectors.checkpoint import warn_if_not_resumed
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.shared_weights import SharedWeights, factories_of
from marl_collect.collectors.statistics import WorkerMetrics
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    check_can_be_sent,
    chosen_policy,
    is_random,
    prepare,
)
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, check_alike, spread, warn_if_pinned
from marl_collect.core.signature import check_same_signature
from marl_collect.errors import warn, worker_error_of
from marl_collect.processes.closing import ERROR_CLOSE_SECONDS
from marl_collect.processes.launcher import COLLECTOR_MODULES
from marl_collect.processes.pool import WorkerPool
from marl_collect.processes.status_board import PREEMPT
from marl_collect.processes.worker_handle import resident_bytes
from marl_collect.rollout.episodes import Plan, left_behind

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@final
class WorkerGroup:
    """Workers with their environments, their policy, and their weights."""

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
        self._seed = draw_seed(options.seed)
        check_can_be_sent(policy, options)
        self._assignments = assign(factories, options)
        count = len(factories)
        factories_of(options, count)  # Raises an error if a list has the wrong length.
        self._pool = WorkerPool(
            worker.main,
            self._assignments,
            start_method=options.start_method,
            preload=(*COLLECTOR_MODULES, *options.preload),
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            num_threads=options.num_sub_threads,
        )
        self.weights: SharedWeights = None  # type: ignore[assignment]
        self._attached: list[dict[int, messages.UseSlot]] = [{} for _ in range(count)]
        self._running: list[tuple[int, ...]] = [()] * count
        self._plans: list[Plan] = []
        self._last: list[messages.Collect | None] = [None] * count
        self._early: deque[tuple[int, messages.Collected]] = deque()
        self._fragile: set[int] = set()
        self._heavy: set[int] = set()
        self._metrics = WorkerMetrics()
        self._started = False
        try:
            self.description, self.environments = self._connect()
            self.ready = self._send_policy(policy)
            self._started = True
        except BaseException:
            # Nothing has been collected, so there is nothing to wait for.
            with suppress(Warning):  # It must not hide the first error.
                self.close(ERROR_CLOSE_SECONDS)
            raise

    def __len__(self) -> int:
        """Number of workers."""
        return len(self._assignments)

    # Memory

    def layout(self, environments: int, frames: int) -> Layout:
        """Return the layout of a slot for these numbers of environments and frames."""
        options, ready = self._options, self.ready
        contents = BatchContents(
            traj_ids=options.track_traj_ids,
            step_count=options.max_frames_per_traj is not None,
            policy_version=options.track_policy_version,
            is_init=ready.signature.reads_is_init,
            ragged=options.ragged,
            compact_obs=options.compact_obs,
        )
        fields = batch_fields(self.description, ready.signature, contents)
        return Layout.plan(fields, (environments, frames))

    def attach(
        self, index: int, slots: Slots, slot: int, rows: range, frames: int
    ) -> None:
        """Let a worker map its rows of a slot, unless it has mapped them."""
        memory = slots.segment(slot).handle
        known = self._attached[index].get(slot)
        if known is None or known.memory is not memory:
            command = messages.UseSlot(
                slot,
                memory,
                slots.layout,
                (rows.start, rows.stop),
                frames,
            )
            self._attached[index][slot] = command
            self._ask([index], command, messages.MemoryAttached)

    # Collecting

    def collect(self, index: int, command: messages.Collect) -> None:
        """Tell a worker to fill its rows of a slot, with the newest weights."""
        if index in self._heavy:
            self._recycle(index)
        command = replace(command, weights=self.weights.order(index))
        self._last[index] = command
        self._pool.status_board.lines[index].cells[PREEMPT] = 0
        self._pool.send(index, command)

    def receive(self, indices: Iterable[int]) -> tuple[int, messages.Collected]:
        """Return the next worker of ``indices`` that is done, with its reply.

        With ``on_worker_failure="restart"`` a worker that failed is replaced and
        collects again.
        """
        waiting = set(indices)
        for early in self._early:
            if early[0] in waiting:
                self._early.remove(early)
                return self._collected(*early)
        while True:
            try:
                index, reply = self._pool.receive(waiting)
            except Exception as error:  # noqa: BLE001 - raised again, or handled
                self._replace_or_raise(error)
            else:
                return self._collected(
                    index, messages.expect(reply, messages.Collected, index)
                )

    def preempt(self, indices: Iterable[int]) -> None:
        """Let workers end their rollouts early, after at least one frame."""
        for index in indices:
            self._pool.status_board.lines[index].cells[PREEMPT] = 1

    def ask(self, command: object, indices: Iterable[int] | None = None) -> list[Any]:
        """Let workers execute a command, and return their results in order."""
        chosen = list(range(len(self)) if indices is None else indices)
        replies = self._ask(chosen, command, messages.Done)
        return [reply.value for reply in replies]

    def ask_each(self, commands: Sequence[object]) -> list[Any]:
        """Let every worker execute its own command, and return the results in order."""
        numbered = dict(enumerate(commands))
        return [reply.value for reply in self._ask_each(numbered, messages.Done)]

    def reseed(self, seed: int) -> None:
        """Let all workers derive all random numbers from ``seed``, from episode 0."""
        self.ask(messages.Reseed(seed))
        self._plans = [replace(plan, seed=seed) for plan in self._plans]
        self._running = [()] * len(self)

    def load(self, states: Sequence[Any], begin: Sequence[int] = ()) -> None:
        """Let all workers resume from states of ``Rollout.state``.

        Args:
            states: of each worker.
            begin: workers that begin new episodes instead of replaying their own.
        """
        self._running = self.ask_each(
            [
                messages.LoadState(state, begin=index in begin)
                for index, state in enumerate(states)
            ]
        )
        self._plans = [
            replace(plan, seed=state["seed"], generation=state["generation"])
            for plan, state in zip(self._plans, states, strict=True)
        ]
        for index, state in enumerate(states):
            if index not in begin:
                self._note_cut(index, state)

    def place(self, place: Placement) -> None:
        """Set the numbers of environments and episodes, before the first frame."""
        for index, own in enumerate(self.environments):
            plan = place.part(self._plans[index], own)
            self._plans[index] = plan
            self._running[index] = plan.episodes
            self._pool.send(index, messages.UsePlan(plan))

    # State

    @property
    def running(self) -> tuple[int, ...]:
        """Number of each environment's running episode; () before the first frame."""
        return self.running_of(range(len(self)))

    def running_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the running episodes of some workers."""
        return tuple(number for index in indices for number in self._running[index])

    def steps(self) -> int:
        """Return the number of frames that the workers have stepped so far."""
        return sum(
            self._pool.progress(index).steps * len(environments)
            for index, environments in enumerate(self.environments)
        )

    def metrics(self) -> dict[str, Any]:
        """Return restarts, cut trajectories, and seconds in rollouts and resets."""
        return self._metrics.snapshot()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker."""
        return self._pool.pids

    def close(self, timeout: float) -> None:
        """End the workers and release the memory of the weights."""
        failures = self._pool.close(timeout)
        if self.weights is not None:
            self.weights.close()
        for failure in failures:
            if failure.phase == "close":
                warn(f"While closing: {failure}", RuntimeWarning)

    # Preparing

    def _connect(self) -> tuple[EnvDescription, list[range]]:
        """Wait for all environments, number them, and send the workers their plans."""
        everyone = list(range(len(self)))
        found = self._replies(everyone, messages.WorkerReady)
        first = found[0].description
        ranges: list[range] = []
        begin = 0
        for index, ready in enumerate(found):
            check_alike(first, ready.description, f"worker {index}", "worker 0")
            ranges.append(range(begin, begin + ready.size))
            begin += ready.size
        warn_if_pinned(first, begin)
        limit = self._options.max_frames_per_traj
        self._plans = [Plan(self._seed, own, limit) for own in ranges]
        for index, plan in enumerate(self._plans):
            self._pool.send(index, messages.UsePlan(plan))
        return first, ranges

    def _send_policy(self, policy: Any) -> messages.PolicyReady:
        module = None
        if not is_random(policy):
            trust = self._options.trust_policy
            module = prepare(policy, self.description, self._seed, trust=trust)
        self.weights = SharedWeights(
            TrainerPolicy(module, policy),
            self._options,
            self._pool,
            self._ask,
            self.check,
        )
        everyone = list(range(len(self)))
        for index in everyone:
            self._pool.send(index, self.weights.command(index))
        found = self._replies(everyone, messages.PolicyReady)
        ready = found[0]
        for index in everyone:
            check_same_signature(
                ready.signature, found[index].signature, f"worker {index}"
            )
        self.weights.share([each.layout for each in found])
        return ready

    # Replies

    def _ask(self, indices: Sequence[int], command: object, kind: type[T]) -> list[T]:
        return self._ask_each(dict.fromkeys(indices, command), kind)

    def _ask_each(self, commands: Mapping[int, object], kind: type[T]) -> list[T]:
        for index, command in commands.items():
            self._pool.send(index, command)
        return self._replies(list(commands), kind, commands)

    def _replies(
        self,
        indices: Sequence[int],
        kind: type[T],
        commands: Mapping[int, object] | None = None,
    ) -> list[T]:
        """Return the reply of each worker, in the order of ``indices``.

        Args:
            indices: of the workers.
            kind: of the replies.
            commands: sent again to a worker that is replaced while waiting; None if
                no worker may be replaced.
        """
        replies: dict[int, T] = {}
        while len(replies) < len(indices):
            waiting = [index for index in indices if index not in replies]
            try:
                index, reply = self._pool.receive(waiting)
            except Exception as error:
                if commands is None:
                    raise
                index = self._replace_or_raise(error)
                self._pool.send(index, commands[index])
                continue
            if isinstance(reply, messages.Collected):
                # The worker was collecting when the command was sent.
                self._early.append((index, reply))
            else:
                replies[index] = messages.expect(reply, kind, index)
        return [replies[index] for index in indices]

    def _collected(
        self, index: int, reply: messages.Collected
    ) -> tuple[int, messages.Collected]:
        self._running[index] = reply.running
        self._last[index] = None
        self._fragile.discard(index)
        limit = self._options.max_worker_rss
        if limit is not None and resident_bytes(self.pids[index]) > limit:
            self._heavy.add(index)
        self._metrics.add(reply.seconds)
        return index, reply

    # Failures

    def check(self, indices: Sequence[int]) -> None:
        """Check the workers once; replace one that failed, or raise its error."""
        try:
            self._pool.check(indices)
        except Exception as error:  # noqa: BLE001 - raised again, or handled
            self._replace_or_raise(error)

    def _replace_or_raise(self, error: Exception) -> int:
        """Replace the worker that failed and return its index, or raise its error."""
        cause = worker_error_of(error)
        restart = self._started and self._options.on_worker_failure == "restart"
        if cause is None or not restart:
            raise error
        index = cause.worker
        if index in self._fragile:
            error.add_note(
                f"Worker {index} was restarted and failed again before it completed a "
                "batch, so it is not restarted a second time."
            )
            raise error
        self._fragile.add(index)
        _LOG.warning("Restarting: %s", str(cause).partition("\n")[0])
        self._start_again(index)
        # Tracebacks would keep our callers' frames alive, and with them batches.
        for handled in (error, cause):
            handled.__traceback__ = None
        return index

    def _start_again(self, index: int) -> None:
        """Restart a failed worker, and let it collect its batch again."""
        plan, running = self._plans[index], self._running[index]
        cells = self._pool.status_board.lines[index].cells
        preempted = cells[PREEMPT]  # Also the replacement stops early then.
        self._metrics.restarts += 1
        self._metrics.cut(plan.environments, running)
        generation = plan.generation + 1
        self._renew(index, replace(plan, episodes=running, generation=generation))
        # A batch that was finished but not received is collected again, because the
        # state before it was lost with the worker.
        self._early = deque(early for early in self._early if early[0] != index)
        last = self._last[index]
        if last is None:
            self.weights.forget(index)
            return
        last = replace(last, weights=self.weights.order_again(index))
        self._last[index] = last
        cells[PREEMPT] = preempted
        self._pool.send(index, last)

    def _recycle(self, index: int) -> None:
        """Replace an idle worker that exceeded ``max_worker_rss``."""
        _LOG.info("Worker %d exceeds max_worker_rss and is replaced.", index)
        (state,) = self.ask(messages.GetState(before=False), [index])
        self._heavy.discard(index)
        self._metrics.recycled += 1
        self._renew(index, self._plans[index])
        (self._running[index],) = self.ask(messages.LoadState(state), [index])
        self._note_cut(index, state)
        warn_if_not_resumed(self.description, [state], self._running[index])

    def _note_cut(self, index: int, state: Any) -> None:
        """Record the episodes of a loaded state that the worker did not resume."""
        environments = self._plans[index].environments
        for k in left_behind(state["environments"], self._running[index]):
            number = state["environments"][k]["episode"]
            self._metrics.cut([environments[k]], [number])

    def _renew(self, index: int, plan: Plan) -> None:
        """Restart a worker, so it can collect."""
        self._plans[index] = plan
        self._pool.restart(index, self._assignments[index])
        found = self._replies([index], messages.WorkerReady)[0]
        check_alike(self.description, found.description, f"worker {index}", "before")
        self._pool.send(index, messages.UsePlan(plan))
        command = self.weights.command(index)
        (ready,) = self._ask([index], command, messages.PolicyReady)
        check_same_signature(self.ready.signature, ready.signature, f"worker {index}")
        self.weights.use(index)
        for slot, command in list(self._attached[index].items()):
            if command.memory.exists():
                self._ask([index], command, messages.MemoryAttached)
            else:
                del self._attached[index][slot]  # The slot has new memory; see Slots.


def start_workers(
    create_env_fn: Factory | Sequence[Factory], policy: Any, options: CollectorOptions
) -> WorkerGroup:
    """Check the arguments and start the workers."""
    policy = chosen_policy(policy, options)
    factories = spread(
        create_env_fn,
        options.num_workers,
        options.envs_per_worker,
        options.create_env_kwargs,
    )
    if not isinstance(options.frames_per_batch, int):
        options.frames_of([len(own) for own in factories])
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    return WorkerGroup(factories, policy, options)
