"""The inner loop: policy and environments fill a slot, frame by frame, in place.

Per frame this does, beside the policy and the environments themselves, one array
assignment per key: the policy's outputs into the slot's root, the outcome into its
``next``. Everything that follows from these is written once, at the end, for whole
episodes at a time: the root of a frame is the ``next`` of the frame before it,
unless an episode began there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.description import EnvDescription, Field, Key, allocate
from marl_collect.env import EnvBatch
from marl_collect.flags import Flags
from marl_collect.layout import IS_INIT, STEP_COUNT, TRAJ_IDS, VERSION
from marl_collect.policies.runner import Generators, PolicyRunner, RandomRunner
from marl_collect.seeding import episode_seed

Arrays = Mapping[Key, NDArray[Any]]
EPISODE_BITS = 32


class Progress(Protocol):
    """Where a rollout notes what it is doing, for whoever watches it."""

    def resetting(self, environment: int) -> None:
        """Note that environment ``environment`` begins an episode."""

    def acting(self) -> None:
        """Note that the policy acts."""

    def stepping(self) -> None:
        """Note that the environments step."""


@final
class NoProgress:
    """Notes nothing: for rollouts that nobody watches from outside."""

    def resetting(self, environment: int) -> None:
        """Do nothing."""

    def acting(self) -> None:
        """Do nothing."""

    def stepping(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Episode:
    """One episode that ended.

    Attributes:
        environment: index of its environment.
        length: in frames.
        returns: undiscounted sum of rewards of each agent, by group.
    """

    environment: int
    length: int
    returns: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Plan:
    """What stays the same over all rollouts of these environments.

    Attributes:
        seed: that episodes and noise are derived from.
        environments: the environments' indices, the same in whatever worker.
        max_frames_per_traj: frames after which a trajectory is cut, 0 for never.
    """

    seed: int
    environments: range
    max_frames_per_traj: int = 0


@dataclass
class _State:
    """What one environment carries from rollout to rollout."""

    episode: int = -1
    length: int = 0
    returns: dict[str, NDArray[np.float64]] = field(default_factory=dict)


@final
class Rollout:
    """Collects rollouts of K environments into slots."""

    def __init__(
        self,
        engine: EnvBatch,
        policy: PolicyRunner,
        plan: Plan,
        progress: Progress | None = None,
    ) -> None:
        """Bind environments and policy to memory of their own, ``[K, ...]``.

        That memory holds the running observations and hidden states, so whatever
        happens to a slot after it was filled changes no later frame.
        """
        self._engine = engine
        self._policy = policy
        self._plan = plan
        self._progress: Progress = progress or NoProgress()
        self._description: EnvDescription = engine.description
        fields = self._description.row() | dict(policy.outputs) | dict(policy.carried)
        if policy.reads_is_init:
            fields[IS_INIT] = Field((1,), np.dtype(np.bool_))
        self._memory = allocate(fields, (engine.size,))
        self._observed = [*self._description.observed(), *policy.carried]
        self._states = [_State() for _ in range(engine.size)]
        self._generators = Generators(plan.seed, plan.environments)
        self._flags = [
            Flags({key: a[k] for key, a in self._memory.items()}, self._description)
            for k in range(engine.size)
        ]
        self._done = memoryview(self._memory["done",].reshape(-1)).cast("B")
        self._is_init = self._memory.get(IS_INIT)
        engine.bind(self._memory)
        policy.bind(self._memory)
        self._random = RandomRunner(self._description)
        self._random.bind(self._memory)

    def reset(self, indices: Sequence[int] | None = None) -> None:
        """Begin a new episode in all environments, or in those of ``indices``."""
        chosen = range(self._engine.size) if indices is None else indices
        for k in chosen:
            self._begin_episode(k)

    def collect(
        self, slot: Arrays, version: int = 0, *, random: bool = False
    ) -> list[Episode]:
        """Fill ``slot`` and return the episodes that ended in it.

        Args:
            slot: arrays ``[K, T, ...]`` of all the batch's keys.
            version: of the weights that act, noted where the batch wants it.
            random: act at random instead of with the policy.
        """
        writer = _SlotWriter(
            slot, self._memory, self._observed, self._policy, self._description
        )
        frames = writer.frames
        if self._states[0].episode < 0:
            self.reset()
        begins = [[0] for _ in self._states]
        episodes: list[Episode] = []
        writer.first()
        policy = self._random if random else self._policy
        policy.begin(frames, self._generators)
        limits = self._limits(0, frames)
        limit = min(limits)
        act, step, done = policy.act, self._engine.step, self._done
        progress, is_init = self._progress, self._is_init
        for frame in range(frames):
            progress.acting()
            act(frame)
            writer.acted(frame)
            if is_init is not None:
                writer.init(frame, is_init)
                is_init.fill(False)
            progress.stepping()
            step()
            if frame == limit:
                self._cut(limits, frame)
                limit = min(limits)
            writer.stepped(frame)
            if any(done):
                for k, ended in enumerate(done):
                    if ended:
                        episodes.append(
                            self._end_episode(k, slot, begins[k][-1], frame)
                        )
                        self._stamp(slot, k, begins[k][-1], frame + 1)
                        begins[k].append(frame + 1)
                        self._begin_episode(k)
                        writer.began(k, frame + 1)
                        limits[k] = self._limit(k, frame + 1, frames)
                limit = min(limits)
        for k, rows in enumerate(begins):
            self._suspend(k, slot, rows[-1], frames)
            writer.finish(k, rows)
        if VERSION in slot:
            slot[VERSION].fill(version)
        return episodes

    def _begin_episode(self, k: int) -> None:
        state, plan = self._states[k], self._plan
        state.episode += 1
        state.length = 0
        state.returns = {}
        index = plan.environments[k]
        self._progress.resetting(index)
        self._engine.reset([k], [episode_seed(plan.seed, index, state.episode)])
        for key in self._policy.carried:
            self._memory[key][k] = 0
        if self._is_init is not None:
            self._is_init[k] = True

    def _end_episode(self, k: int, slot: Arrays, begin: int, frame: int) -> Episode:
        state = self._states[k]
        returns = self._returns(k, slot, begin, frame + 1)
        return Episode(
            environment=self._plan.environments[k],
            length=state.length + frame + 1 - begin,
            returns={name: tuple(r.tolist()) for name, r in returns.items()},
        )

    def _suspend(self, k: int, slot: Arrays, begin: int, end: int) -> None:
        """Note what is running at the end of a slot, to go on in the next one."""
        state = self._states[k]
        self._stamp(slot, k, begin, end)
        state.returns = self._returns(k, slot, begin, end)
        state.length += end - begin

    def _returns(
        self, k: int, slot: Arrays, begin: int, end: int
    ) -> dict[str, NDArray[np.float64]]:
        before = self._states[k].returns
        out: dict[str, NDArray[np.float64]] = {}
        for name, group in self._description.groups.items():
            rewards = slot["next", name, "reward"][k, begin:end, :, 0]
            total = rewards.sum(0, dtype=np.float64)
            out[name] = total + before.get(name, np.zeros(group.n_agents))
        return out

    def _stamp(self, slot: Arrays, k: int, begin: int, end: int) -> None:
        """Write trajectory id and step count of one episode's frames."""
        state = self._states[k]
        if TRAJ_IDS in slot:
            index = self._plan.environments[k]
            slot[TRAJ_IDS][k, begin:end] = (index << EPISODE_BITS) + state.episode
        if STEP_COUNT in slot:
            counts = state.length + np.arange(end - begin)
            slot[STEP_COUNT][k, begin:end, 0] = counts
            slot["next", *STEP_COUNT][k, begin:end, 0] = counts + 1

    def _limits(self, frame: int, frames: int) -> list[int]:
        return [self._limit(k, frame, frames) for k in range(len(self._states))]

    def _limit(self, k: int, frame: int, frames: int) -> int:
        """Return the frame at which environment k's trajectory is cut."""
        if self._plan.max_frames_per_traj == 0:
            return frames
        left = self._plan.max_frames_per_traj - self._states[k].length
        return frame + left - 1

    def _cut(self, limits: list[int], frame: int) -> None:
        for k, limit in enumerate(limits):
            if limit == frame and not self._done[k]:
                self._flags[k].truncate()
            if limit == frame:
                limits[k] = frame + 2**40  # Set anew when the episode has begun.


