"""Adds batches to a folder of Parquet files; after ``add``, a batch is on disk."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from marl_collect.core.closing import Closing
from marl_collect.errors import ClosedError
from marl_collect.files.urls import local_folder
from marl_collect.storage import files
from marl_collect.storage.arrow import pa
from marl_collect.storage.columns import Column, Rows, described, rows_of, to_table
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.episodes import EndedEpisode, EpisodeTracker

_MOST_PARTS: Final = 256
"""Files of a run that wait to be joined."""
_SMALL_BYTES: Final = 2**24
"""Decoded size from which on a batch stays a file of its own."""
_JOINED_BYTES: Final = 2**26
"""Decoded size at which parts are joined: what joining holds in memory."""
_ABANDONED_SECONDS: Final = 86_400
"""Age at which a temporary file is no longer being written."""


@final
class Writer(Closing):
    """Writes the batches of one run, each as a file; joins small files.

    Any number of writers may share a folder. Trajectories continue across the batches
    of one writer, so add a collector's batches in their order.

    Attributes:
        path: the folder, absolute.
        description: of the dataset.
        run: name of the run.
        frames: how many are on disk.
    """

    def __init__(
        self,
        path: str | Path,
        description: DatasetDescription,
        run: RunDescription | None = None,
    ) -> None:
        """Create the folder, or open that of a dataset with an equal description.

        Raises:
            NotADirectoryError: if ``path`` is a file.
            FileExistsError: if the folder holds something else.
            ValueError: if ``path`` is a URL, or the folder has a dataset of another
                description; names the first difference.
        """
        self.path: Final = local_folder(path)
        existing, (self._columns, there) = files.settled(self._look)
        self.description: Final = description
        self.frames = 0
        self._about = {"description": description.to_json()}
        if existing:
            mine = self._about["description"]
            files.check_kind(self.path, there.get("description"), mine)
        self._about["run"] = (run or RunDescription()).to_json()
        self._is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self.run: Final = files.new_run(existing)
        self._clean()
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self._closed = False
        self._batches = 0
        self._parts: list[int] = []
        self._part_bytes = 0
        self._tracker = EpisodeTracker()

    def _look(
        self,
    ) -> tuple[list[files.BatchFile], tuple[tuple[Column, ...], dict[str, Any]]]:
        """Return the files of the folder, and what the first one says."""
        existing = files.check_target(self.path)
        return existing, files.read_about(existing[0].path) if existing else ((), {})

    def __repr__(self) -> str:
        return f"Writer({str(self.path)!r}{', closed' if self._closed else ''})"

    def add(self, batch: TensorDictBase, *, whole: bool = False) -> list[EndedEpisode]:
        """Write a batch; when this returns, it is on disk.

        A batch that is refused with a ``TypeError`` or a ``ValueError`` changes
        nothing. After any other error the writer is closed, because later batches would
        lack a part of their episodes; the dataset has all batches that were added
        before.

        Args:
            batch: ``[B, T]`` with ``("collector", "traj_ids")``.
            whole: whether all its episodes are known to be complete.

        Returns:
            The episodes that ended in it and whose beginning was seen.

        Raises:
            TypeError: if ``batch`` is not a TensorDict.
            ValueError: if keys, shapes or dtypes differ from those of the dataset, a
                trajectory continues after its end or begins again, a return is not
                finite, or there are no frames.
            OSError: if the disk is full; names the folder.
            ClosedError: after ``close``, after an error, and in a fork of the process
                that opened this writer.
        """
        if self._closed or os.getpid() != self._owner:
            why = "" if self._error is None else f" after an error, {self._error}"
            raise ClosedError(
                f"This writer of {self.path} is closed{why}, or belongs to the process "
                "that this one was forked from. What it has added is on disk. Open a "
                "new writer to add a run."
            ) from self._error
        rows = rows_of(batch)
        tracker = self._tracker.copy()
        frame_index, ended = tracker.add(rows, whole=whole)
        self.write(rows, frame_index)
        self._tracker = tracker
        return ended

    def write(self, rows: Rows, frame_index: NDArray[np.int32]) -> None:
        """Write frames, of which the number in their episode is known."""
        if self._columns:
            files.check_kind(self.path, described(self._columns), described(rows))
        table = to_table(rows, self.run, frame_index, self._about)
        try:
            is_small = table.nbytes < _SMALL_BYTES
            if not is_small:
                self._join()  # Parts of a joined file have consecutive numbers.
            name = files.file_name(self.run, self._batches, self._batches)
            files.write_table(table, name, self._folder, self.path)
            if is_small:
                self._parts.append(self._batches)
                self._part_bytes += table.nbytes
            self._batches += 1
            self.frames += len(table)
            self._columns = tuple(rows)
            if len(self._parts) >= _MOST_PARTS or self._part_bytes > _JOINED_BYTES:
                self._join()
        except BaseException as error:
            self._error = error
            self.close()
            raise

    def close(self) -> None:
        """Join the last files; may be called twice. In a fork nothing happens.

        A folder that this writer created, and that nobody wrote to, is removed.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        try:
            if self._error is None:
                self._join()
        finally:
            os.close(self._folder)
        if self._is_new and not self._batches:
            with suppress(OSError):  # Another writer uses it.
                self.path.rmdir()

    def _join(self) -> None:
        """Write the batches of small files as one file, then delete these."""
        parts, self._parts, self._part_bytes = self._parts, [], 0
        if len(parts) < 2:
            return
        names = [files.file_name(self.run, part, part) for part in parts]
        with files.naming_deleted(self.path):
            tables = []
            for name in names:
                with open(name, "rb", opener=files.inside(self._folder)) as file:
                    tables.append(files.read_table(file, self.path / name))
            table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
            # With the time of its last part, readers know that its frames are not new.
            joined = files.file_name(self.run, parts[0], parts[-1])
            files.write_table(table, joined, self._folder, self.path, like=names[-1])
        for name in names:
            files.remove(name, self._folder)

    def _clean(self) -> None:
        """Delete what killed writers left: parts that were joined, temporary files."""
        # One listing: another writer may add a file behind it.
        paths = set(self.path.glob(files.PATTERN))
        listed = {file.path for file in files.arranged(paths, self.path, check=False)}
        for path in paths - listed:
            path.unlink(missing_ok=True)
        for path in self.path.glob(".*.parquet.tmp"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
