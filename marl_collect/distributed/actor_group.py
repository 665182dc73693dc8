"""Starts, orders, awaits, replaces and ends the actors, from the trainer.

One ``ActorGroup`` owns the actors and the weights in the object store, in sync and in
async collection. Each actor has at most one batch in progress or in the store: it is
told to collect again only after its batch has been copied out.
"""

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, check_alike
from marl_collect.distributed.actor import Actor
from marl_collect.distributed.actor_handle import ActorHandle, InFlightBatch
from marl_collect.distributed.cluster import Cluster
from marl_collect.distributed.entry import GROUPS, WATCH, WORK, Entry
from marl_collect.distributed.messages import ActorReady, Gathered, Order, Spec
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.results import Lost, Raised, fetch, lost_error
from marl_collect.distributed.specs import in_place, packed
from marl_collect.distributed.vectors import StoredWeights, changed
from marl_collect.distributed.watchdog import Watchdog
from marl_collect.errors import ClosedError
from marl_collect.processes.launcher import COLLECTOR_MODULES
from marl_collect.rollout.episodes import EPISODE_BITS

_LOG = logging.getLogger(__name__)
_IN_A_ROW = 3
"""Maximum number of restarts of an actor without a batch in between."""


@final
class ActorGroup:
    """The actors, by index, and their weights.

    Attributes:
        handles: the actors that collect, by index, in order.
        weights: the weights that they act with.
    """

    def __init__(self, cluster: Cluster, options: RayOptions, seed: int) -> None:
        """Create a group without actors."""
        self.handles: dict[int, ActorHandle] = {}
        self.weights: StoredWeights = None  # type: ignore[assignment]
        self._ray = cluster.ray
        self._options = options
        self._seed = seed
        self._remote: Any = None
        self._watchdog = Watchdog(self._ray, options.timeout, options.start_timeout)
        self._orders = 0
        self._first = 0  # Index of the next environment.
        self._gone: list[Mapping[str, Any]] = []
        self._cut: list[int] = []
        self._restarts = 0

    # Starting

    def describe(self, factory: Factory, spec: Spec) -> EnvDescription:
        """Return the description of an environment that an actor builds."""
        actor = ActorHandle(spec.worker, replace(spec, factories=(factory,)))
        actor.ray_handle = self._new(0)
        self.handles[0] = actor
        try:
            actor.started = actor.call(WORK, "describe", packed(factory, spec.who))
            found = self._await({actor.started: actor})
        finally:
            del self.handles[0]
            self._kill(actor)
        if isinstance(found, Raised):
            found.reraise()
        if isinstance(found, Lost):
            what = "It was started to describe the environment."
            raise lost_error(0, spec.who, found, what)
        description: EnvDescription = found[1]
        return description

    def begin(self, specs: Mapping[int, Spec]) -> None:
        """Start actors, wait until they are ready, and number their environments."""
        fresh = [ActorHandle(index, spec) for index, spec in specs.items()]
        for actor in fresh:
            self.handles[actor.index] = actor
            self._start(actor)
        for actor in fresh:
            self._connect(actor)
        reference = next(iter(self.handles.values()))
        for actor in fresh:
            check_alike(
                reference.known.description,
                actor.known.description,
                f"actor {actor.index}",
                f"actor {reference.index}",
            )
            actor.place = replace(actor.place, first=self._first)
            self._first += actor.size
        self.ask_each("place", {m.index: (m.place,) for m in fresh})

    # Collecting

    def send(self, index: int, *, random: bool, snapshot: bool) -> None:
        """Order a batch from an actor, with the newest weights."""
        self._orders += 1
        actor = self.handles[index]
        wants = self.weights.of(index)
        order = Order(self._orders, random, snapshot)
        actor.in_flight = InFlightBatch(order, wants, None)
        self._dispatch(actor)

    def receive(self, indices: Iterable[int]) -> tuple[ActorHandle, Gathered]:
        """Return the first of these actors that is done, and its batch.

        A lost actor is replaced while restarts are left; the new one collects again.
        """
        chosen = list(indices)
        while True:
            awaited = [self.handles[index] for index in chosen]
            found = self._await({m.in_flight.result: m for m in awaited if m.in_flight})
            if isinstance(found, Lost | Raised):
                self._recover(found)
                continue
            actor, gathered = found
            assert actor.in_flight is not None
            actor.acted = [stored.version for stored in actor.in_flight.wants]
            actor.in_flight = None
            actor.failed_starts = 0
            actor.running = gathered.running
            actor.metrics = gathered.metrics
            return actor, gathered

    def preempt(self, indices: Iterable[int]) -> None:
        """Ask actors to deliver what they have, at least one frame."""
        for index in indices:
            actor = self.handles[index]
            if actor.in_flight is not None:
                actor.call(WATCH, "preempt", actor.in_flight.order.number)

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Call one method of every actor, and return the answers in order."""
        return self.ask_each(name, dict.fromkeys(self.handles, args))

    def ask_each(self, name: str, args: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Call a method of some actors, each with its arguments; return the answers."""
        answers: dict[int, Any] = {}
        asked = {index: self._ask(name, index, args[index]) for index in args}
        while asked:
            found = self._await({ref: self.handles[i] for i, ref in asked.items()})
            if isinstance(found, Lost | Raised):
                self._recover(found)
                asked[found.index] = self._ask(name, found.index, args[found.index])
                continue
            actor, answer = found
            answers[actor.index] = answer
            del asked[actor.index]
        return [answers[index] for index in args]

    def reseed(self, seed: int) -> None:
        """Make all actors derive all randomness from ``seed``, from episode 0 on."""
        self.ask("reseed", seed)
        self._seed = seed
        for actor in self.handles.values():
            actor.running = ()
            actor.place = replace(actor.place, episodes=())

    def load(self, states: Mapping[int, list[Any]]) -> tuple[int, ...]:
        """Restore every actor from the states of its workers.

        Returns:
            Number of each environment's running episode, actor by actor.
        """
        found = self.ask_each("load", {index: (own,) for index, own in states.items()})
        for (index, own), running in zip(states.items(), found, strict=True):
            self._seed = own[0]["seed"]
            actor = self.handles[index]
            actor.running = running
            # A replacement of the actor must not repeat the noise of its workers.
            generation = max(state["generation"] for state in own)
            actor.place = replace(actor.place, generation=generation)
        return tuple(number for running in found for number in running)

    # State

    def refreshed(self) -> dict[int, ActorHandle]:
        """Return the actors, after waiting for restarted ones to be ready."""
        for actor in self.handles.values():
            while actor.restarts and not self._await_ready(actor):
                pass
        return self.handles

    def steps(self) -> list[int]:
        """Return each actor's frames so far, including a batch in progress."""
        looks = [actor.call(WATCH, "steps") for actor in self.handles.values()]
        found: list[int] = self._ray.get(looks, timeout=self._options.start_timeout)
        return found

    def metrics(self) -> dict[str, Any]:
        """Return restarts, cut trajectories, and how the actors spent their time."""
        each = [*self._gone, *(m.metrics for m in self.handles.values())]
        cut = [number for one in each for number in one.get("cut_trajectories", ())]
        return {
            "actors": len(self.handles),
            "restarts": self._restarts,
            "worker_restarts": sum(one.get("restarts", 0) for one in each),
            "recycled": sum(one.get("recycled", 0) for one in each),
            "cut_trajectories": self._cut + cut,
            "seconds_in_rollouts": sum(o.get("seconds_in_rollouts", 0) for o in each),
            "seconds_in_resets": sum(o.get("seconds_in_resets", 0) for o in each),
        }

    # Ending

    def retire(self, index: int) -> None:
        """End an actor, after its current order if it has one."""
        actor = self.handles[index]
        if actor.in_flight is not None:
            actor.leaving = True
            return
        self._note_cut(actor)
        self._gone.append(actor.metrics)
        del self.handles[index]
        self.weights.forget(index)
        self._end([actor], self._options.start_timeout)

    def close(self, timeout: float) -> None:
        """End all actors, and drop everything from the object store."""
        handles, self.handles = list(self.handles.values()), {}
        self._gone += [actor.metrics for actor in handles]
        if self.weights is not None:
            self.weights.close()
        # While the interpreter exits, Ray has ended them, and cannot be asked any more.
        if not sys.is_finalizing() and self._ray.is_initialized():
            self._end(handles, timeout)
        self._remote = None

    # Inside

    def _await(
        self, pending: Mapping[Any, ActorHandle]
    ) -> tuple[ActorHandle, Any] | Lost | Raised:
        """Return the first actor that is done and its reply, or the error."""
        try:
            done = self._watchdog.first(pending)
            actor = pending[done]
            return actor, fetch(self._ray, actor.index, done)
        except (Lost, Raised) as trouble:
            # The traceback's frames hold references that keep objects in the store.
            return trouble.with_traceback(None)

    def _ask(self, name: str, index: int, args: tuple[Any, ...]) -> Any:
        actor = self.handles[index]
        if hasattr(Actor, name):
            return actor.call(WORK, name, *args)
        return actor.call(WORK, "ask", name, *args)

    def _new(self, index: int) -> Any:
        if self._remote is None:
            self._remote = self._ray.remote(concurrency_groups=GROUPS)(Entry)
        chosen = {"max_restarts": 0, **self._options.remote(index)}
        preload: tuple[str, ...] = ()
        options = self._options
        if options.start_method != "spawn" and options.has_workers:
            preload = (*COLLECTOR_MODULES, *options.preload)
        try:
            entry = self._remote.options(**chosen)
        except (TypeError, ValueError) as error:
            raise type(error)(f"remote_configs of actor {index}: {error}") from error
        return entry.remote(preload)

    def _start(self, actor: ActorHandle) -> None:
        """Begin to start an actor; later calls to it queue behind the start."""
        actor.ray_handle = self._new(actor.index)
        wants = self.weights.of(actor.index)
        if actor.in_flight is not None:
            wants = actor.in_flight.wants
        sent = packed(actor.spec, actor.spec.who)
        first = wants[0].references if wants else ()
        actor.started = actor.call(WORK, "start", sent, *first)
        # A policy that a factory built has its own weights until others are sent.
        # Settings that have changed since the start are sent with an order.
        given = actor.spec.policy is not None and wants and not wants[0].settings
        actor.has = [wants[0] if given else None] * self.weights.each

    def _connect(self, actor: ActorHandle) -> None:
        while actor.ready is None:
            self._await_ready(actor)

    def _await_ready(self, actor: ActorHandle) -> bool:
        """Wait until an actor is ready; return False if it was lost and restarted."""
        found = self._await({actor.started: actor})
        if isinstance(found, Lost | Raised):
            self._recover(found)
            return False
        actor.ready = found[1]
        return True

    def _dispatch(self, actor: ActorHandle) -> None:
        in_flight = actor.in_flight
        assert in_flight is not None
        fresh = changed(actor.has, in_flight.wants)
        ranges = self.weights.parts
        weights = tuple(
            (workers, stored.settings, tuple(ranges[number] for number in numbers))
            for workers, stored, numbers in fresh
        )
        order = replace(in_flight.order, weights=weights)
        references = [
            stored.references[number]
            for _, stored, numbers in fresh
            for number in numbers
        ]
        in_flight.result = actor.call(WORK, "order", order, *references)
        actor.has = list(in_flight.wants)

    def _recover(self, trouble: Lost | Raised) -> None:
        """Replace an actor that is gone or failed, or raise."""
        if trouble.index not in self.handles:
            raise ClosedError("This collector was shut down: build a new one.")
        actor = self.handles[trouble.index]
        if isinstance(trouble, Raised):
            was_ready = actor.ready is not None
            if not was_ready or self._options.on_worker_failure != "restart":
                trouble.reraise()
        most = self._options.max_restarts
        started = self._was_ready(actor)
        # Ray may schedule the new actor on a node that has just died. An actor that was
        # never ready is therefore another attempt at the same restart.
        used_up = 0 <= most <= actor.restarts if started else most == 0
        if used_up or actor.failed_starts >= _IN_A_ROW:
            self._give_up(actor, trouble, used_up=used_up)
        self._kill(actor)
        actor.failed_starts += 1
        if started:
            self._replace(actor)
        self._start(actor)
        if actor.in_flight is not None:
            self._dispatch(actor)

    def _replace(self, actor: ActorHandle) -> None:
        """Note that an actor is lost, and where its replacement begins."""
        _LOG.warning("Restarting: actor %d (%s) failed.", actor.index, actor.spec.who)
        self._note_cut(actor)
        self._gone.append(actor.metrics)
        self._restarts += 1
        actor.restarts += 1
        actor.metrics = {}
        actor.place = replace(
            actor.place,
            episodes=actor.running or actor.place.episodes,
            generation=actor.place.generation + 1,
        )
        place = actor.place if actor.ready is not None else None
        actor.spec = in_place(actor.spec, self._seed, place=place)

    def _was_ready(self, actor: ActorHandle) -> bool:
        """Whether the actor became ready after its last start."""
        if not self._ray.wait([actor.started], timeout=0)[0]:
            return False
        try:
            return isinstance(fetch(self._ray, actor.index, actor.started), ActorReady)
        except (Lost, Raised):
            return False

    def _give_up(
        self, actor: ActorHandle, trouble: Lost | Raised, *, used_up: bool
    ) -> None:
        most = self._options.max_restarts
        rest = f"No restart is left (max_restarts={most})."
        if not used_up:
            rest = f"It was restarted {_IN_A_ROW} times in a row without a batch."
        if isinstance(trouble, Raised):
            trouble.reraise()
        raise lost_error(actor.spec.worker, actor.spec.who, trouble, rest)

    def _note_cut(self, actor: ActorHandle) -> None:
        """Note the trajectories that will not be continued."""
        self._cut += [
            (environment << EPISODE_BITS) + episode
            for environment, episode in enumerate(actor.running, actor.place.first)
            if episode >= 0
        ]

    def _end(self, handles: Sequence[ActorHandle], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        closing: list[Any] = []
        for actor in handles:
            if actor.ray_handle is None:
                continue  # Ray refused to start it.
            with suppress(self._ray.exceptions.RayError):
                if actor.in_flight is not None:
                    actor.call(WATCH, "preempt", actor.in_flight.order.number)
                closing.append(actor.call(WORK, "close"))
            actor.forget()
        if closing:
            left = max(0.0, deadline - time.monotonic())
            with suppress(self._ray.exceptions.RayError):
                self._ray.wait(closing, num_returns=len(closing), timeout=left)
        for actor in handles:
            self._kill(actor)

    def _kill(self, actor: ActorHandle) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor.ray_handle, no_restart=True)
        actor.ray_handle = None
        actor.started = None
