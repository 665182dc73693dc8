"""The step loop: policy and environments fill a slot, frame by frame, in place.

The loop does as little as possible per frame besides calling the policy and the
environments. Their output is kept and written to the slot for many frames at a time;
see ``marl_collect.buffers.frame_writer``.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.frame_writer import LastObservation, SlotWriter, Sources
from marl_collect.buffers.layout import VERSION
from marl_collect.core.action_check import action_check
from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import EnvDescription, allocate, bytes_of
from marl_collect.core.flags import Flags
from marl_collect.core.replay import EpisodeActions, replay
from marl_collect.core.seeding import global_generators, set_global_generators
from marl_collect.core.signature import IS_INIT, PolicySignature
from marl_collect.policies.runner import (
    Generators,
    PolicyRunner,
    RandomRunner,
    states_of,
)
from marl_collect.rollout.env_calls import (
    CallLog,
    EnvCall,
    Outcome,
    check_call,
    make,
    make_again,
    returned,
    set_task,
)
from marl_collect.rollout.episodes import (
    Arrays,
    EndedEpisodes,
    Plan,
    RunningEpisodes,
)
from marl_collect.rollout.progress import ProgressReporter

StateMark = Mapping[str, Any]
"""A moment of a rollout, whose ``state`` can be asked for later."""


@final
@dataclass(frozen=True)
class Collected:
    """What a rollout has done in a slot.

    Attributes:
        frames: number of valid frames in each row, less than T if it was preempted.
        episodes: the episodes that ended.
        running: number of each environment's running episode.
        seconds: that the rollout took.
        reset_seconds: that were spent in resets since the last rollout.
        last: with ``compact_obs``, the last observations of episodes and of the slot.
        explanation: how the policy runs, and why.
    """

    frames: int
    episodes: EndedEpisodes
    running: tuple[int, ...]
    seconds: float
    reset_seconds: float
    last: Sequence[LastObservation]
    explanation: str


class Rollout:
    """Collects frames of K environments into slots."""

    def __init__(
        self,
        engine: EnvBatch,
        policy: PolicyRunner,
        plan: Plan,
        progress: ProgressReporter,
        *,
        check_actions: bool = False,
    ) -> None:
        """Bind environments and policy to memory of their own, ``[K, ...]``.

        This memory holds the current observations and hidden states, so later frames
        do not depend on what the user does to a filled slot.

        Args:
            engine: the environments.
            policy: what acts in them.
            plan: which episodes to collect.
            progress: receives what this rollout is doing.
            check_actions: whether to check the policy's actions before the environments
                execute them. Random actions are always valid.
        """
        self._engine = engine
        self._policy = policy
        self._progress = progress
        self._description: EnvDescription = engine.description
        self._memory = engine.allocate()
        engine.bind(self._memory)
        self.use_plan(plan)
        self._calls = CallLog()
        self._level = plan.level
        self._reset_seconds = 0.0
        # Seeds of environments that are reset already; -1 for others.
        self._early_seeds: NDArray[np.int64] | None = None
        self._get_ready()
        self._signature = signature = policy.signature
        fields = signature.memory(self._description)
        self._memory |= allocate(fields, (engine.size,))
        observed = [*self._description.observed(), *signature.states]
        changed = {*signature.roots, *signature.removed}
        self._sources = Sources(
            self._memory,
            outputs=signature.roots,
            observed=[key for key in observed if key not in changed],
            outcome=[
                *(key for key in observed if key in changed),
                *self._description.outcome(),
            ],
        )
        self._flags = Flags(self._memory, self._description)
        self._done: NDArray[np.bool_] = self._memory["done",].view(np.bool_)[:, 0]
        self._done_bytes = bytes_of(self._memory["done",]).tobytes
        self._carried = [self._memory[key] for key in signature.carried]
        self._is_init = self._memory.get(IS_INIT)
        self._bind(policy)
        written = signature.roots.keys() - self._description.observed().keys()
        self._unwritten = {
            signature.place(key): self._memory[signature.place(key)].copy()
            for key in written - self._description.actions().keys()
        }
        self._random = self._random_runner(signature)
        self._bind(self._random)
        self._acting = policy
        checks = check_actions and not isinstance(policy, RandomRunner)
        self._check = action_check(self._description, self._memory) if checks else None
        # Keys whose values tell whether a replay arrives where its episode was.
        repeats = self._description.repeats
        self._compared = list(self._description.observed()) if repeats else []

    def _bind(self, policy: PolicyRunner) -> None:
        """Let a policy act on the memory."""
        policy.bind(self._memory)

    def _random_runner(self, instead_of: PolicySignature) -> PolicyRunner:
        """Return what acts in frames with random actions instead of the policy."""
        return RandomRunner(self._description, instead_of)

    def call_env(self, call: EnvCall) -> list[Outcome]:
        """Call a method of some environments, between two slots.

        Returns:
            A result for each environment, or one for all worlds of a simulator.

        Raises:
            AttributeError, ValueError: see ``check_call``.
        """
        check_call(self._engine, call)
        self._early_seeds = None  # The call may change what a reset does.
        self._make_pending()
        outcomes = make(self._engine, call)
        made = returned(call, [error is not None for _, error in outcomes])
        if made.rows:
            self._calls.add(made, longest=self._episodes.longest)
        return outcomes

    def _make_pending(self) -> None:
        """Make the calls that a loaded state has after its next slot."""
        pending, self._calls.pending = self._calls.pending, []
        make_again(self._engine, pending)
        for call in pending:
            self._calls.add(call, longest=self._episodes.longest)

    def set_level(self, level: int) -> None:
        """Set the curriculum's level for episodes that begin from now on."""
        if level != self._level:
            self._level = level
            self._early_seeds = None

    def explain(self) -> str:
        """Return how actions are computed, and why."""
        explained = self._policy.explain()
        if self._check is None:
            return explained
        return f"{explained} Actions are checked in every frame."

    def reset(self) -> None:
        """Begin a new episode in every environment."""
        self._calls.began()
        self._begin(np.arange(self._engine.size))

    @property
    def plan(self) -> Plan:
        """The plan that determines episode numbers and seeds."""
        return self._episodes.plan

    def use_plan(self, plan: Plan) -> None:
        """Switch to another plan. Its first episodes begin with the next frame."""
        self._engine.first = plan.environments.start
        self._episodes = RunningEpisodes(self._description, plan)
        self._generators = Generators(plan.seed, plan.environments, plan.generation)
        self._policy.remembers = False

    def collect(
        self, slot: Arrays, version: int = 0, *, random: bool = False
    ) -> Collected:
        """Fill ``slot`` from its first frame.

        Args:
            slot: arrays ``[K, T, ...]`` of all keys of the batch.
            version: version of the weights, stored if the batch has a key for it.
            random: take random actions instead of the policy's.
        """
        frames = self.frames(slot, version, random=random)
        while True:
            try:
                next(frames)
            except StopIteration as end:
                result: Collected = end.value
                return result

    def frames(
        self, slot: Arrays, version: int = 0, *, random: bool = False
    ) -> Generator[None, None, Collected]:
        """Do the same as ``collect``, but yield while other processes step."""
        started = time.perf_counter()
        if not self._episodes.started:
            self.reset()
        self._early_seeds = None
        writer = SlotWriter(slot, self._sources)
        engine = self._engine
        step_async, step_wait = engine.step_async, engine.step_wait
        is_async = engine.is_async
        self._episodes.enter()
        limit = self._episodes.first_limit()
        act = self._begin_acting(writer.frames, random=random)
        done, writes_acts = self._done_bytes, writer.writes_acts
        nobody = bytes(engine.size)
        progress = self._progress
        frame = -1
        for frame in range(writer.frames):
            progress.acting()
            act(frame)
            if writes_acts:
                writer.acted(frame)
            progress.stepping()
            step_async()
            if is_async:
                yield
                step_wait()
            if frame == limit:
                self._truncate_at_limit(frame)
            writer.stepped(frame)
            if done() != nobody:
                (rows,) = self._done.nonzero()
                self._episodes.end(rows, frame + 1)
                writer.ended(rows, frame)
                if not is_async and self._episodes.are_last(rows):
                    break  # A reset for an episode that nobody wants may take long.
                self._begin_next_episodes(rows, frame + 1, writer)
                limit = self._episodes.first_limit()
            if progress.preempted():
                break
        ended = self._suspend(slot, writer, frame + 1, version)
        return self._collected(started, frame + 1, ended, writer.last)

    def _begin_acting(self, frames: int, *, random: bool) -> Callable[[int], None]:
        """Prepare for ``frames`` frames; return the function that acts in each."""
        self._acting = policy = self._random if random else self._policy
        self._engine.checks_actions = not isinstance(policy, RandomRunner)
        policy.begin(frames, self._generators)
        if random:
            # The policy may have acted before: a state of random frames can be loaded.
            self._write(self._unwritten)
        act, check = policy.act, self._check
        if random or check is None:
            return act

        def act_and_check(frame: int) -> None:
            act(frame)
            check(frame)

        return act_and_check

    def _write(self, arrays: Arrays) -> None:
        """Write to the memory that the policy acts on."""
        for key, value in arrays.items():
            self._memory[key][...] = value

    def _suspend(
        self, slot: Arrays, writer: SlotWriter, end: int, version: int
    ) -> EndedEpisodes:
        """Complete the slot, which ends before frame ``end``; episodes continue.

        Returns:
            The episodes that ended.
        """
        writer.flush(end)
        ended = self._episodes.leave(slot, end)
        if writer.omits:
            writer.ended(np.flatnonzero(self._episodes.starts < end), end - 1)
        if VERSION in slot:
            slot[VERSION].fill(version)
            slot["next", *VERSION].fill(version)
        writer.close(end)
        self._calls.passed(end)
        self._make_pending()
        return ended

    def _begin_next_episodes(
        self, rows: NDArray[np.int64], frame: int, writer: SlotWriter
    ) -> None:
        """Begin new episodes in ``rows``, whose first frame is ``frame``."""
        self._begin(rows)
        for k in self._episodes.with_given_seeds(rows).tolist():
            self._acting.redraw(k, frame, self._generators)
        writer.began(rows, frame)

    def _collected(
        self,
        started: float,
        frames: int,
        episodes: EndedEpisodes,
        last: Sequence[LastObservation] = (),
    ) -> Collected:
        """Return what was done in a slot since ``started``."""
        reset_seconds, self._reset_seconds = self._reset_seconds, 0.0
        return Collected(
            frames,
            episodes,
            self.running,
            time.perf_counter() - started,
            reset_seconds,
            last,
            self.explain(),
        )

    @property
    def running(self) -> tuple[int, ...]:
        """Number of each environment's running episode."""
        return self._episodes.numbers

    def mark(self) -> StateMark:
        """Return what ``state`` needs to know of this moment.

        The latest frame is copied, but no actions are. So the cost does not depend on
        the lengths of the running episodes.
        """
        remembered = self._signature.kept if self._policy.remembers else ()
        keys = [*self._signature.carried, *remembered]
        carried = {key: self._memory[key].copy() for key in keys}
        now = {key: self._memory[key].copy() for key in self._compared}
        return {
            "seed": self._episodes.plan.seed,
            "generation": self._episodes.plan.generation,
            "environments": self._episodes.state() | {"frame": now},
            "actions": self._episodes.mark(),
            "calls": self._calls.mark(),
            "generators": self._generators.mark(),
            "carried": carried,
            "is_init": None if self._is_init is None else self._is_init.copy(),
            "assigned": self._policy.assigned(),
            **global_generators(),
        }

    def state(self, mark: StateMark | None = None) -> dict[str, Any]:
        """Return the state from which ``load`` continues exactly.

        It consists of numbers and arrays. The first dimension of those of
        ``environments``, ``generators``, ``carried``, ``is_init`` and ``assigned`` are
        the K environments.

        Args:
            mark: an earlier moment; None for now.
        """
        mark = self.mark() if mark is None else mark
        return {
            **mark,
            "actions": vars(mark["actions"].cut()),
            "calls": self._calls.state(mark["calls"]),
            "generators": states_of(mark["generators"]),
        }

    def load(self, state: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Continue from ``state``.

        Running episodes are replayed from their seeds and actions. An environment
        begins its next episode instead if it does not repeat, if its actions were too
        large to keep, or if the replay does not arrive at the recorded frame.
        ``running`` then has the new episode's number.

        Args:
            state: from ``state``.
            fresh: begin the next episode in all environments, and replay none.
        """
        seed, generation = state["seed"], state["generation"]
        plan = replace(self.plan, seed=seed, episodes=(), generation=generation)
        self.use_plan(plan)
        actions = EpisodeActions(**state["actions"])
        self._episodes.load(state["environments"], actions)
        self._generators.load(state["generators"])
        calls = self._calls.load(state["calls"])
        if calls:
            self._early_seeds = None
        started = self._episodes.started
        if fresh or not (started and self._description.repeats):
            make_again(self._engine, (call for call, _ in calls))
            if fresh or started:
                self.reset()
        else:
            self._replay_running(state, actions, calls)
        set_global_generators(state)

    def _replay_running(
        self,
        state: Mapping[str, Any],
        actions: EpisodeActions,
        calls: Sequence[tuple[EnvCall, int | None]],
    ) -> None:
        """Replay the running episodes of a state; begin new ones if that fails."""
        longest = max(actions.lengths)
        self._early_seeds = None
        before = (c for c, age in calls if age is None or age > longest)
        make_again(self._engine, before)
        elsewhere = replay(
            self._engine,
            self._memory,
            actions,
            self._episodes.seeds(np.arange(self._engine.size)),
            state["environments"]["frame"],
            reset=self._reset,
            stepping=self._progress.replaying,
            calling=lambda left: make_again(
                self._engine, (c for c, age in calls if age == left)
            ),
        )
        for key, value in state["carried"].items():
            self._memory[key][...] = value
        keys = self._signature.kept.keys()
        self._policy.remembers = bool(keys) and keys <= state["carried"].keys()
        if self._is_init is not None:
            self._is_init[...] = state["is_init"]
        self._policy.assign(state.get("assigned"))
        if len(elsewhere):
            self._begin(elsewhere)

    def _begin(self, rows: NDArray[np.int64]) -> None:
        seeds = self._episodes.begin(rows, self._level)
        if len(given := self._episodes.with_given_seeds(rows)):
            of_given = self._episodes.seeds(given).tolist()
            for k, seed in zip(given.tolist(), of_given, strict=True):
                self._generators.restart(k, seed)
        if self._policy.chooses:
            pairs = zip(rows.tolist(), seeds.tolist(), strict=True)
            self._policy.begin_episodes(dict(pairs))
        due = np.ones(len(rows), np.bool_)
        if self._early_seeds is not None:
            due = self._early_seeds[rows] != seeds
            self._early_seeds[rows] = -1
        if due.any():
            self._reset(rows[due].tolist(), seeds[due].tolist())
        for array in self._carried:
            array[rows] = 0
        if self._is_init is not None:
            self._is_init[rows] = True

    def _get_ready(self) -> None:
        """Show the policy observations, if it needs any, and environments a task."""
        if self._policy.must_observe or self.plan.curriculum is not None:
            rows = np.arange(self._engine.size)
            seeds = self._episodes.following_seeds(rows)
            # For the first episodes, so they need no other reset when they begin. It
            # raises an error if environments take no tasks.
            self._reset(rows.tolist(), seeds.tolist(), early=True)
            self._early_seeds = seeds
        if self._policy.must_observe:
            self._policy.probe(self._memory)

    def _reset(
        self, indices: Sequence[int], seeds: Sequence[int], *, early: bool = False
    ) -> None:
        """Begin episodes, whose numbers and levels are known unless it is ``early``."""
        environments, engine = self.plan.environments, self._engine
        start = time.perf_counter()
        curriculum = self.plan.curriculum
        if curriculum is not None:
            rows = np.array(indices, np.int64)
            levels = self._episodes.levels[rows]
            if early:
                levels[...] = self._level
            numbers = self._episodes.numbers_for_tasks(rows, ahead=int(early))
            for k, *task_of in zip(
                indices, seeds, numbers.tolist(), levels.tolist(), strict=True
            ):
                self._progress.resetting(environments[k])
                set_task(engine, k, curriculum, *task_of)
        if engine.is_async or engine.one_simulator:  # It resets them together.
            self._progress.resetting(environments[indices[0]])
            engine.reset(indices, seeds)
        else:
            for k, seed in zip(indices, seeds, strict=True):
                self._progress.resetting(environments[k])
                engine.reset([k], [seed])
        self._reset_seconds += time.perf_counter() - start

    def _truncate_at_limit(self, frame: int) -> None:
        rows = np.flatnonzero((self._episodes.limits() == frame) & ~self._done)
        if len(rows):
            self._flags.truncate(rows)
