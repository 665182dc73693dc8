"""The trainer's side of the actors: start, order, wait, replace, end.

One ``Fleet`` owns the actors and the weights in the object store, whichever of
sync and async uses it. At most one batch per actor is in the making or in the store:
an actor is told to collect again when its batch has been copied out.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from marl_collect.collectors.worker_group import PRELOAD
from marl_collect.core.description import EnvDescription
from marl_collect.core.factories import Factory, check_alike
from marl_collect.distributed.actor import Actor
from marl_collect.distributed.actor_handle import Flight, Member
from marl_collect.distributed.cluster import Cluster
from marl_collect.distributed.entry import GROUPS, WATCH, WORK, Entry
from marl_collect.distributed.messages import Gathered, Order, Ready, Spec
from marl_collect.distributed.ray_options import RayOptions
from marl_collect.distributed.results import Lost, Raised, fetch, lost_error
from marl_collect.distributed.specs import in_place, packed
from marl_collect.distributed.vectors import StoredWeights, news
from marl_collect.distributed.watchdog import Vigil
from marl_collect.errors import ClosedError
from marl_collect.rollout.episodes import EPISODE_BITS

_IN_A_ROW = 3
"""An actor that was started anew so often, and never collected, is beyond help."""


@final
class Fleet:
    """Actors, by their index, and what they act with.

    Attributes:
        members: those that collect, in order.
        weights: that they act with.
    """

    def __init__(self, cluster: Cluster, options: RayOptions, seed: int) -> None:
        """Have no actor yet."""
        self.members: dict[int, Member] = {}
        self.weights: StoredWeights = None  # type: ignore[assignment]
        self._ray = cluster.ray
        self._options = options
        self._seed = seed
        self._remote: Any = None
        self._vigil = Vigil(self._ray, options.timeout, options.start_timeout)
        self._orders = 0
        self._first = 0  # Index of the next environment.
        self._gone: list[Mapping[str, Any]] = []
        self._cut: list[int] = []
        self._restarts = 0

    # Starting

    def describe(self, factory: Factory, spec: Spec) -> EnvDescription:
        """Return what an environment looks like, from one that an actor builds."""
        member = Member(spec.worker, replace(spec, factories=(factory,)))
        member.handle = self._new(0)
        self.members[0] = member
        try:
            member.started = member.call(WORK, "describe", packed(factory, spec.who))
            found = self._await({member.started: member})
        finally:
            del self.members[0]
            self._kill(member)
        if isinstance(found, Raised):
            found.again()
        if isinstance(found, Lost):
            what = "It was to describe the environment."
            raise lost_error(0, spec.who, found, what)
        description: EnvDescription = found[1]
        return description

    def begin(self, specs: Mapping[int, Spec]) -> None:
        """Start actors, wait until they are ready, and number their environments."""
        fresh = [Member(index, spec) for index, spec in specs.items()]
        for member in fresh:
            self.members[member.index] = member
            self._start(member)
        for member in fresh:
            self._meet(member)
        reference = next(iter(self.members.values()))
        for member in fresh:
            check_alike(
                reference.known.description,
                member.known.description,
                f"actor {member.index}",
                f"actor {reference.index}",
            )
            member.place = replace(member.place, first=self._first)
            self._first += member.size
        self.ask_each("place", {m.index: (m.place,) for m in fresh})

    # Collecting

    def send(self, index: int, *, random: bool, snapshot: bool) -> None:
        """Order a batch from an actor, with the newest weights."""
        self._orders += 1
        member = self.members[index]
        wants = self.weights.of(index)
        order = Order(self._orders, random, snapshot)
        member.flight = Flight(order, wants, None)
        self._fly(member)

    def receive(self, indices: Iterable[int]) -> tuple[Member, Gathered]:
        """Return the next actor of these that is done, and its batch.

        One that is lost is replaced, if a restart is left, and collects again.
        """
        chosen = list(indices)
        while True:
            awaited = [self.members[index] for index in chosen]
            found = self._await({m.flight.result: m for m in awaited if m.flight})
            if isinstance(found, Lost | Raised):
                self._mend(found)
                continue
            member, gathered = found
            assert member.flight is not None
            member.acted = [stored.version for stored in member.flight.wants]
            member.flight = None
            member.fruitless = 0
            member.running = gathered.running
            member.figures = gathered.figures
            return member, gathered

    def preempt(self, indices: Iterable[int]) -> None:
        """Ask actors for what they have, at least one frame."""
        for index in indices:
            member = self.members[index]
            if member.flight is not None:
                member.call(WATCH, "preempt", member.flight.order.number)

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Ask the same of all actors, and return their answers in order."""
        return self.ask_each(name, dict.fromkeys(self.members, args))

    def ask_each(self, name: str, args: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Ask actors for a part of RemoteCollector, and return the answers in order."""
        answers: dict[int, Any] = {}
        asked = {index: self._ask(name, index, args[index]) for index in args}
        while asked:
            found = self._await({ref: self.members[i] for i, ref in asked.items()})
            if isinstance(found, Lost | Raised):
                self._mend(found)
                asked[found.index] = self._ask(name, found.index, args[found.index])
                continue
            member, answer = found
            answers[member.index] = answer
            del asked[member.index]
        return [answers[index] for index in args]

    def reseed(self, seed: int) -> None:
        """Let all actors derive everything random from ``seed``, from episode 0."""
        self.ask("reseed", seed)
        self._seed = seed
        for member in self.members.values():
            member.running = ()
            member.place = replace(member.place, episodes=())

    def load(self, states: Mapping[int, list[Any]]) -> tuple[int, ...]:
        """Let every actor go on from the states of its workers.

        Returns:
            Number of each environment's running episode, actor by actor.
        """
        found = self.ask_each("load", {index: (own,) for index, own in states.items()})
        for (index, own), running in zip(states.items(), found, strict=True):
            self._seed = own[0]["seed"]
            member = self.members[index]
            member.running = running
            # Whoever replaces the actor must not repeat the noise of a worker.
            generation = max(state["generation"] for state in own)
            member.place = replace(member.place, generation=generation)
        return tuple(number for running in found for number in running)

    # Looking

    def refreshed(self) -> dict[int, Member]:
        """Return the actors, once those that were started anew are ready."""
        for member in self.members.values():
            while member.restarts and not self._hear(member):
                pass
        return self.members

    def steps(self) -> list[int]:
        """Return each actor's frames so far, also of a batch in the making."""
        looks = [member.call(WATCH, "steps") for member in self.members.values()]
        found: list[int] = self._ray.get(looks, timeout=self._options.start_timeout)
        return found

    def figures(self) -> dict[str, Any]:
        """Return restarts, cut trajectories, and where the actors' time went."""
        each = [*self._gone, *(m.figures for m in self.members.values())]
        cut = [number for one in each for number in one.get("cut_trajectories", ())]
        return {
            "actors": len(self.members),
            "restarts": self._restarts,
            "worker_restarts": sum(one.get("restarts", 0) for one in each),
            "recycled": sum(one.get("recycled", 0) for one in each),
            "cut_trajectories": self._cut + cut,
            "seconds_in_rollouts": sum(o.get("seconds_in_rollouts", 0) for o in each),
            "seconds_in_resets": sum(o.get("seconds_in_resets", 0) for o in each),
        }

    # Ending

    def retire(self, index: int) -> None:
        """Let an actor go, once it has carried out its order."""
        member = self.members[index]
        if member.flight is not None:
            member.leaving = True
            return
        self._note_cut(member)
        self._gone.append(member.figures)
        del self.members[index]
        self.weights.forget(index)
        self._end([member], self._options.start_timeout)

    def close(self, timeout: float) -> None:
        """End all actors, and drop everything from the store."""
        members, self.members = list(self.members.values()), {}
        self._gone += [member.figures for member in members]
        if self.weights is not None:
            self.weights.close()
        if self._ray.is_initialized():
            self._end(members, timeout)
        self._remote = None

    # Inside

    def _await(
        self, pending: Mapping[Any, Member]
    ) -> tuple[Member, Any] | Lost | Raised:
        """Return the first of these actors that is done, with its reply, or trouble."""
        try:
            done = self._vigil.first(pending)
            member = pending[done]
            return member, fetch(self._ray, member.index, done)
        except (Lost, Raised) as trouble:
            # Its frames know objects, which the store would keep for as long.
            return trouble.with_traceback(None)

    def _ask(self, name: str, index: int, args: tuple[Any, ...]) -> Any:
        member = self.members[index]
        if hasattr(Actor, name):
            return member.call(WORK, name, *args)
        return member.call(WORK, "ask", name, *args)

    def _new(self, index: int) -> Any:
        if self._remote is None:
            self._remote = self._ray.remote(concurrency_groups=GROUPS)(Entry)
        chosen = {"max_restarts": 0, **self._options.remote(index)}
        preload: tuple[str, ...] = ()
        options = self._options
        if options.start_method != "spawn" and options.has_workers:
            preload = (*PRELOAD, *options.preload)
        try:
            entry = self._remote.options(**chosen)
        except (TypeError, ValueError) as error:
            raise type(error)(f"remote_configs of actor {index}: {error}") from error
        return entry.remote(preload, options.start_timeout)

    def _start(self, member: Member) -> None:
        """Begin to start an actor; what it is told next waits for that."""
        member.handle = self._new(member.index)
        wants = self.weights.of(member.index)
        if member.flight is not None:
            wants = member.flight.wants
        sent = packed(member.spec, member.spec.who)
        first = [stored.reference for stored in wants[:1]]
        member.started = member.call(WORK, "start", sent, *first)
        # What a factory built has weights of its own, until it is sent others; and
        # settings that have changed since the start come with an order.
        given = member.spec.policy is not None and wants and not wants[0].settings
        member.has = [wants[0] if given else None] * self.weights.each

    def _meet(self, member: Member) -> None:
        while member.ready is None:
            self._hear(member)

    def _hear(self, member: Member) -> bool:
        """Wait until an actor is ready; False if it was lost, and is started again."""
        found = self._await({member.started: member})
        if isinstance(found, Lost | Raised):
            self._mend(found)
            return False
        member.ready = found[1]
        return True

    def _fly(self, member: Member) -> None:
        flight = member.flight
        assert flight is not None
        fresh = news(member.has, flight.wants)
        weights = tuple((workers, stored.settings) for workers, stored in fresh)
        order = replace(flight.order, weights=weights)
        references = [stored.reference for _, stored in fresh]
        flight.result = member.call(WORK, "order", order, *references)
        member.has = list(flight.wants)

    def _mend(self, trouble: Lost | Raised) -> None:
        """Put a new actor in the place of one that is gone or failed, or raise."""
        if trouble.index not in self.members:
            raise ClosedError("This collector was shut down: build a new one.")
        member = self.members[trouble.index]
        if isinstance(trouble, Raised):
            met = member.ready is not None
            if not met or self._options.on_worker_failure != "restart":
                trouble.again()
        most = self._options.max_restarts
        came_up = self._came_up(member)
        # Ray may send the new one to a node of whose death it has not heard yet: that
        # is one more attempt at the same restart.
        used_up = 0 <= most <= member.restarts if came_up else most == 0
        if used_up or member.fruitless >= _IN_A_ROW:
            self._give_up(member, trouble, used_up=used_up)
        self._kill(member)
        member.fruitless += 1
        if came_up:
            self._replace(member)
        self._start(member)
        if member.flight is not None:
            self._fly(member)

    def _replace(self, member: Member) -> None:
        """Note that an actor is lost, and what the one in its place begins with."""
        self._note_cut(member)
        self._gone.append(member.figures)
        self._restarts += 1
        member.restarts += 1
        member.figures = {}
        member.place = replace(
            member.place,
            episodes=member.running or member.place.episodes,
            generation=member.place.generation + 1,
        )
        place = member.place if member.ready is not None else None
        member.spec = in_place(member.spec, self._seed, place=place)

    def _came_up(self, member: Member) -> bool:
        """Whether the actor, as it was started last, was ever ready."""
        if not self._ray.wait([member.started], timeout=0)[0]:
            return False
        try:
            return isinstance(fetch(self._ray, member.index, member.started), Ready)
        except (Lost, Raised):
            return False

    def _give_up(
        self, member: Member, trouble: Lost | Raised, *, used_up: bool
    ) -> None:
        most = self._options.max_restarts
        rest = f"No restart is left (max_restarts={most})."
        if not used_up:
            rest = f"It was started anew {_IN_A_ROW} times and never collected."
        if isinstance(trouble, Raised):
            trouble.again()
        raise lost_error(member.spec.worker, member.spec.who, trouble, rest)

    def _note_cut(self, member: Member) -> None:
        """List the trajectories that nobody will go on with."""
        self._cut += [
            (environment << EPISODE_BITS) + episode
            for environment, episode in enumerate(member.running, member.place.first)
            if episode >= 0
        ]

    def _end(self, members: Sequence[Member], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        closing: list[Any] = []
        for member in members:
            if member.handle is None:
                continue  # Ray refused to start it.
            with suppress(self._ray.exceptions.RayError):
                if member.flight is not None:
                    member.call(WATCH, "preempt", member.flight.order.number)
                closing.append(member.call(WORK, "close"))
            member.forget()
        if closing:
            left = max(0.0, deadline - time.monotonic())
            with suppress(self._ray.exceptions.RayError):
                self._ray.wait(closing, num_returns=len(closing), timeout=left)
        for member in members:
            self._kill(member)

    def _kill(self, member: Member) -> None:
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(member.handle, no_restart=True)
        member.handle = None
        member.started = None
