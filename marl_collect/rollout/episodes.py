"""Bookkeeping of running episodes: numbers, seeds, lengths, returns and actions.

The actions are kept so that an episode of an environment that repeats can be resumed
exactly, by replaying them from the episode's seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final, overload

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import LEVEL, STEP_COUNT, TRAJ_IDS
from marl_collect.core.description import EnvDescription, Key
from marl_collect.core.replay import EpisodeActions, SlotActions
from marl_collect.core.seeding import episode_seeds
from marl_collect.core.signature import POLICY_ID

Arrays = Mapping[Key, NDArray[Any]]
Curriculum = Callable[[int, int, int], Any]
"""Returns the task of an episode, given its seed, its number and the level."""
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
            derived ones. The noise of these episodes is derived from their seeds, and
            the rollout ends when all of them have, unless it replaces a lost one.
        curriculum: returns the task of each episode, if there are tasks.
        level: of the curriculum at the start.
    """

    seed: int
    environments: range
    max_frames_per_traj: int | None = None
    episodes: tuple[int, ...] = ()
    generation: int = 0
    given_seeds: tuple[tuple[int, ...], ...] = ()
    curriculum: Curriculum | None = None
    level: int = 0

    def with_seed(
        self, seed: int, given_seeds: tuple[tuple[int, ...], ...] = ()
    ) -> "Plan":
        """Return a plan of first episodes, as if no worker had ever been replaced."""
        return replace(
            self, seed=seed, episodes=(), generation=0, given_seeds=given_seeds
        )


@final
@dataclass(frozen=True)
class EndedEpisodes(Sequence[Episode]):
    """Episodes that ended, in arrays; an ``Episode`` is made when it is asked for.

    They are in the order of their last frames, and of their environments if these are
    equal.

    Attributes:
        ends: the frame of the slot after their last one, int64 ``[m]``.
        environments: int64 ``[m]``.
        lengths: int64 ``[m]``.
        returns: by group, float64 ``[m, n]``.
        policy_ids: by group, int64 ``[m, n]``; empty for a single policy.
    """

    ends: NDArray[np.int64]
    environments: NDArray[np.int64]
    lengths: NDArray[np.int64]
    returns: Mapping[str, NDArray[np.float64]]
    policy_ids: Mapping[str, NDArray[np.int64]]

    @classmethod
    def join(cls, parts: "Sequence[EndedEpisodes]") -> "EndedEpisodes":
        """Return the episodes of the parts of one slot; there is at least one part."""
        first = parts[0]
        if len(parts) == 1:
            return first
        all_parts = cls(**join_trees([vars(part) for part in parts]))
        return all_parts[np.argsort(all_parts.ends, kind="stable")]

    def __len__(self) -> int:
        return len(self.environments)

    @overload
    def __getitem__(self, index: int) -> Episode: ...

    @overload
    def __getitem__(self, index: slice | NDArray[np.int64]) -> "EndedEpisodes": ...

    def __getitem__(
        self, index: int | slice | NDArray[np.int64]
    ) -> "Episode | EndedEpisodes":
        if isinstance(index, slice | np.ndarray):
            return EndedEpisodes(**rows_of(vars(self), index))
        return Episode(
            environment=int(self.environments[index]),
            length=int(self.lengths[index]),
            returns={n: tuple(r[index].tolist()) for n, r in self.returns.items()},
            policy_ids={
                n: tuple(i[index].tolist()) for n, i in self.policy_ids.items()
            },
        )


