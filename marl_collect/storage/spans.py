"""Locates and copies frames; a span is consecutive frames in one row of a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError, dtype_of
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.mapping import MappedBatches

Span = tuple[int, int, int, int]
"""Batch, row ``b``, first frame ``t``, and the frame after the last."""


def episode_spans(
    batches: MappedBatches, batch: int, episode: EndedEpisode
) -> tuple[Span, ...]:
    """Return the spans of an episode that ended in ``batch``, in order.

    Raises:
        DatasetError: if its first frames are missing.
    """
    row, end, missing = episode.environment, episode.frame + 1, episode.length
    entry = batches.index.batches[batch]
    spans: list[Span] = []
    while True:
        begin = max(0, end - missing)
        spans.append((batch, row, begin, end))
        missing -= end - begin
        if not missing:
            return tuple(reversed(spans))
        batch -= 1
        before = batches.index.batches[batch] if batch >= 0 else None
        if (
            before is None
            or before.run != entry.run
            or before.number != entry.number - 1
            or before.shape[0] <= row
        ):
            raise DatasetError(
                f"An episode of {episode.length} frames in {batches.name} began "
                f"{missing} frames before {entry.name}, but the batch before it is not "
                "listed in the index."
            )
        entry = before
        end = batches.valid_frames(batch)[row]


def all_spans(batches: MappedBatches) -> Iterable[Span]:
    """Yield the valid frames of every row of every batch."""
    for batch in range(len(batches.index.batches)):
        for row, frames in enumerate(batches.valid_frames(batch)):
            yield batch, row, 0, frames


@final
@dataclass(frozen=True)
class Frames:
    """The frames of spans, numbered from 0.

    Attributes:
        batch: ``[n]``, of each span.
        first: ``[n]``, position in the flattened batch of each span's first frame.
        starts: ``[n + 1]``, number of each span's first frame, and the total.
    """

    batch: NDArray[np.int64]
    first: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, batches: MappedBatches, spans: Sequence[Span]) -> Self:
        """Number the frames of ``spans``."""
        table = np.array(spans, np.int64).reshape(-1, 4)
        widths = np.array([e.shape[1] for e in batches.index.batches], np.int64)
        batch, row, begin, end = table.T
        first = row * widths[batch] + begin if len(table) else begin
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(end - begin)])
        return cls(batch, first, starts)

    def __len__(self) -> int:
        """Number of frames."""
        return int(self.starts[-1])

    def locate(
        self, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the batches of frames, and their positions in the flattened batch."""
        span = np.searchsorted(self.starts, numbers, side="right") - 1
        return self.batch[span], self.first[span] + numbers - self.starts[span]


def read_frames(
    batches: MappedBatches, frames: Frames, numbers: NDArray[np.int64]
) -> dict[Key, torch.Tensor]:
    """Copy single frames: each key ``[n, ...]``, in the order of ``numbers``."""
    batch, position = frames.locate(numbers)
    order = np.lexsort((position, batch))  # Reads each file once, front to back.
    out = _empty(batches, len(numbers))
    edges = np.flatnonzero(np.diff(batch[order])) + 1
    for chosen in np.split(order, edges) if len(order) else []:
        batches.read(int(batch[chosen[0]]), position[chosen], out, chosen)
    return out


def read_spans(
    batches: MappedBatches, places: Sequence[tuple[int, Span]], length: int
) -> dict[Key, torch.Tensor]:
    """Copy spans; frames that no span fills are zero.

    Args:
        batches: to read from.
        places: position of each span in the result, and the span.
        length: of the result.
    """
    out = _empty(batches, length)
    if sum(end - begin for _, (_, _, begin, end) in places) < length:
        for tensor in out.values():
            tensor.zero_()
    for at, (batch, row, begin, end) in places:
        first = row * batches.index.batches[batch].shape[1]
        batches.read_range(batch, first + begin, first + end, out, at)
    return out


def _empty(batches: MappedBatches, length: int) -> dict[Key, torch.Tensor]:
    return {
        field.key: torch.empty((length, *field.shape), dtype=dtype_of(field.dtype))
        for field in batches.keys
    }
