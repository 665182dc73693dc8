"""Joins datasets of one kind: as a view, or written to a new folder."""

import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from marl_collect.storage.checks import Folder
from marl_collect.storage.dataset import Dataset, Part, open_dataset
from marl_collect.storage.description import difference
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.files import check_unlocked, completed
from marl_collect.storage.index import (
    EPISODES,
    FILES,
    BatchEntry,
    Index,
    StoredFile,
    files_to_json,
    key_difference,
    read_episodes,
)
from marl_collect.storage.mapping import MappedBatches
from marl_collect.storage.ranges import range_of
from marl_collect.storage.remote import check_local


def concatenate(datasets: Sequence[Dataset | str | Path]) -> Dataset:
    """Return a view over several datasets, which reads like one; nothing is copied.

    Episodes, frames and runs are in the order of ``datasets``.

    Args:
        datasets: at least one, or their folders, of one kind: task, environment
            settings, groups, spaces and keys are equal.

    Raises:
        ValueError: if there are none, or two are of different kinds. The message names
            the first difference.
        FileNotFoundError: if a folder holds no dataset.
    """
    if isinstance(datasets, str | Path | Dataset) or not datasets:
        raise ValueError(
            f"datasets is {datasets!r}, but must be a list of datasets or of folders."
        )
    opened = [d if isinstance(d, Dataset) else open_dataset(d) for d in datasets]
    for other in opened[1:]:
        _check_alike(opened[0], other)
    return Dataset([part for each in opened for part in each.parts])


def merge(datasets: Sequence[Dataset | str | Path], path: str | Path) -> Dataset:
    """Write the batches of several datasets to a new one.

    Files are copied as they are and checked. The folder appears when it is complete: if
    the process is killed, a hidden folder ``.NAME.incomplete`` stays beside it, which
    the next merge to the same path removes.

    Args:
        datasets: as for ``concatenate``.
        path: a folder that does not exist, or is empty.

    Returns:
        The new dataset, opened.

    Raises:
        ValueError: if there are none, or two are of different kinds.
        DatasetError: if a file of them is damaged. It names the file.
        FileExistsError: if something is at ``path``.
        BlockingIOError: if a writer has one of the datasets open, or another process
            merges to the same path.
    """
    check_local(path)
    joined = concatenate(datasets)
    target = Path(path).absolute()
    for part in joined.parts:
        check_unlocked(part.folder.path)
    with completed(target, "merge", or_empty=True) as temporary:
        temporary.mkdir()
        index = _write(joined, Folder(temporary))
        index.save(temporary)
    return open_dataset(target)


def _write(joined: Dataset, target: Folder) -> Index:
    """Write the batches; return the index, which is not written."""
    joined.verify()
    index = Index(joined.contents.description, runs=joined.contents.runs)
    run = 0
    for part in joined.parts:
        batches = part.contents.batches
        # Gaps stay: an episode does not continue over a batch that is missing.
        shift = index.next_number - batches[0].number if batches else 0
        for entry in batches:
            name = f"batch-{entry.number + shift:06d}"
            new, ended = _copy(part, entry, target, name)
            new = replace(new, run=run + entry.run)
            index = index.with_batch(new, joined.contents.keys, ended)
        run += len(part.contents.runs)
    return index


def _check_alike(first: Dataset, other: Dataset) -> None:
    expected, found = first.contents, other.contents
    different = difference(
        expected.description.to_json(), found.description.to_json()
    ) or (
        key_difference(expected.keys, found.keys)
        if expected.keys and found.keys  # A dataset without batches has none.
        else None
    )
    if different is not None:
        name, there, here = different
        raise ValueError(
            f"{other.name} and {first.name} are of different kinds: {name} is {here} "
            f"in the former, but {there} in the latter. Datasets that are joined need "
            "the same task, settings, groups, spaces and keys."
        )


def _copy(
    part: Part, entry: BatchEntry, target: Folder, name: str
) -> tuple[BatchEntry, list[EndedEpisode]]:
    """Copy the files of a batch; return its entry under another name."""
    for parts in part.folder.files(entry.name):
        path, _ = part.folder.locate(parts)
        copy = target.path.joinpath(name, *parts[1:])
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    new = replace(entry, name=name)
    if not entry.checksums:
        new = replace(new, checksums=_checksums(part.contents, new, target))
    return new, read_episodes(target, new)


def _checksums(contents: Index, entry: BatchEntry, target: Folder) -> dict[str, int]:
    """Add the checksums that a batch of an earlier version lacks."""
    maps = MappedBatches(target.named(), [target], replace(contents, batches=(entry,)))
    files = {}
    frames = maps.valid_frames(0)
    for key, tensor in maps.whole(0).items():
        raw: Any = tensor.reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(raw.numpy())
        files[key] = StoredFile(None, raw.numel(), checksum, range_of(tensor, frames))
    text = files_to_json(files)
    (target.path / entry.name / FILES).write_text(text, encoding="utf-8")
    episodes = (target.path / entry.name / EPISODES).read_bytes()
    return {FILES: zlib.crc32(text.encode()), EPISODES: zlib.crc32(episodes)}