def join_trees(trees: Sequence[Any]) -> Any:
    """Concatenate the arrays of equal trees, whose other leaves are None."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: join_trees([tree[key] for tree in trees]) for key in first}
    return None if first is None else np.concatenate(trees)


def rows_of(tree: Any, rows: slice | NDArray[np.int64]) -> Any:
    """Return some rows of all arrays of a tree."""
    if isinstance(tree, Mapping):
        return {key: rows_of(branch, rows) for key, branch in tree.items()}
    return None if tree is None else tree[rows]


def left_behind(environments: Mapping[str, Any], running: Sequence[int]) -> list[int]:
    """Return the environments that began a new episode instead of resuming.

    Args:
        environments: state of the environments, from ``RunningEpisodes.state``.
        running: number of each environment's episode after loading the state.
    """
    others = environments["episode"] != np.array(running)
    rows: list[int] = np.flatnonzero(environments["begun"] & others).tolist()
    return rows


_AHEAD = 32
"""Number of episodes of each environment whose seeds are computed together."""


@final
class RunningEpisodes:
    """Keeps the state of the running episodes of K environments.

    Attributes:
        levels: of the curriculum when each episode began, int64 ``[K]``.
        starts: first frame of each running episode in the current slot, int64 ``[K]``;
            0 if it began earlier.
        started: whether every environment has an episode.
    """

    def __init__(self, description: EnvDescription, plan: Plan) -> None:
        """Start without running episodes."""
        self._description = description
        self.plan = plan
        size = len(plan.environments)
        self._index = np.array(plan.environments, np.int64)
        self._given_counts = np.array([len(s) for s in plan.given_seeds], np.int64)
        most = max(self._given_counts, default=0)
        self._given_seeds = np.zeros((len(self._given_counts), most), np.int64)
        for row, seeds in zip(self._given_seeds, plan.given_seeds, strict=True):
            row[: len(seeds)] = seeds
        self._numbers = np.array(plan.episodes or (-1,) * size, np.int64)
        self._lengths = np.zeros(size, np.int64)
        self.levels = np.zeros(size, np.int64)
        self.starts = np.zeros(size, np.int64)
        self._returns = {
            name: np.zeros((size, group.n_agents))
            for name, group in description.groups.items()
        }
        self._actions = SlotActions(list(description.actions()), size)
        self.started = False
        # Of the current slot: the episodes that ended, and the state before it.
        self._ends: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
        self._before = self.state()
        self._seeds = np.zeros((size, 0), np.int64)
        self._first_seed = np.zeros(size, np.int64)

    @property
    def longest(self) -> int | None:
        """Frames of the longest running episode; None if none has begun."""
        return int(self._lengths.max()) if self.started else None

    def begin(self, rows: NDArray[np.int64], level: int) -> NDArray[np.int64]:
        """Start new episodes and return the seeds to reset with."""
        self.started = True
        self.levels[rows] = level
        self._numbers[rows] += 1
        self._lengths[rows] = 0
        for returns in self._returns.values():
            returns[rows] = 0
        self._actions.begin(rows)
        return self._seeds_of(rows, self._numbers[rows])

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of each environment's running episode."""
        return tuple(self._numbers.tolist())

    def are_last(self, rows: NDArray[np.int64]) -> bool:
        """Whether all episodes with given seeds have ended once those of ``rows`` have.

        False if there are no given seeds, and in a worker that was restarted: it plays
        further episodes in place of those that were lost.
        """
        counts = self._given_counts
        if not len(counts) or self.plan.episodes:
            return False
        ended = self._numbers.copy()
        ended[rows] += 1
        return bool((ended >= counts).all())

    def with_given_seeds(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of ``rows`` whose running episode has a given seed."""
        if not len(self._given_counts):
            return rows[:0]
        return rows[self._numbers[rows] < self._given_counts[rows]]

    def seeds(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the seeds of the running episodes of ``rows``."""
        return self._seeds_of(rows, self._numbers[rows])

    def numbers_for_tasks(
        self, rows: NDArray[np.int64], ahead: int
    ) -> NDArray[np.int64]:
        """Return the numbers of episodes, from 0: the running ones, or ``ahead``.

        With given seeds all are 0: numbers depend on how seeds are divided among
        environments, and those that have played theirs go on with further episodes.
        """
        numbers = self._numbers[rows] + ahead
        return numbers * 0 if len(self._given_counts) else numbers

    def following_seeds(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the seeds that ``begin`` would return, without side effects."""
        return self._seeds_of(rows, self._numbers[rows] + 1)

    def _seeds_of(
        self, rows: NDArray[np.int64], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        ahead = numbers - self._first_seed[rows]
        if (ahead < 0).any() or (ahead >= self._seeds.shape[1]).any():
            self._first_seed[...] = np.maximum(self._numbers, 0)
            episodes = self._first_seed[:, None] + np.arange(_AHEAD)
            self._seeds = episode_seeds(self.plan.seed, self._index[:, None], episodes)
            ahead = numbers - self._first_seed[rows]
        seeds: NDArray[np.int64] = self._seeds[rows, ahead]
        if len(self._given_seeds):
            has_seed = numbers < self._given_counts[rows]
            seeds[has_seed] = self._given_seeds[rows[has_seed], numbers[has_seed]]
        return seeds

    def enter(self) -> None:
        """Begin a slot."""
        self._ends, self._before = [], self.state()
        self.starts.fill(0)

    def end(self, rows: NDArray[np.int64], end: int) -> None:
        """Note that episodes of the slot ended, before the frame ``end``."""
        self._ends.append((rows, self.starts[rows], end))
        self.starts[rows] = end

    def leave(self, slot: Arrays, end: int) -> EndedEpisodes:
        """Write ids and counts of a complete slot; return the episodes that ended.

        Args:
            slot: ``[K, T, ...]`` per key.
            end: the frame after the last one.
        """
        joined = _joined(self._ends)
        self._stamp(slot, joined, end)
        ended = self._sum_up(slot, joined, end)
        self._lengths += end - self.starts
        if self._description.repeats and end:
            self._actions.append(slot, self.starts, end)
        return ended

    def limits(self) -> NDArray[np.int64]:
        """Return the frames of the slot at which trajectories are cut.

        An episode that is too long already, after a state of a collector with a higher
        limit was loaded, is cut in the first frame.
        """
        frames, limit = self.starts, self.plan.max_frames_per_traj
        assert limit is not None
        return np.maximum(frames, frames + (limit - 1) - self._lengths)

    def first_limit(self) -> int:
        """Return the first frame at which a trajectory is cut; ``NEVER`` if none is."""
        if self.plan.max_frames_per_traj is None:
            return NEVER
        return int(self.limits().min())

    def state(self) -> dict[str, Any]:
        """Return the state of the environments, for ``load``.

        Before the first frame no episode has begun. Then ``episode`` is the number of
        the last episode of the process that this one replaces, if any.

        Returns:
            ``begun``, bool ``[K]``; ``episode``, ``length`` and ``level``, int64
            ``[K]``; ``returns``, float64 ``[K, n]`` by group.
        """
        return {
            "begun": np.full(len(self._numbers), self.started),
            "episode": self._numbers.copy(),
            "length": self._lengths.copy(),
            "level": self.levels.copy(),
            "returns": {name: values.copy() for name, values in self._returns.items()},
        }

    def mark(self) -> SlotActions:
        """Return the actions of the running episodes; ``load`` takes them once cut."""
        return self._actions.mark()

    def load(self, state: Mapping[str, Any], actions: EpisodeActions) -> None:
        """Restore what ``state`` and ``mark`` returned."""
        self.started = bool(state["begun"].all())
        self._numbers[...] = state["episode"]
        self._lengths[...] = state["length"]
        self.levels[...] = state["level"]
        for name, values in state["returns"].items():
            self._returns[name][...] = values
        self._actions.load(actions)

    def _stamp(self, slot: Arrays, ended: "Joined", end: int) -> None:
        """Write trajectory ids and counts of frames."""
        if not end:
            return
        before, (rows, _, ends) = self._before, ended
        if len(rows) and ends[-1] == end:  # They are in order.
            within = ends < end
            rows, ends = rows[within], ends[within]
        if TRAJ_IDS in slot:
            ids = ((self._index << EPISODE_BITS) + before["episode"])[:, None]
            if len(rows):
                steps = np.zeros((len(ids), end), np.int64)
                steps[:, :1] = ids
                steps[rows, ends] += 1
                ids = np.add.accumulate(steps, 1, out=steps)
            slot[TRAJ_IDS][:, :end] = ids
        if LEVEL in slot:
            slot[LEVEL][:, :end] = before["level"][:, None]
            for row, first in zip(rows, ends, strict=True):
                # The level changes between slots only.
                slot[LEVEL][row, first:end] = self.levels[row]
        if STEP_COUNT in slot:
            first = -before["length"][:, None]
            if len(rows):
                starts = np.full((len(first), end), -NEVER)
                starts[:, :1] = first
                starts[rows, ends] = ends
                first = np.maximum.accumulate(starts, 1, out=starts)
            counts = (np.arange(end) - first)[..., None]
            slot[STEP_COUNT][:, :end] = counts
            slot["next", *STEP_COUNT][:, :end] = counts + 1

    def _sum_up(self, slot: Arrays, joined: "Joined", end: int) -> EndedEpisodes:
        """Sum rewards; return the episodes that ended."""
        rows, firsts, ends = joined
        returns: dict[str, NDArray[np.float64]] = {}
        for name, running in self._returns.items():
            rewards = slot["next", name, "reward"][..., 0]
            returns[name], rest = _sums(rewards, joined, self.starts, end)
            running += rest
        before, earlier = self._before, firsts == 0
        for name, total in returns.items():
            total[earlier] += before["returns"][name][rows[earlier]]
        return EndedEpisodes(
            ends=ends,
            environments=self._index[rows],
            lengths=ends - firsts + earlier * before["length"][rows],
            returns=returns,
            policy_ids=self._policy_ids(slot, joined),
        )

    def _policy_ids(self, slot: Arrays, ended: "Joined") -> dict[str, NDArray[Any]]:
        """Return the policies of the episodes that ended, by group."""
        rows, _, ends = ended
        return {
            name: slot[name, POLICY_ID][rows, ends - 1]
            for name in self._description.groups
            if (name, POLICY_ID) in slot
        }


_NONE = np.zeros(0, np.int64)
Joined = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Environments, first frames, and the frames after the last ones, of episodes."""


def _joined(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], int]],
) -> Joined:
    """Join episodes that ended in the same frames: rows, first frames, and the end."""
    if not parts:
        return _NONE, _NONE, _NONE
    rows, starts, ends = zip(*parts, strict=True)
    lasts = np.repeat(ends, list(map(len, rows)))
    return np.concatenate(rows), np.concatenate(starts), lasts


