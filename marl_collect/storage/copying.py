"""Copies datasets to object stores, from them, and between folders."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

from marl_collect.core.atomic import sync, sync_folder
from marl_collect.storage.appending import check_target
from marl_collect.storage.checks import Folder
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.files import LOCK, FolderLock
from marl_collect.storage.frames import segment_name
from marl_collect.storage.index import JOURNAL, BatchEntry, journal_lines
from marl_collect.storage.remote import RemoteFolder, open_folder, url_of

_SYNCED: Final = 2**26
"""Bytes that are written between two waits for the disk."""
_AT_ONCE: Final = 4
"""Data files that are uploaded at the same time, before the journal lists them."""


def copy(
    source: str | Path,
    target: str | Path,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Copy a dataset between folders of this machine and object stores.

    Batches are checked, copied, and then listed in the target's journal. At any moment,
    the target is a complete dataset with the first batches. If it already has the first
    batches of the source, only the others are copied: a copy that was interrupted goes
    on, and a dataset that grows is copied again. A writer may have the source open.

    Args:
        source: a folder or a URL, such as ``"s3://bucket/data"``.
        target: a folder or a URL.
        storage_options: arguments of the fsspec file systems, such as
            ``{"endpoint_url": ...}``.

    Returns:
        The number of batches that were copied.

    Raises:
        ValueError: if the target holds another dataset, or there are options but no
            URL.
        DatasetError: if a file of the source is damaged. It names the file.
        BlockingIOError: if the target is a folder that a writer has open.
        FileExistsError: if the target is a folder that holds something else.
    """
    options = {
        path: storage_options if url_of(path) else None for path in (source, target)
    }
    if storage_options and not any(options.values()):
        raise ValueError(
            f"Neither {source} nor {target} is a URL: storage_options are for URLs "
            "only."
        )
    dataset = open_dataset(source, storage_options=options[source])
    ((folder, _),) = dataset.parts
    content = folder.read(JOURNAL)
    with ExitStack() as stack:
        output = stack.enter_context(_opened(target, options[target], dataset))
        done = _listed(output.folder, folder, content)
        return _copy_batches(content, done, dataset, output)


def _copy_batches(
    content: bytes, done: int, dataset: Dataset, output: "_Store | _Local"
) -> int:
    """Copy the batches that are listed behind the first ``done`` bytes of a journal."""
    batch = copied = 0
    listed = written = done
    for item, end, _ in journal_lines(content):
        if "batch" in item:
            if batch == len(dataset):  # A writer has added it since.
                break
            if end > done:
                copied += 1
                if output.add(batch, dataset.contents.batches[batch]):
                    output.list(content[written:end])
                    written = end
            batch += 1
        elif not written:  # Without a journal, a killed copy could not go on.
            output.list(content[:end])
            written = end
        listed = max(listed, end)
    if listed > written:
        output.list(content[written:listed])
    return copied


def _listed(target: Folder, source: Folder, content: bytes) -> int:
    """Return how many bytes of the source's journal the target has already.

    Raises:
        ValueError: if the target holds another dataset.
    """
    before = target.read(JOURNAL) if target.has(JOURNAL) else b""
    before = before[: before.rfind(b"\n") + 1]
    if not content.startswith(before):
        raise ValueError(
            f"{target.named()} holds another dataset than {source.named()}, or one "
            "with more batches. Copy to another place."
        )
    return len(before)


@contextmanager
def _opened(
    target: str | Path, options: Mapping[str, Any] | None, dataset: Dataset
) -> Iterator["_Store | _Local"]:
    folder = open_folder(target, options)
    if isinstance(folder, RemoteFolder):
        yield _Store(folder, dataset)
        return
    check_target(folder.path)
    folder.path.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder.path / LOCK):
        local = _Local(folder, dataset)
        try:
            yield local
        finally:
            local.close()


@final
class _Store:
    """An object store, which replaces each object at once."""

    def __init__(self, folder: RemoteFolder, dataset: Dataset) -> None:
        self.folder = folder
        self._dataset = dataset
        self._journal = folder.read(JOURNAL) if folder.has(JOURNAL) else b""
        self._changed: set[int] = set()

    def add(self, batch: int, entry: BatchEntry) -> bool:
        """Check a batch; return whether to upload its file, and others, now."""
        self._dataset.stored_bytes(batch)
        self._changed.add(entry.segment)
        batches = self._dataset.contents.batches
        following = batches[batch + 1 : batch + 2]
        is_last = bool(following) and following[0].segment != entry.segment
        return is_last and len(self._changed) >= _AT_ONCE

    def list(self, lines: bytes) -> None:
        """Upload what was added before, then the journal with further lines."""
        ((source, index),) = self._dataset.parts
        files = {}
        for segment in sorted(self._changed):
            name = segment_name(segment)
            # Also what was copied earlier: an object is replaced as a whole.
            source.fetch(name, [(0, index.ends[segment])])
            files[name] = source.local(name)
        if files:
            self.folder.upload(files)
        self._changed.clear()
        self._journal = self._journal[: self._journal.rfind(b"\n") + 1] + lines
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / JOURNAL
            path.write_bytes(self._journal)
            self.folder.upload({JOURNAL: path})


@final
class _Local:
    """A folder of this machine, written as a ``Writer`` does."""

    def __init__(self, folder: Folder, dataset: Dataset) -> None:
        self.folder = folder
        self._dataset = dataset
        self._files: dict[int, int] = {}
        self._waiting = 0

    def add(self, batch: int, entry: BatchEntry) -> bool:
        """Check a batch and write its bytes; return whether to list it now."""
        content = self._dataset.stored_bytes(batch)
        descriptor = self._files.get(entry.segment)
        if descriptor is None:
            descriptor = _open(self.folder.path / segment_name(entry.segment))
            self._files[entry.segment] = descriptor
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], entry.offset + done)
        self._waiting += len(content)
        return self._waiting >= _SYNCED

    def list(self, lines: bytes) -> None:
        """List everything added before."""
        self.close()
        path = self.folder.path / JOURNAL
        new = not path.exists()
        descriptor = _open(path)
        try:
            # A line that an interrupted copy did not complete is replaced.
            complete = path.read_bytes().rfind(b"\n") + 1
            os.ftruncate(descriptor, complete)
            os.pwrite(descriptor, lines, complete)
        finally:
            os.close(descriptor)
        sync(path, os.O_RDWR)
        if new:
            sync_folder(self.folder.path)

    def close(self) -> None:
        for descriptor in self._files.values():
            os.fdatasync(descriptor)
            os.close(descriptor)
        self._files.clear()
        self._waiting = 0


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)
