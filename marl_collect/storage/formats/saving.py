"""``save``: writes a selection of episodes to a new dataset."""

from pathlib import Path

from marl_collect.storage.compression import Compression, check_compression
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.files import completed
from marl_collect.storage.formats.blocks import (
    Header,
    Progress,
    no_progress,
    read_blocks,
    write_blocks,
)
from marl_collect.storage.remote import check_local
from marl_collect.storage.selection import Trajectories


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
