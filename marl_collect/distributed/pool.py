"""``RayPool``: the workers of all actors, as one pool.

An actor has the workers of a ``Relay``. Its memory is not ours: a slot is reserved
there, and copied into the rows of the trainer's slot when a worker has filled it. Each
actor has at most one batch in progress or in the object store, because it is told to
collect again only after its batch has been copied.
"""

import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from marl_collect.buffers.layout import Layout
from marl_collect.collectors import messages
from marl_collect.distributed import worker as ray_worker
from marl_collect.distributed.cluster import Cluster, require_ray
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.relay import (
    GROUPS,
    LOOK,
    RECEIVE,
    SEND,
    WEIGHTS,
    Bytes,
    Name,
    Relay,
    Reply,
)
from marl_collect.distributed.vectors import FETCH_SECONDS, NodeVector
from marl_collect.errors import (
    ClosedError,
    Failure,
    WorkerError,
    raise_failure,
    refuse_in_forks,
    unpicklable,
)
from marl_collect.processes import cleanup, pickling
from marl_collect.processes.closing import CLOSE_SECONDS
from marl_collect.processes.context import Call
from marl_collect.processes.launcher import COLLECTOR_MODULES
from marl_collect.processes.shared_memory import MemoryHandle, Segment

_LOOK_SECONDS: Final = 1.0
"""Between two questions whether an actor still answers."""

_ONLY: Final = 0
"""Weights slot of every worker: it has one vector, and is idle while that is filled."""

STARTS: Final = 3
"""How often an actor is started at most: Ray may choose a node that has just died."""


@final
@dataclass(eq=False)
class Actor:
    """An actor and its workers.

    Attributes:
        index: of the actor.
        assignments: of its workers.
        remote: its class with Ray's options.
        jobs: the pickled assignments.
        handle: Ray's.
        started: reference to the result of its start.
        location: its process id, node and host, once it has started.
        reply: reference to the next reply of a worker.
        sent: references to calls that return nothing, but may fail.
        copies: copies what a worker has filled, by worker and name.
        vectors: the memory of each worker's weights.
        failed: the failures of its workers that were raised.
        restarts: how often it, or a worker of it, failed and was replaced.
        lost: why it is lost.
        looked: reference to the steps of its workers.
        seen: the last of these; empty if there are none.
        earlier: steps of the workers of the actors that it replaces.
        silent: seconds for which it has not answered.
        checked: when that was added up.
    """

    index: int
    assignments: Sequence[messages.Assignment]
    remote: Any = None
    jobs: Sequence[bytes] = ()
    handle: Any = None
    started: Any = None
    location: Mapping[str, Any] = field(default_factory=dict)
    reply: Any = None
    sent: list[Any] = field(default_factory=list)
    copies: dict[tuple[int, Name], Callable[[Bytes], None]] = field(
        default_factory=dict
    )
    vectors: dict[int, MemoryHandle] = field(default_factory=dict)
    failed: dict[int, Reply] = field(default_factory=dict)
    restarts: int = 0
    lost: str | None = None
    looked: Any = None
    seen: Sequence[int] = ()
    earlier: dict[int, int] = field(default_factory=dict)
    silent: float = 0.0
    checked: float = 0.0

    @property
    def workers(self) -> range:
        """Indices of its workers over all actors."""
        first = self.index * len(self.assignments)
        return range(first, first + len(self.assignments))

    def call(self, group: str, name: str, *args: Any) -> Any:
        """Call a method of the relay; return a reference to its result."""
        method = getattr(self.handle, name)
        return method.options(concurrency_group=group).remote(*args)

    def steps(self, worker: int) -> int:
        """Return a worker's steps when the actor was looked at last."""
        return self.earlier.get(worker, 0) + (self.seen[worker] if self.seen else 0)