@final
class _SlotWriter:
    """Copies the running memory into one slot, at the right frame."""

    def __init__(
        self,
        slot: Arrays,
        memory: Arrays,
        observed: Sequence[Key],
        policy: PolicyRunner,
        description: EnvDescription,
    ) -> None:
        size = memory["done",].shape[0]
        # One environment: drop its dimension, so that plain rows are assigned.
        pick: Any = 0 if size == 1 else slice(None)

        def pair(target: Key, source: Key) -> tuple[NDArray[Any], NDArray[Any]]:
            rows = slot[target][0] if size == 1 else slot[target].swapaxes(0, 1)
            return rows, memory[source][pick]

        following = [*observed, *description.outcome()]
        kept = [key for key in following if ("next", *key) in slot]
        self.frames = slot["done",].shape[1]
        self._acted = [pair(key, key) for key in policy.outputs]
        self._stepped = [pair(("next", *key), key) for key in kept]
        self._init = pair(IS_INIT, IS_INIT)[0] if IS_INIT in slot else None
        self._roots = [(slot[key], memory[key]) for key in observed]
        self._shift = [
            (slot[key], slot["next", *key]) for key in observed if key in kept
        ]

    def first(self) -> None:
        """Write the root of the first frame."""
        for root, source in self._roots:
            root[:, 0] = source

    def acted(self, frame: int) -> None:
        """Write what the policy computed."""
        for rows, source in self._acted:
            rows[frame] = source

    def init(self, frame: int, source: NDArray[Any]) -> None:
        """Write whether an episode begins at this frame."""
        if self._init is not None:
            self._init[frame] = source[0] if self._init.ndim == 2 else source

    def stepped(self, frame: int) -> None:
        """Write the outcome of the step."""
        for rows, source in self._stepped:
            rows[frame] = source

    def began(self, k: int, frame: int) -> None:
        """Write the root of environment k, whose episode begins at ``frame``."""
        if frame < self.frames:
            for root, source in self._roots:
                root[k, frame] = source[k]

    def finish(self, k: int, begins: Sequence[int]) -> None:
        """Write the roots inside each episode, which begin at ``begins``."""
        for begin, end in zip(begins, [*begins[1:], self.frames], strict=True):
            if end - begin > 1:
                for root, following in self._shift:
                    root[k, begin + 1 : end] = following[k, begin : end - 1]
