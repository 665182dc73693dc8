"""Bookkeeping of running episodes: numbers, seeds, lengths, returns and actions.

The actions are kept so that an episode of an environment that repeats can be resumed
exactly, by replaying them from the episode's seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import STEP_COUNT, TRAJ_IDS
from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.replay import ActionHistory, RecordedEpisode
from marl_collect.core.seeding import episode_seed
from marl_collect.policies.assigned import POLICY_ID

Arrays = Mapping[Key, NDArray[Any]]
EPISODE_BITS = 32
NEVER = 2**62


@dataclass(frozen=True)
class Episode:
    """One episode that ended.

    Attributes:
        environment: index of its environment.
        length: in frames.
        returns: undiscounted sum of rewards of each agent, by group.
        policy_ids: index of each agent's policy, by group; empty for a single policy.
    """

    environment: int
    length: int
    returns: Mapping[str, tuple[float, ...]]
    policy_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Settings that all rollouts of these environments share.

    Attributes:
        seed: seed from which episodes and noise are derived.
        environments: indices of the environments, over all workers.
        max_frames_per_traj: frames after which a trajectory is cut; None for no limit.
        episodes: number of each environment's last episode, if there were any.
        generation: how often the worker was restarted. Each generation has its own
            noise.
        given_seeds: seeds of each environment's first episodes, which replace the
            derived ones. Then the noise of an episode is derived from its seed, and the
            rollout may end when all these episodes have.
    """

    seed: int
    environments: range
    max_frames_per_traj: int | None = None
    episodes: tuple[int, ...] = ()
    generation: int = 0
    given_seeds: tuple[tuple[int, ...], ...] = ()


@dataclass
class _EpisodeProgress:
    """The state of one environment's running episode.

    Attributes:
        episode: number of the episode, -1 before the first.
        length: frames so far.
        returns: sums of rewards so far.
        actions: actions so far.
    """

    episode: int = -1
    length: int = 0
    returns: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    actions: ActionHistory = field(default_factory=lambda: ActionHistory({}))


def left_behind(
    states: Iterable[Mapping[str, Any]], running: Sequence[int]
) -> list[int]:
    """Return the environments that began a new episode instead of resuming.

    Args:
        states: state of each environment, from ``RunningEpisodes.state``.
        running: number of each environment's episode after loading the state.
    """
    return [
        k
        for k, (state, number) in enumerate(zip(states, running, strict=True))
        if state["begun"] and state["episode"] != number
    ]


