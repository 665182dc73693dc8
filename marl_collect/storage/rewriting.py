"""Writes datasets anew: joined, with larger batches, or with some of the episodes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from marl_collect.buffers.layout import VALID
from marl_collect.core.description import Key
from marl_collect.core.tensordicts import flatten
from marl_collect.storage.appending import DatasetFiles
from marl_collect.storage.checks import Folder
from marl_collect.storage.dataset import Dataset, concatenate, open_dataset
from marl_collect.storage.description import Metadata, RunDescription
from marl_collect.storage.files import check_unlocked, completed
from marl_collect.storage.format2 import read_format2
from marl_collect.storage.formats.blocks import (
    Progress,
    RunBatch,
    contents_of,
    no_progress,
    read_blocks,
    write_blocks,
    write_runs,
)
from marl_collect.storage.index import JOURNAL, OLD_INDEX, Index, first_line
from marl_collect.storage.packed import Compression, check_compression
from marl_collect.storage.remote import check_local
from marl_collect.storage.selection import Trajectories

_FRAMES: Final = 20_000
"""Most frames of a joined batch."""
_BYTES: Final = 2**28
"""Most bytes of a joined batch in memory."""


def merge(datasets: Sequence[Dataset | str | Path], path: str | Path) -> Dataset:
    """Write the batches of several datasets to a new one.

    Batches are checked and copied as they are. The folder appears when it is complete:
    if the process is killed, a hidden folder ``.NAME.incomplete`` stays beside it,
    which the next merge to the same path removes.

    Args:
        datasets: as for ``concatenate``.
        path: a folder that does not exist, or is empty.

    Returns:
        The new dataset, opened. Its metadata are those of the first one that has any.

    Raises:
        ValueError: if there are none, or two are of different kinds.
        DatasetError: if a file of them is damaged. It names the file.
        FileExistsError: if something is at ``path``.
        BlockingIOError: if a writer has one of the datasets open, or another process
            merges to the same path.
    """
    joined = concatenate(datasets)
    for source, _ in joined.parts:
        check_unlocked(source.path)
    folder = Folder(Path(path).absolute())
    with completed(Path(path), "merge", or_empty=True) as temporary:
        temporary.mkdir()
        return Dataset([(folder, _copy_batches(joined, temporary))])


def _copy_batches(joined: Dataset, folder: Path) -> Index:
    """Write the batches, as they are, to an empty folder; return what is listed."""
    contents = joined.contents
    first = first_line(contents.description)
    # All is on disk before the folder gets its name.
    with DatasetFiles(folder, first, durable=False) as files:
        if contents.metadata != Metadata():
            files.list_entry({"metadata": contents.metadata.to_json()})
        for run in contents.runs:
            files.list_entry({"run": run.to_json()})
        if contents.keys:
            files.list_entry({"keys": [key.to_json() for key in contents.keys]})
        for batch, entry in enumerate(contents.batches):
            files.add(entry, [joined.stored_bytes(batch)])
        return files.index


def compact(
    source: str | Path, path: str | Path, *, compression: Compression = "lz4"
) -> Dataset:
    """Write a dataset to a new folder, with small batches joined to larger ones.

    Frames, episodes and runs are the same, in the same order. The files become smaller:
    next observations at the ends of batches are not stored twice. Datasets of the
    format versions 1 and 2 are converted.

    Args:
        source: the folder of a dataset.
        path: a folder that does not exist, or is empty.
        compression: of large frames such as images, as for ``record``.

    Returns:
        The new dataset, opened.

    Raises:
        FileNotFoundError: if there is no dataset.
        DatasetError: if a file of it is damaged. It names the file.
        FileExistsError: if something is at ``path``.
        BlockingIOError: if a writer has the dataset open.
    """
    check_compression(compression)
    check_local(source)
    folder = Path(source).absolute()
    check_unlocked(folder)
    if (folder / OLD_INDEX).exists() and not (folder / JOURNAL).exists():
        contents, batches = read_format2(folder)
    else:
        dataset = open_dataset(folder)
        contents, batches = dataset.contents, _batches(dataset)
    with completed(Path(path), "compact", or_empty=True) as temporary:
        write_runs(temporary, contents, _joined(batches), compression)
    return open_dataset(path)


def _batches(dataset: Dataset) -> Iterator[RunBatch]:
    for number, entry in enumerate(dataset.contents.batches):
        dataset.verify(number)
        yield dataset.contents.runs[entry.run], number, flatten(dataset[number])


def _joined(batches: Iterator[RunBatch]) -> Iterator[RunBatch]:
    """Join batches of a run that follow one another."""
    waiting: list[Mapping[Key, torch.Tensor]] = []
    run: RunDescription | None = None
    following = joined = 0
    for batch_run, number, tensors in batches:
        follows = batch_run is run and number == following
        if run is not None and not (follows and _fits([*waiting, tensors])):
            yield run, joined, _join(waiting)
            waiting.clear()
            joined += 1 if follows else 2
        run, following = batch_run, number + 1
        waiting.append(tensors)
    if run is not None:
        yield run, joined, _join(waiting)


def _join(batches: Sequence[Mapping[Key, torch.Tensor]]) -> dict[Key, torch.Tensor]:
    return {key: torch.cat([b[key] for b in batches], 1) for key in batches[0]}


def _fits(batches: Sequence[Mapping[Key, torch.Tensor]]) -> bool:
    """Return whether a batch continues the rows of those before it."""
    shapes = [next(iter(batch.values())).shape[:2] for batch in batches]
    frames = shapes[0][0] * sum(shape[1] for shape in shapes)
    nbytes = sum(tensor.nbytes for tensor in batches[-1].values()) * len(batches)
    return (
        shapes[-1][0] == shapes[0][0]
        and VALID not in batches[-1]  # Rows of different lengths cannot be continued.
        and frames <= _FRAMES
        and nbytes <= _BYTES
    )


def save(
    trajectories: Trajectories,
    path: str | Path,
    *,
    compression: Compression = "lz4",
    progress: Progress = no_progress,
) -> Dataset:
    """Write some of the episodes of a dataset to a new one.

    To delete episodes, save the others. Runs, seeds, and metadata are kept.

    Args:
        trajectories: the episodes, such as ``dataset.trajectories[:100]``, with all
            keys or with those that were selected.
        path: a folder that does not exist, or is empty.
        compression: of large frames such as images, as for ``record``.
        progress: called after every block; see ``export_dataset``.

    Returns:
        The new dataset, opened.

    Raises:
        ValueError: if there are no episodes.
        KeyError: if keys that say where episodes end were not selected.
        FileExistsError: if something is at ``path``.
    """
    check_compression(compression)
    contents = contents_of(trajectories)
    with completed(Path(path), "save", or_empty=True) as temporary:
        blocks = read_blocks(trajectories, contents, no_progress)
        write_blocks(temporary, contents, blocks, compression, progress)
    return open_dataset(path)
