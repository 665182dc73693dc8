"""Copies datasets to object stores, from them, and between folders."""

import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from marl_collect.files.atomic import named_if_full
from marl_collect.storage.appending import DatasetFiles, check_target
from marl_collect.storage.checks import Folder
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.frames import segment_name
from marl_collect.storage.index import JOURNAL, Index
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
    output = open_folder(target, options[target])
    if isinstance(output, RemoteFolder):
        return _upload(dataset, content, output)
    return _write(dataset, content, output)


def _write(dataset: Dataset, content: bytes, target: Folder) -> int:
    """Copy what a folder of this machine lacks; ``content`` is the source's journal."""
    ((_, index),) = dataset.parts
    check_target(target.path)
    target.path.mkdir(parents=True, exist_ok=True)
    # Without the first line, a copy that is killed could not go on.
    first = content[: content.index(b"\n") + 1]
    with DatasetFiles(target.path, first) as files:
        done = _listed(dataset, content, target)
        missing = _missing(index, done)
        waiting = 0
        for batch in missing:
            stored = dataset.stored_bytes(batch)
            files.write(index.batches[batch].segment, [stored])
            waiting += len(stored)
            if waiting >= _SYNCED:
                files.list(content[done : index.listed[batch]])
                done, waiting = index.listed[batch], 0
        if done < index.size:
            files.list(content[done : index.size])
    return len(missing)


def _upload(dataset: Dataset, content: bytes, target: RemoteFolder) -> int:
    """Copy what an object store lacks; it replaces each object at once."""
    ((source, index),) = dataset.parts
    changed: set[int] = set()

    def upload(end: int) -> None:
        """Upload the changed data files, then the journal that lists them."""
        files = {}
        for segment in sorted(changed):
            name = segment_name(segment)
            # Also what was copied earlier: an object is replaced as a whole.
            source.fetch(name, [(0, index.ends[segment])])
            files[name] = source.local(name)
        if files:
            target.upload(files)
        changed.clear()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / JOURNAL
            with named_if_full(path):
                path.write_bytes(content[:end])
            target.upload({JOURNAL: path})

    done = _listed(dataset, content, target)
    if not done:  # Without a journal, a copy that is killed could not go on.
        done = content.index(b"\n") + 1
        upload(done)
    missing = _missing(index, done)
    for batch in missing:
        dataset.stored_bytes(batch)  # Checks it.
        segment = index.batches[batch].segment
        changed.add(segment)
        following = index.batches[batch + 1 : batch + 2]
        is_last = bool(following) and following[0].segment != segment
        if is_last and len(changed) >= _AT_ONCE:
            done = index.listed[batch]
            upload(done)
    if done < index.size:
        upload(index.size)
    return len(missing)


def _listed(dataset: Dataset, content: bytes, target: Folder) -> int:
    """Return how many bytes of the source's journal a target has already.

    Raises:
        ValueError: if the target holds another dataset.
    """
    before = target.read(JOURNAL) if target.has(JOURNAL) else b""
    done = before.rfind(b"\n") + 1
    if not content.startswith(before[:done]):
        raise ValueError(
            f"{target.named()} holds another dataset than {dataset.name}, or one with "
            "more batches. Copy to another place."
        )
    return done


def _missing(index: Index, done: int) -> range:
    """Return the batches that are listed behind the first bytes of a journal."""
    return range(bisect_right(index.listed, done), len(index.batches))
