"""Resumes a running episode by replaying its actions from its seed.

This works for every environment that repeats (``EnvDescription.repeats``). The last
frame of a replay is compared with the recorded one to detect environments that do not
repeat.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import Key, Row


@dataclass(frozen=True)
class RecordedEpisode:
    """The data from which a running episode is replayed.

    Attributes:
        seed: seed of the reset.
        actions: actions taken since the reset, ``[frames, ...]`` per key.
        frame: observations, masks and flags after the last action, by key of
            ``EnvDescription.observed()``.
    """

    seed: int
    actions: Mapping[Key, NDArray[Any]]
    frame: Mapping[Key, NDArray[Any]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Number of frames of the episode."""
        return max((len(taken) for taken in self.actions.values()), default=0)


def replay(
    engine: EnvBatch,
    memory: Row,
    episodes: Mapping[int, RecordedEpisode],
    *,
    reset: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    stepping: Callable[[], None] = lambda: None,
) -> list[int]:
    """Replay the episodes of several environments at the same time.

    All replays end with the same step, so a shorter one begins later. Worlds of one
    simulator step from the beginning: until its replay begins, a world plays other
    episodes with legal actions.

    Args:
        engine: the environments.
        memory: memory that they are bound to, ``[size, ...]`` per key.
        episodes: recorded episodes, by index of the environment.
        reset: resets environments, by their indices and seeds; None for the engine's.
        stepping: called before each step.

    Returns:
        The environments whose replay did not end at the recorded frame. Their state is
        undefined, and they need a reset.
    """
    if not episodes:
        return []
    kind = _WorldReplay if engine.one_simulator else _Replay
    playing = kind(engine, memory, episodes, reset or engine.reset)
    try:
        for frame in range(playing.length):
            playing.begin(frame)
            if playing.act(frame):
                stepping()
                playing.step(frame)
        playing.begin(playing.length)
    except Exception as error:
        error.add_note(
            "The error was raised while a recorded episode was replayed from its seed "
            f"and actions. {_ADVICE}"
        )
        raise
    return [
        k
        for k, episode in episodes.items()
        if k in playing.over or not _arrived(memory, k, episode.frame)
    ]


