"""Resumes a running episode by replaying its actions from its seed.

This works for every environment that repeats (``EnvDescription.repeats``). The last
frame of a replay is compared with the recorded one to detect environments that do not
repeat.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import Key, Row


@final
@dataclass(frozen=True)
class EpisodeActions:
    """The actions of m episodes, one episode after the other.

    Attributes:
        lengths: number of frames of each episode, int64 ``[m]``; -1 if its actions were
            discarded.
        arrays: ``[sum of frames, ...]`` per key.
    """

    lengths: NDArray[np.int64]
    arrays: Mapping[Key, NDArray[Any]]

    @classmethod
    def join(cls, parts: "Sequence[EpisodeActions]") -> "EpisodeActions":
        """Return the actions of all parts, in order."""
        return cls(
            np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)]),
            {
                key: np.concatenate([part.arrays[key] for part in parts if part.arrays])
                for key in {key: 0 for part in parts for key in part.arrays}
            },
        )

    @property
    def firsts(self) -> NDArray[np.int64]:
        """Position of each episode's first frame, int64 ``[m]``."""
        counts = np.maximum(self.lengths, 0)
        return counts.cumsum() - counts

    def take(self, rows: NDArray[np.int64]) -> "EpisodeActions":
        """Return the actions of the episodes ``rows``."""
        lengths = self.lengths[rows]
        frames = frames_of(self.firsts[rows], np.maximum(lengths, 0))
        arrays = {key: array[frames] for key, array in self.arrays.items()}
        return EpisodeActions(lengths, arrays)


