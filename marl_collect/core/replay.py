"""Going on with an episode: begin it again with its seed, take its actions again.

Works for every environment that repeats (``EnvDescription.repeats``), and needs
nothing of it but the contract. Whether it did repeat is seen from the frame that it
arrives at, which is compared with the recorded one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.core.batch import EnvBatch
from marl_collect.core.description import Key, Row


@dataclass(frozen=True)
class RecordedEpisode:
    """All that determines where an episode has come to.

    Attributes:
        seed: it was reset with.
        actions: those taken since, ``[frames, ...]`` per key.
        frame: what was observed after the last of them, by key of
            ``EnvDescription.observed()``: observations, masks, flags.
    """

    seed: int
    actions: Mapping[Key, NDArray[Any]]
    frame: Mapping[Key, NDArray[Any]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many frames the episode has."""
        return max((len(taken) for taken in self.actions.values()), default=0)


def replay(
    engine: EnvBatch, memory: Row, episodes: Mapping[int, RecordedEpisode]
) -> list[int]:
    """Bring environments to where their episodes have come to, all at once.

    Args:
        engine: the environments.
        memory: they are bound to, ``[size, ...]`` per key.
        episodes: of the environments that are meant, by index.

    Returns:
        The environments that did not arrive at the recorded frame. They are in some
        other state, and need a reset.
    """
    engine.reset(list(episodes), [episode.seed for episode in episodes.values()])
    longest = max((episode.length for episode in episodes.values()), default=0)
    over: set[int] = set()
    try:
        for frame in range(longest):
            going = [
                k
                for k, episode in episodes.items()
                if frame < episode.length and k not in over
            ]
            for k in going:
                for key, taken in episodes[k].actions.items():
                    memory[key][k] = taken[frame]
            if going:
                engine.step(going)
            over.update(
                k
                for k in going
                if memory["done",][k, 0] and frame + 1 < episodes[k].length
            )
    except Exception as error:
        error.add_note(
            "This was while a recorded episode was replayed from its seed and actions. "
            f"{_ADVICE}"
        )
        raise
    return [
        k
        for k, episode in episodes.items()
        if k in over or not _arrived(memory, k, episode.frame)
    ]


def _arrived(memory: Row, k: int, frame: Mapping[Key, NDArray[Any]]) -> bool:
    """Whether environment ``k`` observes what stands in ``frame``."""
    return all(
        np.array_equal(memory[key][k], value, equal_nan=value.dtype.kind in "fc")
        for key, value in frame.items()
    )


_ADVICE = (
    "If the environment draws from a generator that its reset(seed=...) does not seed, "
    "such as np.random, seed that, or say that it does not repeat: "
    "PettingZooWrapper(..., repeats=False), or EnvDescription(..., repeats=False)."
)

REPLAY_DIVERGED = (
    "An episode of {} was replayed from its seed and actions, and arrived at other "
    f"observations than those recorded, so a new one begins instead. {_ADVICE}"
)
"""What the user is told then; the name is to be filled in."""

ACTIONS_DISCARDED = (
    "An episode of {} had gone on for so long that its actions were not kept, so a new "
    "one begins instead. Reset it now and then, in a collector with "
    "max_frames_per_traj, to have episodes taken up where they were."
)
"""What the user is told then; the name is to be filled in."""

MOST_BYTES = 64 * 2**20
"""Of an episode's actions that are kept: beyond them it cannot be taken up again."""


@final
class ActionHistory:
    """An episode's actions so far, in memory that grows by doubling.

    What was once written is never written again, so that whoever keeps what `so_far`
    returned keeps what the episode was then, at no cost however long it is. Those of
    an episode that goes on and on are forgotten when they become too many.
    """

    def __init__(self, actions: Mapping[Key, NDArray[Any]] | None) -> None:
        """Begin with ``actions``, ``[frames, ...]`` per key; None if forgotten."""
        self._arrays: dict[Key, NDArray[Any]] | None = None
        self._length = 0
        if actions is not None:
            self._arrays = dict(actions)
            self._length = len(next(iter(actions.values()), ()))

    def append(self, pieces: Mapping[Key, NDArray[Any]]) -> None:
        """Add the actions of some frames more, ``[frames, ...]`` per key."""
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
        """Return all actions, ``[frames, ...]`` per key; None if they are forgotten."""
        if self._arrays is None:
            return None
        return {key: array[: self._length] for key, array in self._arrays.items()}


@final
class ActionRecorder:
    """Keeps the actions of the running episodes of K environments."""

    def __init__(self, memory: Row, actions: Iterable[Key]) -> None:
        """Read actions from ``memory``, ``[K, ...]`` per key of ``actions``."""
        self._sources = {key: memory[key] for key in actions}
        size = len(next(iter(memory.values())))
        self._taken = [self._none() for _ in range(size)]

    def begin(self, indices: Iterable[int]) -> None:
        """Forget the episodes before, as others begin in ``indices``."""
        for k in indices:
            self._taken[k] = self._none()

    def step(self, indices: Iterable[int]) -> None:
        """Keep the actions that stand in the memory now."""
        for k in indices:
            frame = {key: array[k : k + 1] for key, array in self._sources.items()}
            self._taken[k].append(frame)

    def actions(self, k: int) -> dict[Key, NDArray[Any]] | None:
        """Return environment k's actions, ``[frames, ...]``; None if forgotten."""
        return self._taken[k].so_far()

    def load(self, k: int, actions: Mapping[Key, NDArray[Any]]) -> None:
        """Take what `actions` returned for environment k."""
        self._taken[k] = ActionHistory(actions)

    def _none(self) -> ActionHistory:
        empty = {key: array[:0] for key, array in self._sources.items()}
        return ActionHistory(empty)