class _Replay:
    """Steps the environments whose replay has begun.

    Attributes:
        length: number of steps of the longest episode.
        over: environments whose episodes ended before the record.
    """

    def __init__(
        self,
        engine: EnvBatch,
        memory: Row,
        episodes: Mapping[int, RecordedEpisode],
        reset: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        self._engine, self._memory, self._reset = engine, memory, reset
        self._episodes = episodes
        self.length = max(episode.length for episode in episodes.values())
        self._begins = {k: self.length - e.length for k, e in episodes.items()}
        self._going: list[int] = []
        self.over: set[int] = set()

    def begin(self, frame: int) -> None:
        """Reset the environments whose replay begins before step ``frame``."""
        due = [k for k, begin in self._begins.items() if begin == frame]
        if due:
            self._reset(due, [self._episodes[k].seed for k in due])
        self._going += due

    def act(self, frame: int) -> bool:
        """Write the actions of step ``frame``; return whether to make the step."""
        for k in self._going:
            for key, taken in self._episodes[k].actions.items():
                self._memory[key][k] = taken[frame - self._begins[k]]
        return bool(self._going)

    def step(self, frame: int) -> None:
        """Step, and note episodes that end too early."""
        self._engine.step_some(self._going)
        self._find_ends(frame)

    def _find_ends(self, frame: int) -> None:
        if frame + 1 < self.length:
            done = self._memory["done",]
            self.over.update(k for k in self._going if done[k, 0])
            self._going = [k for k in self._going if k not in self.over]


@final
class _WorldReplay(_Replay):
    """Steps all worlds of a simulator, also those whose replay has not begun."""

    def __init__(
        self,
        engine: EnvBatch,
        memory: Row,
        episodes: Mapping[int, RecordedEpisode],
        reset: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        from marl_collect.core.random_actions import samplers

        super().__init__(engine, memory, episodes, reset)
        self._seeds = [
            episodes[k].seed if k in episodes else 0 for k in range(engine.size)
        ]
        self._samplers = [
            (sampler, np.full((engine.size, *sampler.noise_shape), 0.5))
            for sampler in samplers(engine.description)
        ]
        engine.reset(range(engine.size), self._seeds)

    def act(self, frame: int) -> bool:
        """Write the actions of step ``frame``, and legal ones in other worlds."""
        for sampler, noise in self._samplers:
            mask = None if sampler.mask_key is None else self._memory[sampler.mask_key]
            self._memory[sampler.key][...] = sampler.actions(noise, mask)
        super().act(frame)
        return True

    def step(self, frame: int) -> None:
        """Step, and begin anew in worlds that ended and are not being replayed."""
        self._engine.step()
        self._find_ends(frame)
        ended = self._memory["done",][:, 0].astype(np.bool_)
        ended[self._going] = False
        again = np.flatnonzero(ended).tolist()
        if again:
            self._engine.reset(again, [self._seeds[k] for k in again])


def _arrived(memory: Row, k: int, frame: Mapping[Key, NDArray[Any]]) -> bool:
    """Whether the observation of environment ``k`` equals ``frame``."""
    return all(
        np.array_equal(memory[key][k], value, equal_nan=value.dtype.kind in "fc")
        for key, value in frame.items()
    )


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
class ActionHistory:
    """The actions of a running episode, in memory that grows by doubling.

    Entries are written once and never changed, so the views that ``so_far`` returns
    stay valid and need no copy. If the actions exceed ``MOST_BYTES``, they are
    discarded.
    """

    def __init__(self, actions: Mapping[Key, NDArray[Any]] | None) -> None:
        """Begin with ``actions``, ``[frames, ...]`` per key; None if discarded."""
        self._arrays: dict[Key, NDArray[Any]] | None = None
        self._length = 0
        if actions is not None:
            self._arrays = dict(actions)
            self._length = len(next(iter(actions.values()), ()))

    def append(self, pieces: Mapping[Key, NDArray[Any]]) -> None:
        """Append the actions of some frames, ``[frames, ...]`` per key."""
        if self._arrays is None:
            return
        begin = self._length
        self._length = end = begin + len(next(iter(pieces.values()), ()))
        for key, piece in pieces.items():
            array = self._arrays.get(key)
            if array is None or end > len(array):
                grown = np.empty((max(end, 2 * begin), *piece.shape[1:]), piece.dtype)
                if array is not None:
                    grown[:begin] = array[:begin]
                array = self._arrays[key] = grown
            array[begin:end] = piece
        if sum(array[:end].nbytes for array in self._arrays.values()) > MOST_BYTES:
            self._arrays = None

    def so_far(self) -> dict[Key, NDArray[Any]] | None:
        """Return all actions, ``[frames, ...]`` per key; None if discarded."""
        if self._arrays is None:
            return None
        return {key: array[: self._length] for key, array in self._arrays.items()}


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
        self._begins = np.zeros(size, np.int64)
        self._blocks: list[_Block] = []
        self._held, self._allowed, self._nbytes = 0, 0, 0
        # Actions before the first block, of environments that were loaded.
        self._before: dict[int, Mapping[Key, NDArray[Any]] | None] = {}

    def begin(self, rows: NDArray[np.int64]) -> None:
        """Forget the actions of environments whose episodes begin, between slots."""
        self._begins[rows] = self._clock
        if self._before:
            for k in rows.tolist():
                self._before.pop(k, None)

    def load(self, k: int, actions: Mapping[Key, NDArray[Any]] | None) -> None:
        """Continue environment k's actions; None if they were discarded."""
        self._begins[k] = self._clock
        self._before[k] = actions

    def append(
        self,
        slot: Mapping[Key, NDArray[Any]],
        begins: NDArray[np.int64],
        end: int,
    ) -> None:
        """Append the frames of a slot.

        Args:
            slot: ``[K, T, ...]`` per key.
            begins: first frame of each running episode in the slot; 0 if it began
                earlier.
            end: the frame after the last one.
        """
        if begins.any():
            (began,) = begins.nonzero()
            self.begin(began)
            self._begins[began] += begins[began]
        frames = {
            key: slot[key][:, :end].swapaxes(0, 1).copy("C") for key in self._keys
        }
        self._blocks.append(_Block(self._clock, self._clock + end, None, frames))
        self._clock += end
        self._held += end * len(begins)
        if self._held > self._allowed:
            self._discard(end * len(begins))

    def of(self, k: int) -> dict[Key, NDArray[Any]] | None:
        """Return environment k's actions, ``[frames, ...]``; None if discarded."""
        before = self._before.get(k, {})
        begin = int(self._begins[k])
        if before is None or begin < 0:
            return None
        length = self._clock - begin + len(next(iter(before.values()), ()))
        if length * self._nbytes > MOST_BYTES:
            return None
        pieces = [before] if before else []
        pieces += [block.of(k, begin) for block in self._blocks if block.end > begin]
        if len(pieces) == 1:
            return {key: np.ascontiguousarray(pieces[0][key]) for key in self._keys}
        if not pieces:
            none = self._blocks[-1].arrays if self._blocks else {}
            return {key: array[:0, 0] for key, array in none.items()}
        return {
            key: np.concatenate([piece[key] for piece in pieces]) for key in self._keys
        }

    def _too_long(self) -> NDArray[np.bool_]:
        """Return whose actions exceed ``MOST_BYTES``."""
        lengths = self._clock - self._begins
        for k, actions in self._before.items():
            lengths[k] += len(next(iter((actions or {}).values()), ()))
        return lengths * self._nbytes > MOST_BYTES

    def _discard(self, latest: int) -> None:
        """Discard what is too long, or needed by no running episode.

        Args:
            latest: number of frames of the latest slot, over all environments.
        """
        self._nbytes = sum(a[0, 0].nbytes for a in self._blocks[-1].arrays.values())
        long = np.flatnonzero(self._too_long() & (self._begins >= 0))
        self._begins[long] = _DISCARDED
        for k in long.tolist():
            self._before.pop(k, None)
        kept = self._begins >= 0
        first = int(self._begins[kept].min()) if kept.any() else self._clock
        self._blocks = [block for block in self._blocks if block.end > first]
        needed = int((self._clock - self._begins[kept]).sum())
        if sum(block.frames for block in self._blocks) > 2 * needed:
            self._blocks = [block.without(self._begins) for block in self._blocks]
        self._held = sum(block.frames for block in self._blocks)
        self._allowed = 2 * needed + _SLOTS * latest


_SLOTS = 8
"""Number of slots after which it is worth to look for actions that nobody needs."""
_DISCARDED = -1


@final
@dataclass(frozen=True)
class _Block:
    """The actions of one slot.

    Attributes:
        begin: its first frame.
        end: the frame after its last one.
        rows: the environments in it, sorted; None for all.
        arrays: ``[frames, rows, ...]`` per key.
    """

    begin: int
    end: int
    rows: NDArray[np.int64] | None
    arrays: Mapping[Key, NDArray[Any]]

    @property
    def frames(self) -> int:
        """Number of frames, over all of its environments."""
        array = next(iter(self.arrays.values()))
        return array.shape[0] * array.shape[1]

    def of(self, k: int, begin: int) -> dict[Key, NDArray[Any]]:
        """Return the actions of environment k from frame ``begin`` on."""
        column = k if self.rows is None else int(np.searchsorted(self.rows, k))
        first = max(0, begin - self.begin)
        return {key: array[first:, column] for key, array in self.arrays.items()}

    def without(self, begins: NDArray[np.int64]) -> "_Block":
        """Return the block without environments whose episodes begin later."""
        needed = (begins >= 0) & (begins < self.end)
        if self.rows is None:
            rows = columns = np.flatnonzero(needed)
        else:
            columns = np.flatnonzero(needed[self.rows])
            rows = self.rows[columns]
        arrays = {key: array[:, columns] for key, array in self.arrays.items()}
        return _Block(self.begin, self.end, rows, arrays)


@final
class ActionRecorder:
    """Records the actions of the running episodes of K environments."""

    def __init__(self, memory: Row, actions: Iterable[Key]) -> None:
        """Read actions from ``memory``, ``[K, ...]`` per key of ``actions``."""
        self._sources = {key: memory[key] for key in actions}
        size = len(next(iter(memory.values())))
        self._taken = [self._none() for _ in range(size)]

    def begin(self, indices: Iterable[int]) -> None:
        """Clear the actions of the environments whose episodes begin."""
        for k in indices:
            self._taken[k] = self._none()

    def step(self, indices: Iterable[int]) -> None:
        """Record the actions that are in the memory now."""
        for k in indices:
            frame = {key: array[k : k + 1] for key, array in self._sources.items()}
            self._taken[k].append(frame)

    def actions(self, k: int) -> dict[Key, NDArray[Any]] | None:
        """Return environment k's actions, ``[frames, ...]``; None if discarded."""
        return self._taken[k].so_far()

    def load(self, k: int, actions: Mapping[Key, NDArray[Any]]) -> None:
        """Continue environment k's history from ``actions``."""
        self._taken[k] = ActionHistory(actions)

    def _none(self) -> ActionHistory:
        empty = {key: array[:0] for key, array in self._sources.items()}
        return ActionHistory(empty)
