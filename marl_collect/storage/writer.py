"""Adds batches to a dataset; complete batches stay readable after any crash.

A batch is appended to a data file and synced, then a line is appended to the journal
and synced. What a killed writer has appended without listing it is cut off by the next
one.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
from tensordict import TensorDictBase

from marl_collect.buffers.layout import FRAME_IDS
from marl_collect.core.closing import Closing
from marl_collect.core.description import Key
from marl_collect.core.tensordicts import flatten
from marl_collect.errors import ClosedError
from marl_collect.storage.appending import DatasetFiles, check_target
from marl_collect.storage.description import (
    DatasetDescription,
    Metadata,
    RunDescription,
)
from marl_collect.storage.encoding import choose_layout, encode
from marl_collect.storage.episodes import (
    EndedEpisode,
    EpisodeFinder,
    EpisodeTable,
    valid_frames,
)
from marl_collect.storage.index import (
    Index,
    KeyField,
    Totals,
    first_line,
    key_difference,
)
from marl_collect.storage.packed import COPY, Compression, check_compression


@final
class Writer(Closing):
    """Writes batches ``[B, T]`` to a new folder or a dataset of the same kind.

    A folder has one writer at a time. Trajectories continue across the batches of one
    writer, so add a collector's batches in their order.

    Example:
        >>> with Writer(path, DatasetDescription("task", description)) as writer:
        ...     for batch in collector:
        ...         writer.add(batch)

    Attributes:
        path: the folder, absolute.
    """

    def __init__(
        self,
        path: str | Path,
        description: DatasetDescription,
        run: RunDescription | None = None,
        *,
        metadata: Metadata | None = None,
        compression: Compression = "lz4",
    ) -> None:
        """Create the folder, or continue after an earlier writer.

        Args:
            path: a folder that is new, empty or holds a dataset.
            description: must equal that of an existing dataset.
            run: describes the batches of this writer.
            metadata: of the dataset; replaces what it has. None: as it is.
            compression: of large frames such as images, lossless. ``"zstd"`` makes
                smaller files than ``"lz4"`` and takes more time.

        Raises:
            FileExistsError: if the folder holds something else.
            ValueError: if there is no such compression, or the descriptions differ.
                The message names the first difference.
            BlockingIOError: if another writer has the folder open.
        """
        self._closed = True
        self._error: BaseException | None = None
        check_compression(compression)
        self._codec = COPY if compression == "none" else compression
        check_target(Path(path))
        self.path: Final = Path(path).absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._files = DatasetFiles(self.path, first_line(description))
        try:
            if metadata is not None and metadata != self._files.index.metadata:
                self._files.list_entry({"metadata": metadata.to_json()})
            self._files.list_entry({"run": (run or RunDescription()).to_json()})
        except BaseException:
            self._files.close()
            raise
        self._finder = EpisodeFinder()
        self._added = Totals()
        self._closed = False

    def __repr__(self) -> str:
        """Return the path, and whether it is closed."""
        return f"Writer({str(self.path)!r}{', closed' if self._closed else ''})"

    @property
    def contents(self) -> Index:
        """The content of the dataset on disk, including earlier runs."""
        return self._files.index

    @property
    def added(self) -> Totals:
        """Totals of the batches that this writer has added."""
        return self._added

    def add(self, batch: TensorDictBase) -> Sequence[EndedEpisode]:
        """Write a batch; when this returns, it is on disk.

        A batch that is refused with a ``ValueError`` changes nothing. After any other
        error the writer is closed, because later batches would lack a part of their
        episodes; the dataset has all batches that were added before.

        Returns:
            The episodes that ended in it.

        Raises:
            ValueError: if a key has another shape or dtype than in the dataset, the
                return of an episode is not finite, an episode continues in another
                row, or there are no frames. The message names the key or the episode.
            OSError: if the disk is full, or the dataset was removed.
            ClosedError: after ``close``, after an error, and in a fork of the process
                that opened this writer.
        """
        self._check_open()
        if not batch.batch_size.numel():
            raise ValueError(
                f"The batch has the shape {list(batch.shape)}, so it has no frames."
            )
        tensors = dict(sorted(flatten(batch).items()))
        tensors.pop(FRAME_IDS, None)  # Only restore_next needs them, which comes first.
        keys = _fields(tensors)
        self._check_keys(keys)
        finder = copy.deepcopy(self._finder)
        ended = finder.add(batch)
        _check_returns(ended)
        try:
            self._write(tensors, keys, valid_frames(batch), ended)
        except BaseException as error:
            self._error = error
            self._release()
            raise
        self._finder = finder
        return ended

    def _write(
        self,
        tensors: Mapping[Key, torch.Tensor],
        keys: Sequence[KeyField],
        valid: Sequence[int],
        ended: EpisodeTable,
    ) -> None:
        index = self._files.index
        if not index.keys:
            self._files.list_entry({"keys": [item.to_json() for item in keys]})
        layout = index.layouts[-1] if index.layouts else choose_layout(keys, tensors)
        encoded = encode(index, layout, tensors, valid, ended, self._codec)
        entry = self._files.add(*encoded)
        self._added = self._added.plus(entry, index.frame_bytes)

    def close(self) -> None:
        """Release the folder; may be called twice.

        A folder without any batch is removed. In a fork of the process that opened this
        writer, nothing happens.
        """
        if not self._closed:
            self._release()

    def _release(self) -> None:
        self._closed = True
        if self._files.owned and not self._files.index.batches:
            self._files.remove(self.path)
        self._files.close()

    def _check_open(self) -> None:
        if self._error is not None:
            raise ClosedError(
                "This writer is closed, because a batch could not be written: "
                f"{self._error}. The batches before it are in {self.path}. Open a new "
                "writer to add a run to it."
            ) from self._error
        if self._closed:
            raise ClosedError("This writer is closed: open a new one.")
        if not self._files.owned:
            raise ClosedError(
                f"The writer of {self.path} belongs to the process that opened it, and "
                "this process is a fork of that one. Write in the original process, or "
                "open a writer for another folder."
            )

    def _check_keys(self, keys: tuple[KeyField, ...]) -> None:
        index = self._files.index
        if not index.keys:
            return
        different = key_difference(index.keys, keys)
        if different is not None:
            key, expected, actual = different
            raise ValueError(
                f"The batch does not fit the dataset {self.path}: {key} is {actual}, "
                f"but in the dataset {expected}. Write to another folder."
            )


def _fields(tensors: Mapping[Key, torch.Tensor]) -> tuple[KeyField, ...]:
    return tuple(
        KeyField(key, tuple(t.shape[2:]), str(t.dtype).removeprefix("torch."))
        for key, t in tensors.items()
    )


def _check_returns(ended: EpisodeTable) -> None:
    for name, returns in ended.returns.items():
        for number, agent in np.argwhere(~np.isfinite(returns))[:1].tolist():
            episode = ended[number]
            raise ValueError(
                f"Agent {agent} of the group {name!r} has the return "
                f"{returns[number, agent]} in the episode that ends in row "
                f"{episode.environment}, frame {episode.frame} of the batch. Returns "
                "must be finite, so the batch was not written. Look for a reward that "
                "is NaN or infinite."
            )
