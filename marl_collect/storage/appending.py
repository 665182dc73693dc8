"""Appends to the files of a dataset, so that a crash loses nothing that was listed."""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Self, final

from marl_collect.core.atomic import sync_folder
from marl_collect.storage.checks import Folder
from marl_collect.storage.description import DatasetDescription, difference
from marl_collect.storage.files import LOCK
from marl_collect.storage.frames import segment_name
from marl_collect.storage.index import (
    JOURNAL,
    BatchEntry,
    Index,
    Layout,
    header_entry,
    journal_line,
    load_journal,
)
from marl_collect.storage.remote import check_local

SEGMENT: Final = 2**30
"""Bytes of a data file from which on the next batch begins a new one. Object stores
upload a file as a whole."""


@final
class DatasetFiles:
    """The journal and the data files of a folder whose lock the caller holds.

    Attributes:
        index: what is listed.
    """

    def __init__(
        self,
        path: Path,
        index: Index,
        size: int,
        checksum: int,
        *,
        durable: bool = True,
    ) -> None:
        """Open the journal; cut off what was not written completely.

        Args:
            path: of the folder.
            index: content of the journal.
            size: of the journal.
            checksum: of its last line.
            durable: whether what was added is on disk when a method returns.
        """
        self._durable = durable
        self.index = index
        self._checksum = checksum
        # Files are opened relative to the folder, which may be moved meanwhile.
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._data = self._segment = -1
        self._end = 0
        try:
            self._journal = self._open(JOURNAL, size)
            ends = index.ends
            if ends:
                self._open_segment(*max(ends.items()))
        except BaseException:
            self.close()
            raise

    @classmethod
    def opened(
        cls, path: Path, description: DatasetDescription, *, durable: bool = True
    ) -> Self:
        """Begin a dataset, or continue the one that is there.

        Raises:
            ValueError: if the one that is there has another description. The message
                names the first difference.
        """
        if not (path / JOURNAL).exists():
            files = cls(path, Index(description), 0, 0, durable=durable)
            try:
                files.note(header_entry(description), take=False)
                sync_folder(path)
            except BaseException:
                files.close()
                raise
            return files
        folder = Folder(path)
        folder.locate(JOURNAL)
        begun = (path / JOURNAL).read_bytes().count(b"\n")
        if not begun and not folder.has(segment_name(0)):
            (path / JOURNAL).unlink()  # Its writer was killed early.
            return cls.opened(path, description, durable=durable)
        index, size, checksum = load_journal(folder)
        # JSON turns tuples into lists, and keys of mappings into strings.
        here = json.loads(json.dumps(description.to_json()))
        different = difference(index.description.to_json(), here)
        if different is not None:
            name, stored, described = different
            raise ValueError(
                f"{path} holds a dataset of another kind: {name} is {stored!r} "
                f"there, but {described!r} here. Write to another folder."
            )
        for number, end in index.ends.items():
            folder.locate(segment_name(number), end)
        return cls(path, index, size, checksum, durable=durable)

    def note(self, entry: Mapping[str, Any], *, take: bool = True) -> None:
        """Append an entry to the journal; it is on disk when this returns."""
        line, self._checksum = journal_line(entry, self._checksum)
        _write_all(self._journal, [line])
        self._sync(self._journal)
        if take:
            self.index.take(json.loads(line[9:]))

    def add(
        self, layout: Layout, entry: BatchEntry, parts: Iterable[Any]
    ) -> BatchEntry:
        """Append a batch to a data file, and list it.

        Args:
            layout: of the batch.
            entry: of the batch; layout, segment and offset are set here.
            parts: its bytes.

        Raises:
            OSError: if the disk is full, or the files were removed.
        """
        if self._segment < 0 or self._end >= SEGMENT:
            self._open_segment(self._segment + 1, 0)
            os.fsync(self._folder)
        for descriptor in (self._data, self._journal):
            if not os.fstat(descriptor).st_nlink:
                raise FileNotFoundError(
                    errno.ENOENT, "The dataset was removed while a writer had it open"
                )
        layouts = self.index.layouts
        if layout not in layouts:
            self.note({"layout": layout.to_json()})
            layout = layouts[-1]
        entry = replace(
            entry,
            layout=layouts.index(layout),
            segment=self._segment,
            offset=self._end,
        )
        end = self.index.extent(entry).end
        written = _write_all(self._data, parts)
        if written != end - self._end:
            raise AssertionError((written, entry))
        self._sync(self._data)
        self.note({"batch": asdict(entry)})
        self._end = end
        return self.index.batches[-1]

    def remove(self, path: Path) -> None:
        """Remove a dataset without batches; the folder stays if it has other files."""
        for name in (JOURNAL, segment_name(0), LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
        with suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(self._folder)):
                path.rmdir()

    def close(self) -> None:
        """Close the files; may be called twice."""
        for name in ("_journal", "_data", "_folder"):
            descriptor = getattr(self, name, -1)
            if descriptor >= 0:
                setattr(self, name, -1)
                os.close(descriptor)

    def _sync(self, descriptor: int) -> None:
        if self._durable:
            os.fdatasync(descriptor)

    def _open_segment(self, number: int, end: int) -> None:
        if self._data >= 0:
            os.close(self._data)
            self._data = -1
        self._data = self._open(segment_name(number), end)
        self._segment, self._end = number, end

    def _open(self, name: str, end: int) -> int:
        """Open a file for appending behind its first ``end`` bytes."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o666, dir_fd=self._folder)
        try:
            os.ftruncate(descriptor, end)
            os.lseek(descriptor, end, os.SEEK_SET)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _write_all(descriptor: int, parts: Iterable[Any]) -> int:
    """Write all parts, and return their number of bytes."""
    pieces = list(parts)
    content = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
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