@final
class RayPool:
    """Workers in actors on a Ray cluster; see ``WorkerPool`` for the methods.

    One thread at a time may receive. Any thread may send or close.

    Attributes:
        cluster: that this process is connected to.
        actors: by index.
        lost_actors: number of actors that were lost and replaced.
        lost_workers: number of other workers that failed and were replaced.
    """

    def __init__(
        self, options: RayOptions, assignments: Sequence[messages.Assignment]
    ) -> None:
        """Start the actors and their workers.

        Args:
            options: of the collector.
            assignments: of all workers.
        """
        self._options = options
        self._ray = require_ray()
        self._remote = self._ray.remote(concurrency_groups=GROUPS)(Relay)
        self._team = team = options.num_workers_per_collector
        self.actors: list[Actor] = []
        self.lost_actors = 0
        self.lost_workers = 0
        self._arrived: deque[tuple[Actor, Reply]] = deque()
        self._reading = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        actors = [
            Actor(first // team, assignments[first : first + team])
            for first in range(0, len(assignments), team)
        ]
        configs = options.configs(len(actors))
        for actor in actors:  # Before Ray is started: they may be wrong.
            actor.remote = self._configured(actor, configs[actor.index])
            actor.jobs = _jobs(actor)
        self.cluster = Cluster(options.ray_init_config)
        cleanup.register(self)
        try:
            self.actors = actors
            for actor in actors:
                self._create(actor)
            most = 1 if options.max_restarts == 0 else STARTS
            for actor in actors:
                self._confirm(actor, most)
        except BaseException:
            self.close(0.0)
            raise

    def actor_of(self, worker: int) -> Actor:
        """Return the actor that has a worker."""
        return self.actors[worker // self._team]

    def send_each(self, calls: Mapping[int, Call]) -> None:
        """Send calls to workers. ``receive`` reports if one has died."""
        for worker, (method, arguments) in calls.items():
            self._send(worker, method, arguments)

    def _send(self, worker: int, method: str, arguments: tuple[Any, ...]) -> None:
        self._check_open()
        actor, local = self.actor_of(worker), worker % self._team
        if actor.lost is not None:
            return
        fills: Name | None = None
        vector: NodeVector | None = None
        vacant: list[int] = []
        if method == "use_slot":
            arguments = self._reserve_slot(actor, local, *arguments)
        elif method == "prepare":
            plan, policy = arguments
            if isinstance(policy, messages.SkeletonPolicy):
                vector = policy.handle
                place = self._place(actor, local, vector)
                arguments = (plan, replace(policy, **place))
        elif method == "publish_weights":
            vector, fills = arguments[1], WEIGHTS
            arguments = tuple(self._place(actor, local, vector).values())
        elif method == "collect":
            command, weights, level = arguments
            fills = command.slot
            copies = actor.copies
            vacant = [k for k in command.vacant if copies.pop((local, k), None)]
            if weights.handle is not None:
                vector = weights.handle
                place = self._place(actor, local, vector)
                arguments = (command, replace(weights, **place), level)
        if actor.lost is not None:  # It was lost while memory was reserved.
            return
        data = pickling.dumps((method, arguments))
        weights_to_write = () if vector is None else vector.written
        sent = actor.call(SEND, "send", local, data, fills, vacant, *weights_to_write)
        actor.sent.append(sent)

    def receive(self, workers: Iterable[int] | None = None) -> tuple[int, Any]:
        """Wait for the next message of some workers; return its sender and it.

        Raises:
            Exception: what a worker raised, from a ``WorkerError``.
            WorkerError: a worker died or hung, or its actor is lost.
            ClosedError: the pool is closed.
        """
        everyone = range(self._team * len(self.actors))
        waited = set(everyone if workers is None else workers)
        with self._reading:
            while True:
                self._check_open()
                for actor, reply in self._arrived:
                    index = actor.workers[reply.worker]
                    if index in waited:
                        self._arrived.remove((actor, reply))
                        return index, self._opened(actor, index, reply)
                actors: dict[int, Actor] = {}
                for index in sorted(waited):
                    actor = self.actor_of(index)
                    if actor.lost is not None:
                        raise self._lost_error(actor, index)
                    # The relay sends a failure once, but it stays one.
                    failure = actor.failed.get(index % self._team)
                    if failure is not None:
                        return index, self._opened(actor, index, failure)
                    actors[actor.index] = actor
                self._await(list(actors.values()))

    def restart(self, workers: Sequence[int]) -> None:
        """Replace a worker, or all workers of an actor that is lost."""
        actor = self.actor_of(workers[0])
        local_workers = {worker - actor.workers.start for worker in workers}
        has_failed = actor.lost is not None or bool(actor.failed.keys() & local_workers)
        actor.restarts += has_failed
        self._arrived = deque(
            (other, reply)
            for other, reply in self._arrived
            if other is not actor or reply.worker not in local_workers
        )
        for local in local_workers:
            actor.failed.pop(local, None)
        if actor.lost is not None:
            self.lost_actors += 1
            self._create(actor)
            self._confirm(actor, STARTS)
            return
        self.lost_workers += has_failed
        for local in local_workers:
            self._ask(actor, "restart", local, actor.jobs[local])

    def has_restarts(self, actor: Actor) -> bool:
        """Whether ``max_restarts`` allows another replacement of an actor."""
        most = self._options.max_restarts
        return most < 0 or actor.restarts < most

    def preempt(self, worker: int, *, preempted: bool) -> None:
        """Let the rollouts of a worker end early, or no longer."""
        actor = self.actor_of(worker)
        if actor.lost is None:
            local = worker % self._team
            actor.sent.append(actor.call(SEND, "preempt", local, preempted))

    def resident_bytes(self, worker: int) -> int:
        """Return the resident memory of a worker."""
        actor = self.actor_of(worker)
        nbytes = 0  # Of an actor that does not answer: `receive` reports it.
        with suppress(self._ray.exceptions.RayError):
            look = actor.call(LOOK, "resident_bytes", worker % self._team)
            nbytes = self._get(look)
        return nbytes

    def steps(self, worker: int) -> int:
        """Return a worker's steps; if its actor is silent, those last seen."""
        actor = self.actor_of(worker)
        if actor.lost is None:
            with suppress(self._ray.exceptions.RayError):
                look = actor.call(LOOK, "look")
                actor.seen, _ = self._get(look, _LOOK_SECONDS)
        return actor.steps(worker % self._team)

    def weights_read(self, worker: int) -> int:
        """Return 0: weights stay until the worker's next order, so it is not asked."""
        del worker
        return 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each worker, on its node."""
        calls = [actor.call(LOOK, "look") for actor in self.actors]
        looks = self._get(calls)
        return tuple(pid for _, pids in looks for pid in pids)

    def close(self, timeout: float = CLOSE_SECONDS) -> tuple[WorkerError, ...]:
        """End all actors; may be called twice, and from any thread."""
        if self._closed or os.getpid() != self._owner:
            return ()  # In a fork, the actors belong to the process that forked.
        self._closed = True
        failures: tuple[WorkerError, ...] = ()
        # While the interpreter exits, Ray has ended them, and cannot be asked any more.
        if not sys.is_finalizing() and self._ray.is_initialized():
            failures = self._end(timeout)
            # A thread that receives must notice this before Ray is stopped.
            if self._reading.acquire(timeout=max(timeout, _LOOK_SECONDS)):
                self._reading.release()
        self._arrived.clear()
        self.cluster.close()
        return failures

    # Starting

    def _configured(self, actor: Actor, config: Mapping[str, Any]) -> Any:
        """Return an actor's class with its options for Ray."""
        try:
            return self._remote.options(**{"max_restarts": 0, **config})
        except (TypeError, ValueError) as error:
            name = f"remote_configs of actor {actor.index}"
            raise type(error)(f"{name}: {error}") from error

    def _create(self, actor: Actor) -> None:
        """Begin to start an actor; later calls to it queue behind the start."""
        keywords = self._options.of_pool(*COLLECTOR_MODULES)
        spawns = keywords["start_method"] == "spawn"
        preload = () if spawns else keywords["preload"]
        actor.handle = actor.remote.remote(pickling.search_path(), preload)
        actor.lost = actor.reply = actor.looked = None
        actor.silent, actor.checked = 0.0, time.monotonic()
        actor.sent, actor.vectors, actor.seen = [], {}, ()
        main = pickling.dumps(ray_worker.main)
        actor.started = actor.call(SEND, "start", main, actor.jobs, keywords)

    def _confirm(self, actor: Actor, starts: int) -> None:
        """Wait until an actor runs its workers; start it again if its node dies."""
        limit = self._options.start_timeout
        for left in reversed(range(starts)):
            done, _ = self._ray.wait([actor.started], num_returns=1, timeout=limit)
            if not done:
                self._lose(actor, self._not_ready())
                break
            started = self._get_from(actor, actor.started)
            if actor.lost is not None:
                if left:
                    self._create(actor)
                continue
            if isinstance(started, Failure):
                raise_failure(started, actor.workers.start)
            actor.location = started
            return
        raise self._lost_error(actor, actor.workers.start)

    def _not_ready(self) -> str:
        free = self._ray.available_resources()
        have = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        return (
            f"it was not ready after {self._options.start_timeout:.0f} seconds. Free "
            f"on the cluster now: {have}. An actor needs what remote_configs says, by "
            "default one CPU per worker; raise start_timeout if it only starts slowly"
        )

    # Memory

    def _reserve_slot(
        self,
        actor: Actor,
        local: int,
        slot: int,
        memory: MemoryHandle,
        layout: Layout,
        rows: range,
        frames: int,
    ) -> tuple[Any, ...]:
        """Reserve memory like a worker's rows of a slot, to be copied there.

        The arguments and the result are those of ``RolloutWorker.use_slot``.
        """
        reserved_layout = Layout.plan(layout.fields, (len(rows), frames))
        segment = Segment.attach(memory)
        arrays = layout.arrays(segment.buffer, slice(rows.start, rows.stop))

        def copy(content: Bytes) -> None:
            for key, source in reserved_layout.arrays(content.data).items():
                arrays[key][:, :frames] = source

        actor.copies[local, slot] = copy
        nbytes = reserved_layout.nbytes
        reserved = self._ask(actor, "reserve", local, slot, nbytes)
        return slot, reserved, reserved_layout, range(len(rows)), frames

    def _place(self, actor: Actor, local: int, vector: Any) -> dict[str, Any]:
        """Return what tells a worker where its vector is, which has memory once."""
        assert isinstance(vector, NodeVector)
        if local not in actor.vectors:
            nbytes = vector.layout.nbytes
            actor.vectors[local] = self._ask(actor, "reserve", local, WEIGHTS, nbytes)
        if vector.into is not None:
            into = vector.into

            def copy(content: Bytes) -> None:
                into[:] = content

            actor.copies[local, WEIGHTS] = copy
        return {"weights_slot": _ONLY, "handle": actor.vectors[local]}

    # Replies

    def _ask(self, actor: Actor, name: str, *args: Any) -> Any:
        """Call a method of a relay and return its result; None if it is lost.

        Raises:
            Exception: what the method raised.
        """
        call = actor.call(SEND, name, *args)
        while not self._ray.wait([call], timeout=_LOOK_SECONDS)[0]:
            self._check(actor)
            if actor.lost is not None:
                return None
        result = self._get_from(actor, call)
        if isinstance(result, Failure):
            raise_failure(result, actor.workers[args[0]])
        return result

    def _get(self, reference: Any, timeout: float = FETCH_SECONDS) -> Any:
        """Return objects of Ray.

        Raises:
            RayError: without a traceback. Ray's frames refer to the error, so it would
                live on with our callers' frames, and with their batches.
        """
        try:
            return self._ray.get(reference, timeout=timeout)
        except self._ray.exceptions.RayError as error:
            raise error.with_traceback(None) from None

    def _get_from(self, actor: Actor, reference: Any) -> Any:
        """Return what an actor's call returned; None if it is lost."""
        try:
            return self._get(reference)
        except self._ray.exceptions.RayError as error:
            self._lose(actor, _why(error))
            return None

    def _await(self, actors: Sequence[Actor]) -> None:
        """Wait until one of these actors has a reply or is lost, or for a second."""
        for actor in actors:
            if actor.reply is None:
                actor.reply = actor.call(RECEIVE, "receive")
        waiting = {actor.reply: actor for actor in actors}
        done, _ = self._ray.wait(
            list(waiting), num_returns=1, timeout=_LOOK_SECONDS, fetch_local=True
        )
        for reference in done:
            self._fetch(waiting[reference], reference)
        for actor in actors:
            if actor.lost is None and not self._closed:
                self._check(actor)

    def _fetch(self, actor: Actor, reference: Any) -> None:
        """Take an actor's reply, and copy what its worker has filled."""
        reply = self._get_from(actor, reference)
        actor.reply = None
        if reply is None:
            self._lose(actor, "its workers were ended")
            return
        if reply.content is not None and reply.filled is not None:
            actor.copies[reply.worker, reply.filled](reply.content)
        self._arrived.append((actor, replace(reply, content=None)))

    def _check(self, actor: Actor) -> None:
        """Check that an actor answers, and that all its calls were executed.

        As with local workers, a pause counts for at most a quarter of the limit: a
        Ctrl-Z of the trainer must not look like a hang of the actor.
        """
        now = time.monotonic()
        if now - actor.checked < _LOOK_SECONDS:
            return
        elapsed, actor.checked = now - actor.checked, now
        sent = actor.sent
        done, actor.sent = (
            self._ray.wait(sent, num_returns=len(sent), timeout=0) if sent else ([], [])
        )
        try:
            self._get(done)
            if actor.looked is None:
                actor.looked = actor.call(LOOK, "look")
                return
            if self._ray.wait([actor.looked], timeout=0)[0]:
                actor.seen, _ = self._get(actor.looked)
                actor.looked, actor.silent = None, 0.0
                return
        except self._ray.exceptions.RayError as error:
            self._lose(actor, _why(error))
            return
        limit = self._options.timeout
        if limit is not None:
            actor.silent += min(elapsed, limit / 4)
            if actor.silent >= limit:
                self._lose(actor, f"it has not answered for {limit:g} seconds")

    def _opened(self, actor: Actor, index: int, reply: Reply) -> Any:
        """Unpickle a worker's message, or raise its exception."""
        message = reply.message
        if isinstance(message, bytes):
            return pickle.loads(message)
        actor.failed[reply.worker] = reply
        note = f"Raised in actor {actor.index} on {actor.location['host']}."
        if isinstance(message, Failure):
            raise_failure(replace(message, notes=(*message.notes, note)), index)
        error = WorkerError(index, *message.args[1:])
        error.add_note(note)
        try:
            raise error
        finally:
            del error  # Its traceback has this frame, which would keep it.

    # Losses

    def _lose(self, actor: Actor, why: str) -> None:
        """Note that an actor is lost, and kill what is left of it at once."""
        if actor.lost is None:
            team = range(len(actor.assignments))
            actor.earlier = {local: actor.steps(local) for local in team}
            actor.lost, actor.seen = why, ()
        self._kill(actor)

    def _lost_error(self, actor: Actor, index: int) -> WorkerError:
        self._check_open()  # The end of the pool is no loss.
        detail = f"{actor.lost}"
        if not self.has_restarts(actor):
            most = self._options.max_restarts
            detail += f". No restart is left (max_restarts={most})"
        return WorkerError(index, f"was lost with actor {actor.index}", detail)

    def _check_open(self) -> None:
        refuse_in_forks(self._owner, "RayCollector")
        if self._closed:
            raise ClosedError("This collector was shut down: build a new one.")

    def _end(self, timeout: float) -> tuple[WorkerError, ...]:
        """End all actors; return the errors that their workers raised meanwhile."""
        closing: dict[Any, Actor] = {}
        failures: list[WorkerError] = []
        with suppress(self._ray.exceptions.RayError):
            for actor in self.actors:
                if actor.lost is None and actor.handle is not None and timeout > 0:
                    closing[actor.call(SEND, "close", timeout)] = actor
            if closing:
                done, _ = self._ray.wait(
                    list(closing), num_returns=len(closing), timeout=timeout
                )
                for reference in done:
                    first = closing[reference].workers.start
                    with suppress(self._ray.exceptions.RayError):
                        failures += [
                            WorkerError(first + error.worker, *error.args[1:])
                            for error in self._get(reference, 1.0)
                        ]
        for actor in self.actors:
            self._kill(actor)
        return tuple(failures)

    def _kill(self, actor: Actor) -> None:
        if actor.handle is not None:
            with suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor.handle, no_restart=True)
        actor.started = actor.reply = actor.looked = None
        actor.sent, actor.copies = [], {}


def _jobs(actor: Actor) -> list[bytes]:
    """Return the pickled assignments of an actor's workers."""
    try:
        return [pickling.dumps(job) for job in actor.assignments]
    except Exception as error:
        part = unpicklable(actor.assignments, pickling.dumps)
        raise TypeError(
            f"The environments of actor {actor.index} cannot be pickled "
            f"({type(error).__name__}: {error}, in {part}). Pass factories that "
            "build them in the actor, and create there what cannot be pickled."
        ) from error


def _why(error: Exception) -> str:
    """Return Ray's error message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = type(error).__name__
    return f"{kind}: {' '.join(lines)}" if lines else kind