def _sums(
    rewards: NDArray[Any], ended: Joined, starts: NDArray[np.int64], end: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum the rewards ``[K, T, n]`` of a slot, in the order of its frames.

    Args:
        rewards: of the slot.
        ended: episodes that ended, in the order of their ends.
        starts: first frames of the running episodes.
        end: the frame after the last one.

    Returns:
        The sums of the episodes that ended, ``[m, n]``, and those of the running ones,
        ``[K, n]``.
    """
    size, _, n_agents = rewards.shape
    rows, firsts, lasts = ended
    rest = np.zeros((size, n_agents))
    total = np.zeros((len(rows), n_agents))
    if size + len(rows) > end:  # A loop over frames is shorter than one over episodes.
        frames = rewards.swapaxes(0, 1)
        borders = np.searchsorted(lasts, np.arange(1, end + 2)).tolist()
        for frame in range(end):
            rest += frames[frame].astype(np.float64)  # Faster than a mixed sum.
            first, last = borders[frame], borders[frame + 1]
            if first < last:
                over = rows[first:last]
                total[first:last] = rest[over]
                rest[over] = 0
        return total, rest

    def add(k: int, first: int, last: int, out: NDArray[np.float64]) -> None:
        if last > first:
            out[...] = np.add.accumulate(rewards[k, first:last], 0, np.float64)[-1]

    pieces = zip(rows.tolist(), firsts.tolist(), lasts.tolist(), total, strict=True)
    for k, first, last, out in pieces:
        add(k, first, last, out)
    for k, first in enumerate(starts.tolist()):
        add(k, first, end, rest[k])
    return total, rest
