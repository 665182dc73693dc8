"""The trainer's side of a collector's workers: starts, commands and replaces them.

    trainer                                          worker
    Teams    choose a slot and its workers
    Workers  collect(worker, Collect) -- socket -->  RolloutWorker.collect
               Collect: number of the slot             writes its rows of the slot
               Weights: version and weights slot       copies that one first
             wait(workers)  <-- Collected, socket --
    Teams    deliver the slot

    shared memory: slots           trainer reads      worker writes its rows
                   weights         trainer writes     worker copies
                   status board    trainer reads      worker writes its line

A ``Member`` has what a replacement needs: its assignment, its plan, the numbers of its
running episodes, its slots and the batch that it collects.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch

from marl_collect.buffers.layout import Layout
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages
from marl_collect.collectors.checkpoint import note_resumed
from marl_collect.collectors.initialization import check_can_be_copied, prepare
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.publish import WorkerWeights
from marl_collect.collectors.statistics import Statistics
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    check_can_be_sent,
)
from marl_collect.collectors.worker import main
from marl_collect.core.batch import consecutive
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, check_alike, warn_if_pinned
from marl_collect.core.random_actions import is_random
from marl_collect.core.seeding import draw_seed
from marl_collect.core.signature import PolicySignature, check_same_signature
from marl_collect.errors import WorkerError, warn, worker_error_of
from marl_collect.processes.closing import ERROR_CLOSE_SECONDS
from marl_collect.processes.context import Attempt, result
from marl_collect.processes.launcher import COLLECTOR_MODULES
from marl_collect.processes.pool import WorkerPool
from marl_collect.rollout.env_calls import EnvCall, add_call, calls_of
from marl_collect.rollout.episodes import Plan
from marl_collect.rollout.loop import Collected
from marl_collect.weights.layout import WeightLayout
from marl_collect.weights.shared import WeightVector

_LOG = logging.getLogger(__name__)


class Workers:
    """Workers with their environments, their policy, and their weights.

    They are processes of this machine; ``RayWorkers`` are on the nodes of a cluster.

    Attributes:
        description: of the environments.
        weights: which workers act with.
        statistics: counts their restarts, cut trajectories and seconds.
        level: of the curriculum, for episodes that begin in calls made from now on.
    """

    # How often a worker may be replaced before its next batch.
    _most_in_a_row = 1
    _pool: WorkerPool

    def __init__(
        self,
        factories: Sequence[Sequence[Factory]],
        policy: Any,
        options: CollectorOptions,
        first_seeds: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Start all workers and wait until they can collect.

        Args:
            factories: of each worker's environments.
            policy: as passed by the user.
            options: of the collector.
            first_seeds: returns the seeds of the first episodes for a number of
                environments. A policy that is called at the start sees the first
                observations of these episodes. By default they are derived from the
                collector's seed.
        """
        self._options = options
        self.level = options.level
        seed = draw_seed(options.seed)
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        check_can_be_sent(policy, options)
        check_can_be_copied(policy)
        options.policy_factories(len(factories))  # Does a list of them fit?
        self._members = list(map(_Member, _assign(factories, options)))
        self._pool = self._start()
        self.weights: WorkerWeights = None  # type: ignore[assignment]
        # Batches that were finished while the worker was called.
        self._collected: deque[tuple[int, Collected]] = deque()
        self.statistics = Statistics()
        self._started = False
        try:
            self.description = self._number(seed, first_seeds)
            self.weights = self._weights_of(policy, seed)
            self._signature = self._prepare()
            self._started = True
        except BaseException:
            # Nothing has been collected, so there is nothing to wait for.
            with suppress(Warning):  # It must not hide the first error.
                self.close(ERROR_CLOSE_SECONDS)
            raise

    def __len__(self) -> int:
        """Number of workers."""
        return len(self._members)

    @property
    def sizes(self) -> list[int]:
        """Number of environments of each worker."""
        return [len(member.plan.environments) for member in self._members]

    # Slots

    def layout(self, environments: int, frames: int) -> Layout:
        """Return the layout of a slot for these numbers of environments and frames."""
        batch = environments, frames
        return self._options.batch_layout(self.description, self._signature, batch)

    def attach(
        self, slots: Slots, slot: int, parts: Mapping[int, tuple[range, int]]
    ) -> None:
        """Let workers map their rows of a slot, unless they have mapped them.

        Args:
            slots: of their team.
            slot: its number.
            parts: the rows and the number of frames of each of these workers.
        """
        memory = slots.segment(slot).handle
        unmapped: dict[int, tuple[Any, ...]] = {}
        for worker, (rows, frames) in parts.items():
            mapped = self._members[worker].slots
            if slot not in mapped or mapped[slot][1] is not memory:
                mapped[slot] = slot, memory, slots.layout, rows, frames
                unmapped[worker] = mapped[slot]
        if unmapped:
            self.call_each("use_slot", unmapped)

    # Collecting

    def collect(self, workers: Sequence[int], command: messages.Collect) -> None:
        """Tell workers to fill their rows of a slot, with the newest weights."""
        for worker in workers:
            if self._members[worker].is_heavy:
                self._recycle(worker)
        for worker in workers:
            member = self._members[worker]
            for slot in command.vacant:
                member.slots.pop(slot, None)
            member.batch = command  # Weights stay while they are referred to.
        self.preempt(workers, preempted=False)
        self._send("collect", {worker: self._batch_of(worker) for worker in workers})

    def wait(self, workers: Iterable[int]) -> tuple[int, Collected]:
        """Return the next of some workers that is done, with its reply.

        With ``on_worker_failure="restart"`` a worker that failed is replaced and
        collects again.
        """
        waiting = set(workers)
        for arrived in self._collected:
            if arrived[0] in waiting:
                self._collected.remove(arrived)
                return self._completed(*arrived)
        while True:
            try:
                worker, reply = self._next_reply(waiting)
            except Exception as error:  # noqa: BLE001 - raised again, or handled
                self._replace_or_raise(error)
            else:
                if isinstance(reply, Collected):
                    return self._completed(worker, reply)

    def preempt(self, workers: Iterable[int], *, preempted: bool = True) -> None:
        """Let workers end their rollouts early, after at least one frame, or not."""
        for worker in workers:
            if self._members[worker].preempted != preempted:
                self._members[worker].preempted = preempted
                self._pool.preempt(worker, preempted=preempted)

    # Other calls

    def call(
        self, method: str, *arguments: Any, workers: Iterable[int] | None = None
    ) -> list[Any]:
        """Let workers, by default all, call a method; return its results in order."""
        chosen = range(len(self)) if workers is None else workers
        return self.call_each(method, dict.fromkeys(chosen, arguments))

    def call_each(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> list[Any]:
        """Let each of these workers call a method with its own arguments.

        A worker that fails meanwhile and is replaced is called again. If none replaces
        it, or if a call cannot be sent, the replies that are still to come are dropped
        when they arrive.

        Args:
            method: of ``RolloutWorker``.
            arguments: by worker.

        Returns:
            The results, in the same order.
        """
        self._send(method, arguments)
        results: dict[int, Any] = {}
        while waiting := arguments.keys() - results:
            try:
                worker, result = self._receive(waiting)
            except Exception as error:  # noqa: BLE001 - raised again, or handled
                for worker in self._replace_or_raise(error):
                    if worker in arguments:  # What it did for an earlier one is lost.
                        results.pop(worker, None)
                        self._send(method, {worker: arguments[worker]})
            else:
                results[worker] = result
        return [results[worker] for worker in arguments]

    def begin_episodes(
        self, workers: Iterable[int] | None = None, seed: int | None = None
    ) -> None:
        """Let workers, by default all, begin new episodes.

        Args:
            workers: their indices.
            seed: from which all random numbers are derived from now on, by all workers;
                None goes on.
        """
        if seed is not None:
            self._use_plans([member.plan.with_seed(seed) for member in self._members])
        self.call("reset", self.level, workers=workers)

    def load(self, states: Mapping[int, Any], fresh: Sequence[int] = ()) -> None:
        """Let workers resume from states of ``Rollout.state``.

        Args:
            states: by worker.
            fresh: workers that begin new episodes instead of replaying their own.
        """
        arguments = {k: (s, self.level, k in fresh) for k, s in states.items()}
        for worker in states:  # The states have their calls.
            self._members[worker].calls = {}
        running = self.call_each("load", arguments)
        resumed = []
        for (index, state), episodes in zip(states.items(), running, strict=True):
            member = self._members[index]
            member.running, member.calls = episodes, calls_of(state["calls"])
            member.plan = replace(
                member.plan, seed=state["seed"], generation=state["generation"]
            )
            if index not in fresh:
                resumed.append((member.plan.environments, state, episodes))
        note_resumed(self.statistics, self.description, resumed)

    def call_env(self, calls: Mapping[int, EnvCall]) -> list[list[Attempt]]:
        """Let each of these workers call a method of its environments.

        A worker that replaces one of them later calls it too.
        """
        replies = self.call_each(
            "call_env", {worker: (call,) for worker, call in calls.items()}
        )
        for worker, (made, _) in zip(calls, replies, strict=True):
            if made.rows:
                add_call(self._members[worker].calls, made)
        return [results for _, results in replies]

    def play(self, seed: int, seeds: Sequence[tuple[int, ...]]) -> None:
        """Let each environment begin with episodes of these seeds.

        Args:
            seed: from which everything else that is random is derived.
            seeds: of each environment, worker by worker.
        """
        plans = [
            member.plan.with_seed(seed, tuple(seeds[rows.start : rows.stop]))
            for member, rows in zip(self._members, consecutive(self.sizes), strict=True)
        ]
        self._use_plans(plans)

    def _use_plans(self, plans: Sequence[Plan]) -> None:
        """Let all workers forget their episodes, and begin those of their plans."""
        for member, plan in zip(self._members, plans, strict=True):
            member.plan, member.running = plan, ()
        self.call_each("use_plan", {k: (plan,) for k, plan in enumerate(plans)})

    # State

    def explain(self) -> list[str]:
        """Return how each worker's policy ran when it last replied, and why."""
        return [member.explanation for member in self._members]

    def steps(self) -> int:
        """Return the number of frames that the workers have stepped so far."""
        return sum(self._pool.steps(k) * size for k, size in enumerate(self.sizes))

    def metrics(self) -> dict[str, Any]:
        """Return entries of ``stats()`` in addition to ``statistics``."""
        return {}

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

    # What depends on where workers run

    def _start(self) -> WorkerPool:
        """Start the workers."""
        assignments = [member.assignment for member in self._members]
        return WorkerPool(
            main, assignments, **self._options.of_pool(*COLLECTOR_MODULES)
        )

    @property
    def _open_vector(self) -> Callable[[WeightLayout], WeightVector]:
        """Opens memory for weights that workers can read; keeps no workers alive."""
        return WeightVector

    def _lost_with(self, worker: int) -> Sequence[int]:
        """Return a failed worker and those that were lost with it."""
        return (worker,)

    def _replaces(self, error: Exception, cause: WorkerError) -> bool:
        """Whether the worker that raised this error may be replaced."""
        del error, cause
        return self._options.on_worker_failure == "restart"

    def _restart(self, workers: Sequence[int]) -> None:
        """Start new processes for workers that were lost together."""
        for worker in workers:
            self._pool.restart(worker, self._members[worker].assignment)

    # Preparing

    def _number(
        self, seed: int, first_seeds: Callable[[int], Sequence[int]] | None
    ) -> EnvDescription:
        """Wait until all environments are built, and number them."""
        replies = self._first_replies(range(len(self)))
        first: EnvDescription = replies[0][0]
        rows = consecutive([size for _, size in replies])
        total = rows[-1].stop
        numbers = self._options.environments_from(total)
        seeds = first_seeds(total) if first_seeds else ()
        for index, (description, _) in enumerate(replies):
            check_alike(first, description, f"worker {index}", "worker 0")
            part = slice(rows[index].start, rows[index].stop)
            given_seeds = tuple((given,) for given in seeds[part])
            plan = self._options.plan(seed, numbers[part])
            self._members[index].plan = plan.with_seed(seed, given_seeds)
        warn_if_pinned(first, total)
        return first

    def _weights_of(self, policy: Any, seed: int) -> WorkerWeights:
        module = None
        if not is_random(policy):
            trust = self._options.trust_policy
            module = prepare(policy, self.description, seed, trust=trust)
        return WorkerWeights(
            TrainerPolicy(module, policy),
            self._options,
            len(self),
            self._open_vector,
            self._pool.weights_read,
        )

    def _prepare(self) -> PolicySignature:
        """Give all workers their plan and their policy; return its signature."""
        policy_for = self.weights.policy_for
        plans = {k: (m.plan, policy_for(k)) for k, m in enumerate(self._members)}
        replies = self.call_each("prepare", plans)
        first: PolicySignature = replies[0][0]
        for index, (signature, _, explanation) in enumerate(replies):
            check_same_signature(first, signature, f"worker {index}")
            self._members[index].explanation = explanation
        self.weights.share([layout for _, layout, _ in replies], self.call)
        return first

    # Messages

    def _send(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Send calls, whose replies ``_receive`` awaits."""
        self._pool.send_each({k: (method, values) for k, values in arguments.items()})
        for worker in arguments:
            self._members[worker].owed += 1

    def _batch_of(self, worker: int) -> tuple[Any, ...]:
        """Return the arguments with which a worker collects its batch."""
        return self._members[worker].batch, self.weights.order(worker), self.level

    def _receive(self, workers: Iterable[int]) -> tuple[int, Any]:
        """Wait for the reply to the last call of a worker; return its sender and it.

        Replies arrive in the order of the calls, so a batch that a worker was
        collecting when it was called comes first, and the replies to earlier calls,
        which have raised an error, come before the last one.
        """
        while True:
            worker, reply = self._next_reply(workers)
            if isinstance(reply, Collected):
                self._collected.append((worker, reply))
            elif not self._members[worker].owed:
                return worker, reply

    def _next_reply(self, workers: Iterable[int]) -> tuple[int, Any]:
        """Wait for a batch or another reply; return its sender and it."""
        worker, reply = self._pool.receive(workers)
        self._members[worker].owed -= 1
        return worker, reply

    def _first_replies(self, workers: Iterable[int]) -> list[Any]:
        """Return a reply of each of these new workers, none of which is replaced."""
        replies: dict[int, Any] = {}
        while waiting := [worker for worker in workers if worker not in replies]:
            worker, replies[worker] = self._receive(waiting)
        return [replies[worker] for worker in workers]

    def _ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """Let a new worker, which is not replaced, call a method; return its result."""
        self._send(method, {worker: arguments})
        (result,) = self._first_replies([worker])
        return result

    def _completed(self, worker: int, reply: Collected) -> tuple[int, Collected]:
        member = self._members[worker]
        member.running = reply.running
        member.batch = None
        member.failures = 0
        member.explanation = reply.explanation
        limit = self._options.max_worker_rss
        if limit is not None and self._pool.resident_bytes(worker) > limit:
            member.is_heavy = True
        self.statistics.rollouts += reply.seconds
        self.statistics.resets += reply.reset_seconds
        return worker, reply

    # Failures

    def _replace_or_raise(self, error: Exception) -> Sequence[int]:
        """Replace the workers that failed and return their indices, or raise.

        A worker may fail while another one is being replaced that was lost with it.
        """
        replaced: set[int] = set()
        waiting: set[int] = set()  # Those that must still be prepared.
        while True:
            cause = worker_error_of(error)
            if cause is None or not self._started or not self._replaces(error, cause):
                raise error
            most = self._most_in_a_row
            failures = self._members[cause.worker].failures
            if failures >= most:
                times = "again" if most == 1 else f"{failures + 1} times in a row"
                error.add_note(
                    f"Worker {cause.worker} was restarted and failed {times} before it "
                    "completed a batch, so it is not restarted once more."
                )
                raise error
            _LOG.warning("Restarting: %s", str(cause).partition("\n")[0])
            lost = self._lost_with(cause.worker)
            # Tracebacks would keep our callers' frames alive, and with them batches.
            for handled in (error, cause):
                handled.__traceback__ = None
            self._note_loss(lost)
            replaced.update(lost)
            waiting.update(lost)
            try:
                self._restart(lost)
                for worker in sorted(waiting):
                    self._renew(worker)
                    self._collect_again(worker)
                    waiting.remove(worker)
            except Exception as again:  # noqa: BLE001 - the next round looks at it
                error = again
            else:
                return sorted(replaced)

    def _note_loss(self, lost: Sequence[int]) -> None:
        """Count workers that failed, and let their replacements continue their plan."""
        self.statistics.restarts += 1
        for worker in lost:
            member = self._members[worker]
            member.failures += 1
            self.statistics.cut(member.plan.environments, member.running)
            member.plan = replace(
                member.plan,
                episodes=member.running or member.plan.episodes,
                generation=member.plan.generation + 1,
            )
        # A batch that was finished but not waited for is collected again, because the
        # state before it was lost with the worker.
        self._collected = deque(
            arrived for arrived in self._collected if arrived[0] not in lost
        )

    def _collect_again(self, worker: int) -> None:
        """Let a replacement collect the batch of its predecessor, if there was one."""
        member = self._members[worker]
        if member.preempted:  # Also the replacement stops early then.
            self._pool.preempt(worker, preempted=True)
        if member.batch is not None:
            self._send("collect", {worker: self._batch_of(worker)})

    def _recycle(self, worker: int) -> None:
        """Replace an idle worker that exceeded ``max_worker_rss``."""
        _LOG.info("Worker %d exceeds max_worker_rss and is replaced.", worker)
        (state,) = self.call("state", False, workers=[worker])
        member = self._members[worker]
        member.is_heavy = False
        self.statistics.recycled += 1
        member.calls = {}  # The state has them.
        try:
            self._restart([worker])
            self._renew(worker)
        except Exception as error:  # noqa: BLE001 - raised again, or handled
            self._replace_or_raise(error)
        self.load({worker: state})

    def _renew(self, worker: int) -> None:
        """Give a worker that was restarted its plan, its policy and its slots."""
        member, who = self._members[worker], f"worker {worker}"
        member.owed = 1
        ((description, _),) = self._first_replies([worker])
        check_alike(self.description, description, who, "before")
        policy = self.weights.policy_for(worker)
        signature, layout, member.explanation = self._ask(
            worker, "prepare", member.plan, policy
        )
        check_same_signature(self._signature, signature, who)
        self.weights.use(worker, layout)
        for call in member.calls.values():
            made, results = self._ask(worker, "call_env", call)
            if made != call:
                for again in results:
                    result(again, worker)
        for slot, arguments in list(member.slots.items()):
            if arguments[1].exists():
                self._ask(worker, "use_slot", *arguments)
            else:
                del member.slots[slot]  # The slot has new memory; see Slots.


@final
@dataclass
class _Member:
    """What the trainer knows of one worker.

    Attributes:
        assignment: the argument of its main function.
        plan: seed, environments and episodes; set when its environments are built.
        running: numbers of its running episodes.
        slots: the arguments of ``use_slot`` for the slots that it has mapped.
        batch: that it collects.
        owed: number of its replies that have not arrived. A new worker owes the one
            that says that its environments are built.
        preempted: whether its rollout ends early.
        is_heavy: whether it is to be replaced, because it has grown too large.
        failures: how often it was restarted since its last batch.
        explanation: how its policy runs.
        calls: that were made in its environments, by key.
    """

    assignment: messages.Assignment
    plan: Plan = field(init=False)
    running: tuple[int, ...] = ()
    slots: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    batch: messages.Collect | None = None
    owed: int = 1
    preempted: bool = False
    is_heavy: bool = False
    failures: int = 0
    explanation: str = ""
    calls: dict[str, EnvCall] = field(default_factory=dict)


def _assign(
    factories: Sequence[Sequence[Factory]], options: CollectorOptions
) -> list[messages.Assignment]:
    """Return the assignment of each worker, given the factories of its environments."""
    all_rows = consecutive(map(len, factories))
    devices = options.policy_devices_of(len(factories))
    return [
        messages.Assignment(
            factories=tuple(of_worker),
            first=rows.start,
            acting=options.acting(device),
            num_threads=options.num_sub_threads,
            init_fn=options.init_fn,
        )
        for of_worker, rows, device in zip(factories, all_rows, devices, strict=True)
    ]
