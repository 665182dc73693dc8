"""The trainer's side of a collector's workers: starts them, sends commands, waits.

A ``WorkerGroup`` owns the workers and the published weights of a sync or async
collector, wherever its ``Transport`` runs them. Slots belong to the collector.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar, final

import torch
from typing_extensions import override

from marl_collect.buffers.layout import Layout, batch_fields
from marl_collect.buffers.slots import Slots
from marl_collect.collectors import messages, worker
from marl_collect.collectors.assigning import assign
from marl_collect.collectors.broadcaster import (
    Ask,
    SharedWeights,
    WorkerWeights,
    factories_of,
)
from marl_collect.collectors.checkpoint import warn_if_not_resumed
from marl_collect.collectors.initialization import check_can_be_copied, prepare
from marl_collect.collectors.options import CollectorOptions
from marl_collect.collectors.statistics import WorkerMetrics
from marl_collect.collectors.trainer_policy import (
    TrainerPolicy,
    check_can_be_sent,
    chosen_policy,
)
from marl_collect.collectors.transport import Replace, Transport
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, check_alike, spread, warn_if_pinned
from marl_collect.core.random_actions import is_random
from marl_collect.core.seeding import draw_seed
from marl_collect.core.signature import PolicySignature, check_same_signature
from marl_collect.errors import warn, worker_error_of
from marl_collect.processes.closing import ERROR_CLOSE_SECONDS
from marl_collect.processes.launcher import COLLECTOR_MODULES
from marl_collect.processes.pool import WorkerPool
from marl_collect.rollout.episodes import Plan

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
        transport: Transport,
        first_seeds: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Start all workers and wait until they can collect.

        Args:
            factories: of each worker's environments.
            policy: as passed by the user.
            options: of the collector.
            transport: runs the workers.
            first_seeds: returns the seeds of the first episodes for a number of
                environments. A policy that is called at the start sees the first
                observations of these episodes. By default they are derived from the
                collector's seed.
        """
        self._options = options
        self._first_seeds = first_seeds
        self._transport = transport
        self._seed = draw_seed(options.seed)
        check_can_be_sent(policy, options)
        check_can_be_copied(policy)
        # Raise an error if a list has the wrong length.
        factories_of(options, len(factories))
        options.check_policy_devices(len(factories))
        self._members = [_Member(argument) for argument in assign(factories, options)]
        self._pool = transport.start([member.assignment for member in self._members])
        self.weights: WorkerWeights[Any] = None  # type: ignore[assignment]
        self._early: deque[tuple[int, messages.Collected]] = deque()
        self._metrics = WorkerMetrics()
        self._started = False
        try:
            self.description = self._connect()
            self.weights = self._weights_of(policy)
            self._signature = self._send_policy()
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

    # Memory

    def layout(self, environments: int, frames: int) -> Layout:
        """Return the layout of a slot for these numbers of environments and frames."""
        contents = self._options.contents
        fields = batch_fields(self.description, self._signature, contents)
        return Layout.plan(fields, (environments, frames))

    def attach(
        self, index: int, slots: Slots, slot: int, rows: range, frames: int
    ) -> None:
        """Let a worker map its rows of a slot, unless it has mapped them."""
        memory = slots.segment(slot).handle
        known = self._members[index].attached.get(slot)
        if known is None or known.memory is not memory:
            command = messages.UseSlot(
                slot,
                memory,
                slots.layout,
                (rows.start, rows.stop),
                frames,
            )
            self._members[index].attached[slot] = command
            self._ask([index], command, messages.MemoryAttached)

    # Collecting

    def collect(self, index: int, command: messages.Collect) -> None:
        """Tell a worker to fill its rows of a slot, with the newest weights."""
        member = self._members[index]
        if member.is_heavy:
            self._recycle(index)
        for slot in command.vacant:
            member.attached.pop(slot, None)
        member.last = command  # Without weights: they stay while they are referred to.
        command = replace(command, weights=self.weights.order(index))
        self._preempt(index, preempted=False)
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
            self._preempt(index, preempted=True)

    def _preempt(self, index: int, *, preempted: bool) -> None:
        if self._members[index].preempted != preempted:
            self._members[index].preempted = preempted
            self._pool.preempt(index, preempted=preempted)

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
        self._seed = seed
        for member in self._members:
            member.plan = replace(member.plan, seed=seed)
            member.running = ()

    def load(self, states: Sequence[Any], begin: Sequence[int] = ()) -> None:
        """Let all workers resume from states of ``Rollout.state``.

        Args:
            states: of each worker.
            begin: workers that begin new episodes instead of replaying their own.
        """
        running = self.ask_each(
            [
                messages.LoadState(state, begin=index in begin)
                for index, state in enumerate(states)
            ]
        )
        for index, (member, state) in enumerate(
            zip(self._members, states, strict=True)
        ):
            member.running = running[index]
            seed, generation = state["seed"], state["generation"]
            member.plan = replace(member.plan, seed=seed, generation=generation)
            self._seed = seed
            if index not in begin:
                self._metrics.cut_resumed(
                    member.plan.environments, state, running[index]
                )

    def play(self, seed: int, seeds: Sequence[tuple[int, ...]]) -> None:
        """Let each environment begin with episodes of these seeds.

        Args:
            seed: from which everything else that is random is derived.
            seeds: of each environment, worker by worker.
        """
        self._seed = seed
        left = iter(seeds)
        for index, member in enumerate(self._members):
            chosen = tuple(next(left) for _ in member.plan.environments)
            member.plan = replace(
                member.plan, seed=seed, episodes=(), given_seeds=chosen
            )
            member.running = ()
            self._pool.send(index, member.plan)

    # State

    @property
    def running(self) -> tuple[int, ...]:
        """Number of each environment's running episode; () before the first frame."""
        return self.running_of(range(len(self)))

    def running_of(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the running episodes of some workers."""
        members = self._members
        return tuple(number for index in indices for number in members[index].running)

    def steps(self) -> int:
        """Return the number of frames that the workers have stepped so far."""
        return sum(
            self._pool.progress(index).steps * size
            for index, size in enumerate(self.sizes)
        )

    def metrics(self) -> dict[str, Any]:
        """Return restarts, cut trajectories, and seconds in rollouts and resets."""
        return self._metrics.snapshot() | self._transport.metrics()

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

    def _connect(self) -> EnvDescription:
        """Wait for the environments of all workers, number them, and send plans."""
        replies = self._replies(range(len(self)), messages.WorkerReady)
        first = replies[0].description
        limit = self._options.max_frames_per_traj
        ends = list(accumulate(ready.size for ready in replies))
        seeds: Sequence[int] = ()
        if self._first_seeds is not None:
            seeds = self._first_seeds(ends[-1])
        for index, (ready, end) in enumerate(zip(replies, ends, strict=True)):
            check_alike(first, ready.description, f"worker {index}", "worker 0")
            environments = range(end - ready.size, end)
            given = tuple((seed,) for seed in seeds[environments.start : end])
            plan = Plan(self._seed, environments, limit, given_seeds=given)
            self._members[index].plan = plan
        for index, member in enumerate(self._members):
            self._pool.send(index, member.plan)
        warn_if_pinned(first, ends[-1])
        return first

    def _weights_of(self, policy: Any) -> WorkerWeights[Any]:
        module = None
        if not is_random(policy):
            trust = self._options.trust_policy
            module = prepare(policy, self.description, self._seed, trust=trust)
        return self._transport.weights(
            TrainerPolicy(module, policy), self._ask, self._replace_or_raise
        )

    def _send_policy(self) -> PolicySignature:
        """Give all workers their policy; return its signature."""
        for index in range(len(self)):
            self._pool.send(index, self.weights.command(index))
        replies = self._replies(range(len(self)), messages.PolicyReady)
        signature = replies[0].signature
        for index, reply in enumerate(replies):
            check_same_signature(signature, reply.signature, f"worker {index}")
        self.weights.share([reply.layout for reply in replies])
        return signature

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
                for index in self._replace_or_raise(error):
                    if index in commands:  # What it did for an earlier one is lost.
                        replies.pop(index, None)
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
        member = self._members[index]
        member.running = reply.running
        member.last = None
        member.failures = 0
        limit = self._options.max_worker_rss
        if limit is not None and self._pool.resident_bytes(index) > limit:
            member.is_heavy = True
        self._metrics.add(reply.seconds)
        return index, reply

    # Failures

    def _replace_or_raise(self, error: Exception) -> Sequence[int]:
        """Replace the workers that failed and return their indices, or raise."""
        while True:
            cause = worker_error_of(error)
            if cause is None or not self._started:
                raise error
            if not self._transport.replaces(error):
                raise error
            most = self._transport.most_in_a_row
            failures = self._members[cause.worker].failures
            if failures >= most:
                times = "again" if most == 1 else f"{failures + 1} times in a row"
                error.add_note(
                    f"Worker {cause.worker} was restarted and failed {times} before it "
                    "completed a batch, so it is not restarted once more."
                )
                raise error
            _LOG.warning("Restarting: %s", str(cause).partition("\n")[0])
            lost = self._transport.lost_with(cause.worker)
            # Tracebacks would keep our callers' frames alive, and with them batches.
            for handled in (error, cause):
                handled.__traceback__ = None
            try:
                self._start_again(lost)
            except Exception as again:  # noqa: BLE001 - the next round looks at it
                error = again
            else:
                return lost

    def _start_again(self, lost: Sequence[int]) -> None:
        """Restart workers that failed, and let them collect their batches again."""
        self._metrics.restarts += 1
        for index in lost:
            member = self._members[index]
            member.failures += 1
            self._metrics.cut(member.plan.environments, member.running)
            member.plan = replace(
                member.plan,
                episodes=member.running or member.plan.episodes,
                generation=member.plan.generation + 1,
            )
        # A batch that was finished but not received is collected again, because the
        # state before it was lost with the worker.
        self._early = deque(early for early in self._early if early[0] not in lost)
        self._renew(lost)
        for index in lost:
            member = self._members[index]
            if member.preempted:  # Also the replacement stops early then.
                self._pool.preempt(index, preempted=True)
            if member.last is None:
                self.weights.forget(index)
                continue
            weights = self.weights.order_again(index)
            self._pool.send(index, replace(member.last, weights=weights))

    def _recycle(self, index: int) -> None:
        """Replace an idle worker that exceeded ``max_worker_rss``."""
        _LOG.info("Worker %d exceeds max_worker_rss and is replaced.", index)
        (state,) = self.ask(messages.GetState(before=False), [index])
        member = self._members[index]
        member.is_heavy = False
        self._metrics.recycled += 1
        self._renew([index])
        (member.running,) = self.ask(messages.LoadState(state), [index])
        self._metrics.cut_resumed(member.plan.environments, state, member.running)
        warn_if_not_resumed(self.description, [state], member.running)

    def _renew(self, indices: Sequence[int]) -> None:
        """Restart workers, so they can collect."""
        members = self._members
        self._transport.restart({index: members[index].assignment for index in indices})
        for index in indices:
            self._equip(index)

    def _equip(self, index: int) -> None:
        """Give a restarted worker its plan, its policy and its memory."""
        member, who = self._members[index], f"worker {index}"
        (ready,) = self._replies([index], messages.WorkerReady)
        check_alike(self.description, ready.description, who, "before")
        self._pool.send(index, member.plan)
        (policy,) = self._ask(
            [index], self.weights.command(index), messages.PolicyReady
        )
        check_same_signature(self._signature, policy.signature, who)
        self.weights.use(index, policy.layout)
        for slot, command in list(member.attached.items()):
            if command.memory.exists():
                self._ask([index], command, messages.MemoryAttached)
            else:
                del member.attached[slot]  # The slot has new memory; see Slots.


@final
@dataclass
class _Member:
    """What a group knows of one worker.

    Attributes:
        assignment: the argument of its main function.
        plan: seed, environments and episodes; set when its environments are built.
        running: numbers of its running episodes.
        attached: the slots that it has mapped.
        last: the batch that it collects.
        preempted: whether its rollout ends early.
        is_heavy: whether it is to be replaced, because it has grown too large.
        failures: how often it was restarted since its last batch.
    """

    assignment: messages.WorkerAssignment
    plan: Plan = field(init=False)
    running: tuple[int, ...] = ()
    attached: dict[int, messages.UseSlot] = field(default_factory=dict)
    last: messages.Collect | None = None
    preempted: bool = False
    is_heavy: bool = False
    failures: int = 0


@final
class LocalTransport(Transport):
    """Workers are processes of this machine, and weights are shared memory."""

    _pool: WorkerPool

    def __init__(self, options: CollectorOptions) -> None:
        """Start nothing yet."""
        self._options = options

    @override
    def start(self, assignments: Sequence[messages.WorkerAssignment]) -> WorkerPool:
        options = self._options
        self._pool = WorkerPool(
            worker.main,
            assignments,
            start_method=options.start_method,
            preload=(*COLLECTOR_MODULES, *options.preload),
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            num_threads=options.num_sub_threads,
        )
        return self._pool

    @override
    def weights(
        self, policy: TrainerPolicy, ask: Ask, replace: Replace
    ) -> SharedWeights:
        pool = self._pool

        def check(indices: Sequence[int]) -> None:
            try:
                pool.check(indices)
            except Exception as error:  # noqa: BLE001 - raised again, or handled
                replace(error)

        return SharedWeights(policy, self._options, pool, ask, check)

    @override
    def lost_with(self, worker: int) -> Sequence[int]:
        return (worker,)

    @override
    def replaces(self, error: Exception) -> bool:
        return self._options.on_worker_failure == "restart"

    @override
    def restart(self, arguments: Mapping[int, messages.WorkerAssignment]) -> None:
        for index, argument in arguments.items():
            self._pool.restart(index, argument)

    @override
    def metrics(self) -> dict[str, Any]:
        return {}


def start_workers(
    create_env_fn: Factory | Sequence[Factory],
    policy: Any,
    options: CollectorOptions,
    first_seeds: Callable[[int], Sequence[int]] | None = None,
) -> WorkerGroup:
    """Check the arguments and start the workers; see ``WorkerGroup``."""
    policy = chosen_policy(policy, options)
    factories = spread(
        create_env_fn,
        options.num_workers,
        options.envs_per_worker,
        options.create_env_kwargs,
    )
    if not isinstance(options.frames_per_batch, int):
        options.frames_of(list(map(len, factories)))
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    transport = LocalTransport(options)
    return WorkerGroup(factories, policy, options, transport, first_seeds)
