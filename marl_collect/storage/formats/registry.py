"""``Format``, and the functions that export and import datasets."""

import errno
import importlib
import inspect
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from marl_collect.errors import imports_of
from marl_collect.storage.dataset import Dataset, open_dataset
from marl_collect.storage.files import completed
from marl_collect.storage.formats import FORMATS
from marl_collect.storage.formats.blocks import (
    Block,
    Progress,
    contents_of,
    no_progress,
    read_blocks,
    write_blocks,
)
from marl_collect.storage.index import Index
from marl_collect.storage.packed import Compression, check_compression
from marl_collect.storage.selection import Trajectories

_SPARE: Final = 16 * 2**20
"""Bytes that are kept free for what writing adds to the numbers."""

Source = tuple[Index, Iterator[Block]]
"""Episodes to import: their description, and the blocks, read one by one."""


@final
@dataclass(frozen=True)
class Format:
    """A format that episodes are exported to or imported from.

    Attributes:
        summary: what it is, in a few words.
        extra: the extra of this package that installs what it needs.
        packages: the modules that it imports.
        export: ``(path, contents, blocks, target)`` writes to the new file or folder
            ``path``, which is renamed to ``target`` afterwards. Its keyword arguments
            are the settings of the format. None if episodes cannot be exported.
        open: opens a path that exists, and reads no episode yet. None if episodes
            cannot be imported.
        is_file: whether a file is imported; otherwise it is a folder.
        locate: returns the file or folder that the user's target names, or raises a
            ValueError.
    """

    summary: str
    extra: str
    packages: tuple[str, ...]
    export: Callable[..., None] | None = None
    open: Callable[[Path], Source] | None = None
    is_file: bool = False
    locate: Callable[[str], Path] = Path

    @property
    def settings(self) -> list[str]:
        """Names of the settings of ``export``."""
        if self.export is None:
            return []
        parameters = inspect.signature(self.export).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def find_format(name: str) -> Format:
    """Return a format.

    Raises:
        ValueError: if there is no such format.
        ImportError: if a package that it needs is not installed. The message says what
            to install.
    """
    if name not in FORMATS:
        raise ValueError(f"{name!r} is not a format: use one of {', '.join(FORMATS)}.")
    chosen: Format = importlib.import_module(FORMATS[name]).FORMAT
    for package in chosen.packages:
        with imports_of(chosen.extra, f"The format {name}"):
            importlib.import_module(package)
    return chosen


def export_dataset(
    source: Dataset | Trajectories,
    out: str | Path,
    format: str = "hdf5",  # noqa: A002 - as in the command line
    *,
    progress: Progress = no_progress,
    **settings: Any,
) -> Path:
    """Write the complete episodes of a dataset in another format.

    The target gets its name when it is complete. An error leaves nothing behind.

    Args:
        source: a dataset, or a selection of its episodes.
        out: a file or folder that does not exist; an id for ``"minari"``.
        format: name of a format in ``FORMATS``.
        progress: called after every block; see ``Progress``.
        settings: keyword arguments of the format.

    Returns:
        The file or folder.

    Raises:
        ValueError: if the format is unknown or only imported, has no such setting, or
            there are no episodes.
        ImportError: if a package is missing. The message says what to install.
        FileExistsError: if the target exists.
        BlockingIOError: if another process exports to it.
    """
    chosen = find_format(format)
    if chosen.export is None:
        raise ValueError(
            f"The format {format} can be imported, but not exported: use one of "
            f"{', '.join(name for name in FORMATS if name != format)}."
        )
    for name in settings:
        if name not in chosen.settings:
            raise ValueError(
                f"The format {format} has no setting {name!r}: use "
                f"{', '.join(chosen.settings) or 'none'}."
            )
    trajectories = source.trajectories if isinstance(source, Dataset) else source
    contents = contents_of(trajectories)
    target = chosen.locate(str(out))
    with completed(target, "export") as temporary:
        blocks = read_blocks(trajectories, contents, progress)
        # `temporary` does not exist yet.
        roomy = _while_there_is_room(blocks, temporary.parent)
        chosen.export(temporary, contents, roomy, target, **settings)
    return target


def import_dataset(
    source: str | Path,
    out: str | Path,
    format: str,  # noqa: A002 - as in the command line
    *,
    compression: Compression = "lz4",
    progress: Progress = no_progress,
) -> Dataset:
    """Write the episodes of another format to a new dataset.

    The folder gets its name when the dataset is complete. An error leaves nothing
    behind.

    Args:
        source: a file or folder.
        out: a folder that does not exist.
        format: name of a format in ``FORMATS``.
        compression: of large frames such as images, as for ``record``.
        progress: called after every block; see ``Progress``.

    Returns:
        The dataset, opened.

    Raises:
        ValueError: if the format is unknown, or the source cannot be read as a dataset.
        ImportError: if a package is missing. The message says what to install.
        FileNotFoundError: if there is no such source.
        FileExistsError: if the folder exists.
        BlockingIOError: if another process imports to it.
    """
    check_compression(compression)
    chosen = find_format(format)
    if chosen.open is None:
        raise ValueError(f"The format {format} can be exported, but not imported.")
    path, kind = Path(source), "file" if chosen.is_file else "folder"
    if not (path.is_file() if chosen.is_file else path.is_dir()):
        raise FileNotFoundError(f"{path} does not exist, or is not a {kind}.")
    contents, blocks = chosen.open(path)
    target = Path(out)
    with completed(target, "import") as temporary:
        write_blocks(temporary, contents, blocks, compression, progress)
    return open_dataset(target)


def _while_there_is_room(blocks: Iterator[Block], folder: Path) -> Iterator[Block]:
    """Yield blocks, after checking that their numbers fit on the disk.

    Where HDF5 writes, a full disk kills the process instead of raising an error.
    """
    for block in blocks:
        nbytes = sum(tensor.nbytes for tensor in block.frames.values())
        free = shutil.disk_usage(folder).free
        if free < nbytes + _SPARE:
            raise OSError(
                errno.ENOSPC,
                f"The disk is full: the next episodes have up to {nbytes:,} bytes, but "
                f"only {free:,} are free",
                str(folder),
            )
        yield block
