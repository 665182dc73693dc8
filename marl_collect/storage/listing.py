"""Where the complete episodes of a dataset are; reads no frames and needs no torch."""

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from marl_collect.buffers.layout import TRAJ_IDS
from marl_collect.core.description import Key
from marl_collect.core.seeding import episode_seeds
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.frames import StoredFrames
from marl_collect.storage.index import Index
from marl_collect.storage.spans import Spans


@final
@dataclass(frozen=True, eq=False)
class EpisodeList:
    """Complete episodes, in the order in which they ended.

    Attributes:
        frames: to read from.
        contents: description, runs and metadata of the dataset.
        table: environment, length, end and returns of each episode.
        spans: their frames.
        batches: ``[n]``, batch in which each ended.
    """

    frames: StoredFrames
    contents: Index
    table: EpisodeTable
    spans: Spans
    batches: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of episodes."""
        return len(self.batches)

    def take(self, chosen: NDArray[np.int64]) -> "EpisodeList":
        """Return some of the episodes, in this order."""
        return replace(
            self,
            table=self.table.take(chosen),
            spans=self.spans.take(chosen),
            batches=self.batches[chosen],
        )

    def first(self, key: Key) -> NDArray[Any]:
        """Return one key in the first frame of each episode, ``[n, ...]``.

        Raises:
            KeyError: if there is no such key.
        """
        begin = self.spans.begin[self.spans.first[:-1]]
        return self.frames.only(key).arrays(begin)[key]

    @property
    def runs(self) -> NDArray[np.int64]:
        """Index in ``contents.runs`` of the run that wrote each episode, ``[n]``."""
        return self.frames.runs[self.batches]

    @property
    def seeds(self) -> list[int | None]:
        """Seed that each episode was reset with; None if it is unknown.

        It follows from the run's seed and the trajectory's id.
        """
        seeds: list[int | None] = [None] * len(self)
        if not any(item.key == TRAJ_IDS for item in self.contents.keys):
            return seeds
        ids, runs = self.first(TRAJ_IDS), self.runs
        for run in np.unique(runs).tolist():
            seed = self.contents.runs[run].seed
            if seed is None:
                continue
            rows = np.flatnonzero(runs == run)
            numbers = episode_seeds(seed, ids[rows] >> 32, ids[rows] & 0xFFFFFFFF)
            for row, number in zip(rows.tolist(), numbers.tolist(), strict=True):
                seeds[row] = number
        return seeds