def frames_of(
    firsts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the positions of all frames of some ranges, range by range.

    Args:
        firsts: first position of each range, int64 ``[m]``.
        lengths: number of its frames, int64 ``[m]``.
    """
    before = lengths.cumsum() - lengths
    frames = np.arange(lengths.sum(), dtype=np.int64)
    return frames + (firsts - before).repeat(lengths)


def replay(
    engine: EnvBatch,
    memory: Row,
    actions: EpisodeActions,
    seeds: NDArray[np.int64],
    frame: Mapping[Key, NDArray[Any]],
    *,
    reset: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    stepping: Callable[[], None] = lambda: None,
    calling: Callable[[int], None] = lambda _: None,
) -> NDArray[np.int64]:
    """Replay the running episodes of K environments at the same time.

    All replays end with the same step, so a shorter one begins later. Worlds of one
    simulator step from the beginning: until its replay begins, a world plays other
    episodes with legal actions.

    Args:
        engine: the environments.
        memory: memory that they are bound to, ``[K, ...]`` per key.
        actions: of each episode, since its reset.
        seeds: of the resets, int64 ``[K]``.
        frame: observations, masks and flags after the last actions, ``[K, ...]`` by key
            of ``EnvDescription.observed()``.
        reset: resets environments, by their indices and seeds; None for the engine's.
        stepping: called before each step.
        calling: called with the number of steps that are left, after the resets.

    Returns:
        The environments whose actions were discarded, or whose replay did not end at
        the recorded frame. Their state is undefined, and they need a reset.
    """
    rows = np.flatnonzero(actions.lengths >= 0)
    elsewhere = np.ones(engine.size, np.bool_)
    if not len(rows):
        return np.flatnonzero(elsewhere)
    engine.checks_actions = True
    playing = _Replay(engine, memory, actions, seeds, reset or engine.reset)
    try:
        for number in range(playing.length):
            playing.begin(number)
            calling(playing.length - number)
            if playing.act(number):
                stepping()
                playing.step(number)
        playing.begin(playing.length)
        calling(0)
    except Exception as error:
        error.add_note(
            "The error was raised while a recorded episode was replayed from its seed "
            f"and actions. {_ADVICE}"
        )
        raise
    elsewhere[rows] = playing.over | ~_arrived(memory, frame, rows)
    return np.flatnonzero(elsewhere)


@final
class _Replay:
    """Steps the environments whose replay has begun; of a simulator, all worlds.

    Attributes:
        length: number of steps of the longest episode.
        over: whether each episode ended before the record, bool ``[m]``.
    """

    def __init__(
        self,
        engine: EnvBatch,
        memory: Row,
        actions: EpisodeActions,
        seeds: NDArray[np.int64],
        reset: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._engine, self._memory, self._reset = engine, memory, reset
        self._actions, self._seeds = actions.arrays, seeds
        self._rows = np.flatnonzero(actions.lengths >= 0)
        lengths = actions.lengths[self._rows]
        self.length = int(lengths.max())
        self._starts = self.length - lengths
        # An action's position, less the number of its step.
        self._offsets = actions.firsts[self._rows] - self._starts
        self.over = np.zeros(len(lengths), np.bool_)
        self._going = self.over.copy()
        # Environments that begin an episode before the next step.
        self._begins = np.full(engine.size, engine.one_simulator)
        self._masked: list[Any] = []
        if engine.one_simulator:
            self._act_in_all_worlds()

    def _act_in_all_worlds(self) -> None:
        """Write legal actions, and note those that depend on an action mask."""
        from marl_collect.core.random_actions import samplers

        for sampler in samplers(self._engine.description):
            noise = np.full((self._engine.size, *sampler.noise_shape), 0.5)
            if sampler.mask_key is None:
                self._memory[sampler.key][...] = sampler.actions(noise)
            else:
                mask = self._memory[sampler.mask_key]
                self._masked.append((sampler, noise, mask))

    def begin(self, frame: int) -> None:
        """Reset the environments whose replay begins before step ``frame``.

        Worlds that ended and are not being replayed begin other episodes.
        """
        due = self._starts == frame
        self._begins[self._rows[due]] = True
        (rows,) = self._begins.nonzero()
        if len(rows):
            self._reset(rows.tolist(), self._seeds[rows].tolist())
            self._begins[rows] = False
        self._going |= due

    def act(self, frame: int) -> bool:
        """Write the actions of step ``frame``; return whether to make the step."""
        for sampler, noise, mask in self._masked:
            self._memory[sampler.key][...] = sampler.actions(noise, mask)
        rows = self._rows[self._going]
        positions = self._offsets[self._going] + frame
        for key, taken in self._actions.items():
            self._memory[key][rows] = taken.take(positions, 0)
        return self._engine.one_simulator or bool(len(rows))

    def step(self, frame: int) -> None:
        """Step, and note episodes that end too early."""
        rows = self._rows
        if self._engine.one_simulator:
            self._engine.step()
        else:
            self._engine.step_some(rows[self._going].tolist())
        ended = self._memory["done",][:, 0].astype(np.bool_)
        if frame + 1 < self.length:
            done = ended[rows]
            self.over |= done & self._going
            self._going &= ~done
        if self._engine.one_simulator:
            self._begins = ended
            self._begins[rows[self._going]] = False


def _arrived(
    memory: Row, frame: Mapping[Key, NDArray[Any]], rows: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whose observations equal the recorded ones, bool ``[m]``."""
    arrived = np.ones(len(rows), np.bool_)
    for key, recorded in frame.items():
        value, expected = memory[key][rows], recorded[rows]
        if value.shape != expected.shape:
            return np.zeros(len(rows), np.bool_)
        equal = value == expected
        if value.dtype.kind in "fc":
            equal |= np.isnan(value) & np.isnan(expected)
        arrived &= equal.reshape(len(rows), -1).all(1)
    return arrived


_ADVICE = (
    "If the environment draws from a generator that its reset(seed=...) does not seed, "
    "such as np.random, seed that generator in reset, or declare that episodes do not "
    "repeat: PettingZooWrapper(..., repeats=False), or EnvDescription(..., "
    "repeats=False)."
)

REPLAY_DIVERGED = (
    "An episode of {} was replayed from its seed and actions, but its observations "
    f"differ from the recorded ones, so a new episode begins instead. {_ADVICE}"
)
"""Warning after a replay that diverged; takes the environment's name."""

ACTIONS_DISCARDED = (
    "An episode of {} was so long that its actions were not kept, so a new episode "
    "begins instead. To make episodes resumable, limit their length, in a collector "
    "with max_frames_per_traj."
)
"""Warning about an episode without actions; takes the environment's name."""

MOST_BYTES = 64 * 2**20
"""Largest size of an episode's actions. Longer episodes cannot be resumed."""


@final
class SlotActions:
    """The actions of the running episodes of K environments, slot by slot.

    A slot's actions are copied for all environments together. What no running episode
    needs any more is dropped. Episodes whose actions exceed ``MOST_BYTES`` have none.
    """

    def __init__(self, actions: Sequence[Key], size: int) -> None:
        """Begin without frames.

        Args:
            actions: keys of the actions.
            size: K.
        """
        self._keys = list(actions)
        self._clock = 0
        # The frame in which each episode began; negative if its actions were discarded.
        self._starts = np.zeros(size, np.int64)
        self._blocks: list[_Block] = []
        self._held, self._allowed, self._nbytes = 0, 0, 0

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Forget the actions of environments whose episodes begin, between slots."""
        self._starts[rows] = self._clock

    def load(self, actions: EpisodeActions) -> None:
        """Continue the actions of all environments."""
        lengths, firsts = actions.lengths, actions.firsts
        self._clock = longest = max(0, int(lengths.max()))
        self._starts = np.where(lengths < 0, _DISCARDED, longest - lengths)
        # The earlier a block, the longer: no more than half of it is empty.
        self._blocks = []
        start = longest
        while start > 0:
            end, start = start, max(0, min(start - _SHORTEST, 2 * start - longest))
            (rows,) = (lengths > longest - end).nonzero()
            frames = np.arange(start, end)[:, None] - self._starts[rows]
            positions = np.where(frames < 0, 0, firsts[rows] + frames)
            arrays = {key: actions.arrays[key].take(positions, 0) for key in self._keys}
            self._blocks.insert(0, _Block(start, end, rows, arrays))
        self._held = sum(block.frames for block in self._blocks)

    def append(
        self,
        slot: Mapping[Key, NDArray[Any]],
        starts: NDArray[np.int64],
        end: int,
    ) -> None:
        """Append the frames of a slot.

        Args:
            slot: ``[K, T, ...]`` per key.
            starts: first frame of each running episode in the slot; 0 if it began
                earlier.
            end: the frame after the last one.
        """
        if starts.any():
            (began,) = starts.nonzero()
            self._starts[began] = self._clock + starts[began]
        frames = {
            key: slot[key][:, :end].swapaxes(0, 1).copy("C") for key in self._keys
        }
        self._blocks.append(_Block(self._clock, self._clock + end, None, frames))
        self._clock += end
        self._held += end * len(starts)
        if self._held > self._allowed:
            self._discard(end * len(starts))

    def mark(self) -> "SlotActions":
        """Return the actions as they are now, without copying them."""
        mark = copy.copy(self)
        vars(mark).update(_starts=self._starts.copy(), _blocks=[*self._blocks])
        return mark

    def cut(self) -> EpisodeActions:
        """Return the actions of the running episodes, in one array per key."""
        lengths = np.where(self._starts < 0, -1, self._clock - self._starts)
        lengths[lengths * self._nbytes > MOST_BYTES] = -1
        if not self._blocks:
            return EpisodeActions(lengths, {})
        total = int(np.maximum(lengths, 0).sum())
        arrays = {
            key: np.empty((total, *array.shape[2:]), array.dtype)
            for key, array in self._blocks[-1].arrays.items()
        }
        actions = EpisodeActions(lengths, arrays)
        begins = actions.firsts
        for block in self._blocks:
            rows = np.arange(len(lengths)) if block.rows is None else block.rows
            starts, width = self._starts[rows], len(rows)
            firsts = np.maximum(starts, block.start)
            counts = (block.end - firsts).clip(0) * (lengths[rows] >= 0)
            targets = frames_of(begins[rows] + firsts - starts, counts)
            sources = frames_of(firsts - block.start, counts) * width
            sources += np.arange(width).repeat(counts)
            for key, array in block.arrays.items():
                frames = array.reshape(-1, *array.shape[2:])
                arrays[key][targets] = frames.take(sources, 0)
        return actions

    def _discard(self, latest: int) -> None:
        """Discard what is too long, or needed by no running episode.

        Args:
            latest: number of frames of the latest slot, over all environments.
        """
        self._nbytes = sum(a[0, 0].nbytes for a in self._blocks[-1].arrays.values())
        long = (self._clock - self._starts) * self._nbytes > MOST_BYTES
        self._starts[long] = _DISCARDED
        running = self._starts >= 0
        first = int(self._starts[running].min()) if running.any() else self._clock
        self._blocks = [block for block in self._blocks if block.end > first]
        needed = int((self._clock - self._starts[running]).sum())
        if sum(block.frames for block in self._blocks) > 2 * needed:
            self._blocks = [block.without(self._starts) for block in self._blocks]
        self._held = sum(block.frames for block in self._blocks)
        self._allowed = 2 * needed + _SLOTS * latest


_SLOTS = 8
"""Number of slots after which it is worth to look for actions that nobody needs."""
_SHORTEST = 64
"""Number of frames of the newest block of loaded actions."""
_DISCARDED = -1


@final
@dataclass(frozen=True)
class _Block:
    """The actions of some frames, such as those of a slot.

    Attributes:
        start: its first frame.
        end: the frame after its last one.
        rows: the environments in it, sorted; None for all.
        arrays: ``[frames, rows, ...]`` per key.
    """

    start: int
    end: int
    rows: NDArray[np.int64] | None
    arrays: Mapping[Key, NDArray[Any]]

    @property
    def frames(self) -> int:
        """Number of frames, over all of its environments."""
        array = next(iter(self.arrays.values()))
        return array.shape[0] * array.shape[1]

    def without(self, starts: NDArray[np.int64]) -> "_Block":
        """Return the block without environments whose episodes begin later."""
        needed = (starts >= 0) & (starts < self.end)
        if self.rows is None:
            rows = columns = np.flatnonzero(needed)
        else:
            columns = np.flatnonzero(needed[self.rows])
            rows = self.rows[columns]
        arrays = {key: array[:, columns] for key, array in self.arrays.items()}
        return _Block(self.start, self.end, rows, arrays)
