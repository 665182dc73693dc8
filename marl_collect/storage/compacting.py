"""Writes datasets anew: ``compact`` joins batches, ``save`` selects episodes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from marl_collect.buffers.layout import VALID
from marl_collect.core.description import Key
from marl_collect.core.tensordicts import assemble, flatten
from marl_collect.storage.compression import Compression, check_compression
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.description import (
    DatasetDescription,
    Metadata,
    RunDescription,
)
from marl_collect.storage.files import check_unlocked, completed
from marl_collect.storage.format2 import read_format2
from marl_collect.storage.formats.blocks import (
    Header,
    Progress,
    no_progress,
    read_blocks,
    write_blocks,
)
from marl_collect.storage.index import JOURNAL, OLD_INDEX
from marl_collect.storage.remote import check_local
from marl_collect.storage.selection import Trajectories
from marl_collect.storage.writer import Writer

_FRAMES: Final = 20_000
"""Most frames of a joined batch."""
_BYTES: Final = 2**28
"""Most bytes of a joined batch in memory."""

_Batch = tuple[RunDescription, int, dict[Key, torch.Tensor]]
"""The run, a number that follows that of the batch before, and the tensors."""


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
    check_local(path)
    folder = Path(source).absolute()
    check_unlocked(folder)
    old = (folder / OLD_INDEX).exists() and not (folder / JOURNAL).exists()
    if old:
        description, batches = read_format2(folder)
        metadata = Metadata()
    else:
        dataset = open_dataset(folder)
        description, batches = dataset.contents.description, _batches(dataset)
        metadata = dataset.contents.metadata
    with completed(Path(path).absolute(), "compact", or_empty=True) as temporary:
        _write(temporary, description, metadata, batches, compression)
    return open_dataset(path)


def _batches(dataset: Dataset) -> Iterator[_Batch]:
    for number, entry in enumerate(dataset.contents.batches):
        dataset.verify(number)
        yield dataset.contents.runs[entry.run], number, flatten(dataset[number])


def _write(
    path: Path,
    description: DatasetDescription,
    metadata: Metadata,
    batches: Iterator[_Batch],
    compression: Compression,
) -> None:
    n_agents = {
        name: group.n_agents for name, group in description.environment.groups.items()
    }
    writer: Writer | None = None
    run: RunDescription | None = None
    following = -1
    waiting: list[dict[Key, torch.Tensor]] = []

    def flush() -> None:
        if waiting and writer is not None:
            joined = {k: torch.cat([b[k] for b in waiting], 1) for k in waiting[0]}
            shape = next(iter(joined.values())).shape[:2]
            writer.add(assemble(joined, list(shape), n_agents, time=True))
            waiting.clear()

    try:
        for batch_run, number, tensors in batches:
            if batch_run is not run or number != following:
                flush()
                if writer is not None:
                    writer.close()
                run = batch_run
                writer = Writer(
                    path,
                    description,
                    run,
                    metadata=metadata,
                    compression=compression,
                )
            elif waiting and not _fits(waiting, tensors):
                flush()
            waiting.append(tensors)
            following = number + 1
        flush()
    finally:
        if writer is not None:
            writer.close()


def _fits(
    waiting: list[dict[Key, torch.Tensor]], tensors: Mapping[Key, torch.Tensor]
) -> bool:
    """Return whether a batch continues the rows of those before it."""
    shapes = [next(iter(b.values())).shape[:2] for b in (*waiting, tensors)]
    frames = shapes[0][0] * sum(shape[1] for shape in shapes)
    nbytes = sum(t.nbytes for t in tensors.values()) * (len(waiting) + 1)
    return (
        shapes[-1][0] == shapes[0][0]
        and VALID not in tensors  # Rows of different lengths cannot be continued.
        and frames <= _FRAMES
        and nbytes <= _BYTES
    )


def save(
    trajectories: Trajectories,
    path: str | Path,
    *,
    compression: Compression = "lz4",
    progress: Progress | None = None,
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
    check_local(path)
    header = Header.of(trajectories)
    report = progress or no_progress
    with completed(Path(path).absolute(), "save", or_empty=True) as temporary:
        blocks = read_blocks(trajectories, header, no_progress)
        write_blocks(temporary, header, blocks, compression, report)
    return open_dataset(path)