@final
@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that is over but whose last frames are not in the slot yet.

    Attributes:
        k: index of its environment within the rollout.
        running: state of the episode before this slot.
        begin: its first frame in the slot.
        end: the frame after its last one.
    """

    k: int
    running: _EpisodeProgress
    begin: int
    end: int


@final
class RunningEpisodes:
    """Keeps the state of the running episodes of K environments."""

    def __init__(self, description: EnvDescription, plan: Plan) -> None:
        """Start without running episodes."""
        self._description = description
        self._actions = list(description.actions())
        self.plan = plan
        before = plan.episodes or (-1,) * len(plan.environments)
        self._running = [_EpisodeProgress(episode) for episode in before]
        self._begun = False

    @property
    def started(self) -> bool:
        """Whether every environment has an episode."""
        return self._begun

    def begin(self, indices: Sequence[int]) -> list[int]:
        """Start new episodes and return the seeds to reset with."""
        self._begun = True
        for k in indices:
            self._running[k] = _EpisodeProgress(self._running[k].episode + 1)
        return [self.seed(k) for k in indices]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of each environment's running episode."""
        return tuple(running.episode for running in self._running)

    @property
    def given_ended(self) -> bool:
        """Whether all episodes with given seeds have ended, if there are any."""
        given = self.plan.given_seeds
        return bool(given) and all(
            running.episode >= len(seeds)
            for running, seeds in zip(self._running, given, strict=True)
        )

    def seed(self, k: int) -> int:
        """Return the seed of environment k's running episode."""
        return self._seed(k, self._running[k].episode)

    def following_seeds(self, indices: Iterable[int]) -> list[int]:
        """Return the seeds that ``begin`` would return, without side effects."""
        return [self._seed(k, self._running[k].episode + 1) for k in indices]

    def _seed(self, k: int, episode: int) -> int:
        given = self.plan.given_seeds[k] if self.plan.given_seeds else ()
        if episode < len(given):
            return given[episode]
        return episode_seed(self.plan.seed, self.plan.environments[k], episode)

    def end(self, k: int, begin: int, end: int) -> EpisodeEnd:
        """Return the data of environment k's ended episode that ``sum_up`` needs.

        Args:
            k: the environment.
            begin: first frame of the episode in its last slot.
            end: the frame after its last one there.
        """
        return EpisodeEnd(k, self._running[k], begin, end)

    def sum_up(self, ended: EpisodeEnd, slot: Arrays) -> Episode:
        """Write the ids of an ended episode into ``slot`` and return its summary."""
        k, running, begin, end = ended.k, ended.running, ended.begin, ended.end
        self._stamp(k, running, slot, begin, end)
        returns = self._returns(k, running, slot, begin, end)
        return Episode(
            environment=self.plan.environments[k],
            length=running.length + end - begin,
            returns={name: tuple(total.tolist()) for name, total in returns.items()},
            policy_ids={
                name: tuple(slot[name, POLICY_ID][k, end - 1].tolist())
                for name in self._description.groups
                if (name, POLICY_ID) in slot
            },
        )

    def suspend(self, k: int, slot: Arrays, begin: int, end: int) -> None:
        """Write the ids of frames ``[begin, end)`` of an episode that continues."""
        running = self._running[k]
        self._stamp(k, running, slot, begin, end)
        running.returns = self._returns(k, running, slot, begin, end)
        running.length += end - begin
        if self._description.repeats and end > begin:
            taken = {key: slot[key][k, begin:end] for key in self._actions}
            running.actions.append(taken)

    def limit(self, k: int, frame: int) -> int:
        """Return the frame at which the trajectory that runs at ``frame`` is cut."""
        if self.plan.max_frames_per_traj is None:
            return NEVER
        return frame + self.plan.max_frames_per_traj - self._running[k].length - 1

    def state(self) -> list[dict[str, Any]]:
        """Return the state of each environment, for ``load``.

        Before the first frame no episode has begun. Then ``episode`` is the number of
        the last episode of the process that this one replaces, if any.
        """
        return [
            {
                "begun": self._begun,
                "episode": running.episode,
                "length": running.length,
                "returns": dict(running.returns),
                "actions": running.actions.so_far(),
            }
            for running in self._running
        ]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what ``state`` returned."""
        self._begun = all(state["begun"] for state in states)
        self._running = [
            _EpisodeProgress(
                episode=state["episode"],
                length=state["length"],
                returns=dict(state["returns"]),
                actions=ActionHistory(state["actions"]),
            )
            for state in states
        ]

    def running(self, k: int, frame: Arrays) -> RecordedEpisode | None:
        """Return the record from which environment k's episode can be replayed.

        None if its actions were discarded because they are too large.

        Args:
            k: the environment.
            frame: the last observation of the episode.
        """
        actions = self._running[k].actions.so_far()
        return (
            None if actions is None else RecordedEpisode(self.seed(k), actions, frame)
        )

    def _returns(
        self, k: int, running: _EpisodeProgress, slot: Arrays, begin: int, end: int
    ) -> dict[str, NDArray[np.float64]]:
        out: dict[str, NDArray[np.float64]] = {}
        for name in self._description.groups:
            rewards = slot["next", name, "reward"][k, begin:end, :, 0]
            total = np.add.reduce(rewards, 0, np.float64)
            before = running.returns.get(name)
            out[name] = total if before is None else total + before
        return out

    def _stamp(
        self, k: int, running: _EpisodeProgress, slot: Arrays, begin: int, end: int
    ) -> None:
        if TRAJ_IDS in slot:
            index = self.plan.environments[k]
            slot[TRAJ_IDS][k, begin:end] = (index << EPISODE_BITS) + running.episode
        if STEP_COUNT in slot:
            counts = running.length + np.arange(end - begin)
            slot[STEP_COUNT][k, begin:end, 0] = counts
            slot["next", *STEP_COUNT][k, begin:end, 0] = counts + 1
