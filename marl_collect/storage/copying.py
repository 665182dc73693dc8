"""Copies datasets to object stores, from them, and between folders."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol, final

from marl_collect.storage.checks import Folder
from marl_collect.storage.dataset import open_dataset
from marl_collect.storage.files import (
    LOCK,
    FolderLock,
    remove,
    rename_synced,
)
from marl_collect.storage.index import INDEX, Index, read_episodes
from marl_collect.storage.remote import RemoteFolder, open_folder, url_of
from marl_collect.storage.writer import check_target

_INCOMPLETE: Final = ".incomplete"


class _Target(Protocol):
    @property
    def folder(self) -> Folder:
        """What the dataset is written to."""

    def add(self, source: Folder, batch: str) -> None:
        """Write the files of a batch."""

    def save(self, index: Index) -> None:
        """Replace the index."""


def copy(
    source: str | Path,
    target: str | Path,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Copy a dataset between folders of this machine and object stores.

    Batch after batch is checked, copied, and listed in the target's index, which is
    replaced last. At any moment, the target is a complete dataset with the first
    batches. If it already has the first batches of the
    source, only the others are copied: a copy that was interrupted goes on, and a
    dataset that grows is copied again. A writer may have the source open.

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
        each: storage_options if url_of(each) else None for each in (source, target)
    }
    if storage_options and not any(options.values()):
        raise ValueError(
            f"Neither {source} nor {target} is a URL: storage_options are for URLs "
            "only."
        )
    dataset = open_dataset(source, storage_options=options[source])
    (part,) = dataset.parts
    contents = part.contents
    with ExitStack() as stack:
        place = _open(target, options[target], stack)
        index = Index(contents.description, runs=contents.runs)
        before = Index.load(place.folder) if place.folder.has(INDEX) else None
        if before is None:
            place.save(index)
            before = index
        _check_begins(contents, before, part.folder, place.folder)
        done = len(before.batches)
        for number, entry in enumerate(contents.batches):
            ended = read_episodes(part.folder, entry)
            index = index.with_batch(entry, contents.keys, ended)
            if number >= done:
                dataset.verify(number)
                place.add(part.folder, entry.name)
                place.save(index)
    return len(contents.batches) - done


def _check_begins(
    contents: Index, before: Index, source: Folder, target: Folder
) -> None:
    """Check that a target has the first batches of the source."""
    batches, runs = len(before.batches), len(before.runs)
    same = (
        contents.description.to_json() == before.description.to_json()
        and contents.runs[:runs] == before.runs
        and contents.batches[:batches] == before.batches
    )
    if not same:
        raise ValueError(
            f"{target.named()} holds another dataset than {source.named()}, or one "
            "with more batches. Copy to another place."
        )


def _open(
    target: str | Path, options: Mapping[str, Any] | None, stack: ExitStack
) -> _Target:
    folder = open_folder(target, options)
    if isinstance(folder, RemoteFolder):
        return _Store(folder)
    return stack.enter_context(_locked(folder))


@final
class _Store:
    """An object store, which replaces each object at once."""

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder

    def add(self, source: Folder, batch: str) -> None:
        for parts in source.files(batch):
            path, _ = source.locate(parts)
            self.folder.upload(path, parts)

    def save(self, index: Index) -> None:
        with tempfile.TemporaryDirectory() as name:
            index.save(Path(name))
            self.folder.upload(Path(name) / INDEX, (INDEX,))


@final
class _Local:
    """A folder of this machine, written as a ``Writer`` does."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def add(self, source: Folder, batch: str) -> None:
        temporary, final = self.folder.path / _INCOMPLETE, self.folder.path / batch
        remove(temporary)
        remove(final)  # It is not listed: an earlier copy was killed.
        for parts in source.files(batch):
            path, _ = source.locate(parts)
            to = temporary.joinpath(*parts[1:])
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
        rename_synced(temporary, final)

    def save(self, index: Index) -> None:
        index.save(self.folder.path)


@contextlib.contextmanager
def _locked(folder: Folder) -> Iterator[_Local]:
    check_target(folder.path)
    folder.path.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder.path / LOCK):
        yield _Local(folder)
