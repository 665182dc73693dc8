"""Writes complete episodes only, back to back in batches ``[1, frames]``."""

from collections.abc import Sequence
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.buffers.layout import STEP_COUNT, TRAJ_IDS
from marl_collect.buffers.trajectories import TrajectoryAssembler
from marl_collect.core.closing import Closing
from marl_collect.core.signature import IS_INIT
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.writer import Writer

BATCH_FRAMES: Final = 2000
"""Default frames of a batch: large enough to write fast, small enough to lose."""


@final
class EpisodeWriter(Closing):
    """Joins the pieces of episodes across batches, and writes complete episodes.

    If ``episodes`` is given, every environment contributes its first ones, as many as
    the others, or one more if the number is not a multiple of the number of
    environments. Writing the episodes that end first overall would prefer short ones.
    Episodes that have not ended when the writer is closed are not written.
    """

    def __init__(
        self, writer: Writer, episodes: int | None = None, *, frames: int = BATCH_FRAMES
    ) -> None:
        """Prepare the writer.

        Args:
            writer: writes the batches; closed by ``close``.
            episodes: how many to write, at least 1; None for no limit.
            frames: write a batch when the complete episodes have at least this many.
        """
        if episodes is not None and episodes < 1:
            raise ValueError(f"episodes must be at least 1, but is {episodes}.")
        self._writer, self._wanted, self._frames = writer, episodes, frames
        self._assembler = TrajectoryAssembler(self._wants)
        self._waiting: list[TensorDictBase] = []
        self._missing: dict[int, float] = {}
        """How many more episodes each environment contributes."""

    def __repr__(self) -> str:
        return f"EpisodeWriter({self._writer!r}, episodes={self._wanted})"

    @property
    def complete(self) -> bool:
        """Whether every environment has contributed its episodes."""
        return bool(self._missing) and not any(self._missing.values())

    def add(self, batch: TensorDictBase) -> Sequence[EndedEpisode]:
        """Take the next batch ``[B, T]`` of a collector that yields all environments.

        Returns:
            The episodes written by this call.

        Raises:
            KeyError: if it has no ``("collector", "traj_ids")``.
        """
        if not self._missing:
            self._missing = self._shares(batch)
        self._assembler.add(batch)
        frames = self._assembler.take("cat")
        ids = frames.get(TRAJ_IDS).numpy()
        (first,) = (np.diff(ids, prepend=-1) != 0).nonzero()
        whole = np.ones(len(first), np.bool_)
        # A collector that has run before delivers the rest of an episode first.
        for key in (STEP_COUNT, IS_INIT):
            if (values := frames.get(key, None)) is not None:
                whole = (values[first] == (key == IS_INIT)).reshape(len(first)).numpy()
                break
        for at in whole.nonzero()[0].tolist():
            environment = int(ids[first[at]]) >> 32
            whole[at] = self._missing[environment] > 0
            self._missing[environment] -= bool(whole[at])
        if whole.any():
            frames_of_whole = whole.repeat(np.diff(first, append=len(ids)))
            self._waiting.append(frames[torch.from_numpy(frames_of_whole)])
        enough = sum(map(len, self._waiting)) >= self._frames
        return self._flush() if enough or self.complete else []

    def close(self) -> None:
        """Write the buffered complete episodes, and close the writer."""
        try:
            self._flush()
        finally:
            self._writer.close()

    def _shares(self, batch: TensorDictBase) -> dict[int, float]:
        """Return how many episodes each environment of a batch contributes."""
        ids = batch.get(TRAJ_IDS, None)
        if ids is None:
            raise KeyError(
                "The batch has no ('collector', 'traj_ids') to identify episodes: "
                "collect with track_traj_ids=True."
            )
        environments = sorted({int(i) >> 32 for i in ids[ids != -1].unique()})
        if self._wanted is None:
            return dict.fromkeys(environments, float("inf"))
        share, rest = divmod(self._wanted, len(environments))
        return {e: share + (k < rest) for k, e in enumerate(environments)}

    def _wants(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(ids >> 32, [k for k, n in self._missing.items() if n > 0])

    def _flush(self) -> Sequence[EndedEpisode]:
        if not self._waiting:
            return []
        batch = torch.cat(self._waiting, 0).unsqueeze(0)
        self._waiting = []
        return self._writer.add(batch)
