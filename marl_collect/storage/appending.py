"""Appends to the files of a dataset, so that a crash loses nothing that was listed."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

from marl_collect.core.closing import Closing
from marl_collect.files.atomic import named_if_full
from marl_collect.files.locks import LOCK, FolderLock
from marl_collect.storage.checks import Folder
from marl_collect.storage.files import begin_sync
from marl_collect.storage.frames import segment_name
from marl_collect.storage.index import (
    JOURNAL,
    BatchEntry,
    Index,
    Layout,
    journal_line,
)
from marl_collect.storage.remote import check_local

SEGMENT: Final = 2**30
"""Bytes of a data file from which on the next batch begins a new one. Object stores
upload a file as a whole."""
_WRITE_BACK: Final = 2**22
"""Bytes that the disk begins to write while the next ones are read and checked. Linux
alone would begin after seconds, or with the sync, which then waits for all of them."""


@final
class DatasetFiles(Closing):
    """The journal and the data files of a folder, which no other process writes to.

    Attributes:
        index: what is listed.
    """

    def __init__(self, path: Path, first: bytes, *, durable: bool = True) -> None:
        """Begin a dataset in a folder, or continue the one that is there.

        What was not written completely is cut off.

        Args:
            path: of the folder.
            first: the first line of the journal, which describes the dataset.
            durable: whether what was listed is on disk when a method returns.

        Raises:
            ValueError: if the dataset that is there has another description. The
                message names the first difference.
            BlockingIOError: if this or another process writes to the folder.
        """
        self._path = path
        self._durable = durable
        self._folder = self._journal = self._data = self._segment = -1
        self._end = 0
        self._begun = 0  # The disk writes the data file up to here.
        self._unsynced = False
        self._last_layout: tuple[Layout | None, int] = None, 0
        self._lock = FolderLock(path / LOCK)
        try:
            # Files are opened relative to the folder, which may be moved meanwhile.
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            self.index = Index.parse(first)
            stored = _load(path, self.index)
            self._journal = self._open(JOURNAL, stored.size if stored else 0)
            if stored is None:
                with named_if_full(path / JOURNAL):
                    _write_all(self._journal, [first])
                    self._sync(self._journal)
                    self._sync_names()
            elif stored.batches:
                last = stored.batches[-1]
                self._open_segment(last.segment, last.end)
            self.index = stored or self.index
        except BaseException:
            self.close()
            raise

    @property
    def owned(self) -> bool:
        """Whether this process may write: False after ``close`` and in a fork."""
        return self._lock.held

    def write(self, segment: int, parts: Sequence[Any]) -> int:
        """Append bytes to a data file, and return their number.

        Args:
            segment: number of the last file, or the next number for a new file.
            parts: the bytes.

        Raises:
            OSError: if the disk is full, or the files were removed; names the file.
        """
        if segment != self._segment:
            self._sync_data()
            self._open_segment(segment, 0)
            self._sync_names()
        for descriptor in (self._data, self._journal):
            if not os.fstat(descriptor).st_nlink:
                raise FileNotFoundError(
                    errno.ENOENT, "The dataset was removed while a writer had it open"
                )
        self._unsynced = True
        with named_if_full(self._path / segment_name(segment)):
            written = _write_all(self._data, parts)
        self._end += written
        if self._end - self._begun >= _WRITE_BACK:
            begin_sync(self._data, self._begun, self._end)
            self._begun = self._end
        return written

    def list_entry(self, entry: Mapping[str, Any]) -> None:
        """Append an entry to the journal."""
        line, checksum = journal_line(entry, self.index.checksum)
        self.list(line)
        # As a reader gets it: lists instead of tuples.
        self.index.take(json.loads(line[9:]), self.index.size + len(line), checksum)

    def list(self, lines: bytes) -> None:
        """Append lines to the journal, after what was written before is on disk.

        They are not added to ``index``.
        """
        self._sync_data()
        with named_if_full(self._path / JOURNAL):
            _write_all(self._journal, [lines])
            self._sync(self._journal)

    def add(self, entry: BatchEntry, parts: Sequence[Any]) -> BatchEntry:
        """Append a batch to a data file, and list it.

        Args:
            entry: of the batch; segment and offset are set here, and an equal layout
                that is listed already is used.
            parts: its bytes.

        Raises:
            OSError: if the disk is full, or the files were removed.
        """
        begins_file = self._segment < 0 or self._end >= SEGMENT
        segment = self._segment + begins_file
        number = self._number_of(entry.layout)
        layout = self.index.layouts[number]
        offset = 0 if begins_file else self._end
        entry = replace(entry, layout=layout, segment=segment, offset=offset)
        written = self.write(segment, parts)
        if written != entry.end - offset:
            raise AssertionError((written, entry))
        line, checksum = journal_line(
            {"batch": entry.to_json(number)}, self.index.checksum
        )
        self.list(line)
        self.index.add(entry, self.index.size + len(line), checksum)
        return entry

    def _number_of(self, layout: Layout) -> int:
        """Return the number of a layout; list it if no equal one is listed."""
        last, number = self._last_layout
        if layout is not last:
            layouts = self.index.layouts
            equal = (n for n, known in enumerate(layouts) if known.equals(layout))
            number = next(equal, len(layouts))
            if number == len(layouts):
                self.list_entry({"layout": layout.to_json()})
            self._last_layout = layout, number
        return number

    def remove(self, path: Path) -> None:
        """Remove a dataset without batches; the folder stays if it has other files."""
        for name in (JOURNAL, segment_name(0), LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(self._folder)):
                path.rmdir()

    def close(self) -> None:
        """Close the files and release the folder; may be called twice."""
        self._lock.close()
        for name in ("_journal", "_data", "_folder"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)

    def _sync_data(self) -> None:
        if self._unsynced:
            with named_if_full(self._path / segment_name(self._segment)):
                self._sync(self._data)
            self._unsynced = False

    def _sync(self, descriptor: int) -> None:
        if self._durable:
            os.fdatasync(descriptor)

    def _sync_names(self) -> None:
        if self._durable:
            os.fsync(self._folder)

    def _open_segment(self, number: int, end: int) -> None:
        if self._data >= 0:
            os.close(self._data)
            self._data = -1
        self._data = self._open(segment_name(number), end)
        self._segment, self._end, self._begun = number, end, end

    def _open(self, name: str, end: int) -> int:
        """Open a file for appending behind its first ``end`` bytes."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with named_if_full(self._path / name):
            descriptor = os.open(name, flags, 0o666, dir_fd=self._folder)
        try:
            os.ftruncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _load(path: Path, described: Index) -> Index | None:
    """Return the index of the dataset in a folder; None if there is none."""
    folder = Folder(path)
    if not folder.has(JOURNAL):
        return None
    if b"\n" not in folder.read(JOURNAL) and not folder.has(segment_name(0)):
        return None  # Its writer was killed early.
    index = Index.load(folder)
    different = index.difference(described)
    if different is not None:
        name, there, here = different
        raise ValueError(
            f"{path} holds a dataset of another kind: {name} is {there!r} "
            f"there, but {here!r} here. Write to another folder."
        )
    for number, end in index.ends.items():
        folder.locate(segment_name(number), end)
    return index


def _write_all(descriptor: int, parts: Sequence[Any]) -> int:
    """Write all parts, and return their number of bytes."""
    content = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
    done = 0
    while done < len(content):
        done += os.write(descriptor, content[done:])
    return done


def check_target(path: Path) -> None:
    """Check that a dataset may be written to ``path``, without changing anything.

    Raises:
        FileExistsError: if something else is there.
        ValueError: if it is a URL.
    """
    check_local(path)
    if path.is_file():
        raise FileExistsError(f"{path} is a file: a dataset is written to a folder.")
    if not path.is_dir() or (path / JOURNAL).exists():
        return
    others = [entry.name for entry in path.iterdir()]
    # A writer that was killed early can leave this file.
    if not set(others) <= {LOCK}:
        raise FileExistsError(
            f"{path} holds {min(others)!r} but no {JOURNAL}, so it is not a dataset. "
            "Write to a new or empty folder."
        )
