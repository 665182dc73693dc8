"""Names, listing and durable writing of the files of a dataset.

``RUN.FIRST-LAST.parquet`` holds the batches with these numbers of one run. A *run* is
what one writer wrote. Its name is unique, so writers of one folder need no lock, and
files of other folders may be copied into it.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from marl_collect.errors import DatasetError
from marl_collect.files.atomic import named_if_full
from marl_collect.storage.arrow import pa, pq
from marl_collect.storage.columns import RUN, Column, columns_of, json_of
from marl_collect.storage.description import difference

_NAME: Final = re.compile(
    r"(?P<run>[0-9]{8}-[0-9]{6}-[0-9]{6}-[0-9a-f]{8})\."
    r"(?P<first>[0-9]{6,})-(?P<last>[0-9]{6,})\.parquet"
)
PATTERN: Final = "[!.]*.parquet"
_ATTEMPTS: Final = 5
"""How often files may vanish while they are read, as writers join small ones."""
_TIME: Final = "%Y%m%d-%H%M%S-%f"
_ROW_GROUP: Final = 20_000
_ZSTD: Final = 3
"""Level of compression: 15 % smaller pictures than with 1, for the same time."""
_PAGE_BYTES: Final = 2**22
"""Compressed as one: pictures of neighbouring frames resemble each other."""
_CURE: Final = "restore it from a copy, or delete all files of its run"

Content = TypeVar("Content")


class BatchFile(NamedTuple):
    """A file with the batches ``first`` to ``last`` of a run."""

    run: str
    first: int
    last: int
    path: Path

    def part(self) -> list[Any]:
        """Return what a cache knows it by; the time is in nanoseconds."""
        return [self.run, self.last, self.path.stat().st_mtime_ns]


def new_run(files: Sequence[BatchFile]) -> str:
    """Return the name of a run that is listed behind those of ``files``."""
    now = datetime.now(UTC)
    if files:
        last = files[-1].run.rpartition("-")[0]
        # Where the clock was set back, or is that of another machine.
        with naming(files[-1].path, "move it to another folder"):  # Of no such time.
            after = datetime.strptime(last, _TIME).replace(tzinfo=UTC)
            now = max(now, after + timedelta(microseconds=1))
    return f"{now.strftime(_TIME)}-{secrets.token_hex(4)}"


def file_name(run: str, first: int, last: int) -> str:
    """Return the name of a file."""
    return f"{run}.{first:06}-{last:06}.parquet"


def list_files(folder: Path, *, check: bool = True) -> list[BatchFile]:
    """Return the files of a folder as ``arranged`` does; hidden ones are ignored."""
    return settled(
        lambda: arranged(folder.glob(PATTERN), folder, check=check), DatasetError
    )


def settled(read: Callable[[], Content], *errors: type[Exception]) -> Content:
    """Return what is read of a folder to which others write.

    A listing may lack a file that appears meanwhile, and its parts, which that file
    replaces; they may vanish before they are read. So an error is one that persists.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError, *errors):
            return read()
    return read()


def arranged(
    paths: Iterable[Path], folder: str | Path, *, check: bool = True
) -> list[BatchFile]:
    """Return Parquet files in the order of their frames.

    A file whose batches are in a longer file is left out: a writer that joined them was
    killed before it deleted them. With ``check``, a missing batch is an error.
    """
    batch_files = []
    for path in paths:
        if not path.is_file() and path.exists():  # A reader would wait for a pipe.
            raise DatasetError(f"{path} is not a file: move it to another folder.")
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise DatasetError(
                f"{path} is not a file of a dataset, which are named "
                "RUN.FIRST-LAST.parquet. Move it to another folder."
            )
        run, first, last = match.groups()
        batch_files.append(BatchFile(run, int(first), int(last), path))
    listed: list[BatchFile] = []
    for file in sorted(batch_files, key=lambda f: (f.run, f.first, -f.last)):
        is_same_run = bool(listed) and listed[-1].run == file.run
        following = listed[-1].last + 1 if is_same_run else 0
        if file.last < following:
            continue
        if check and file.first != following:
            raise DatasetError(
                f"{folder} lacks batch {following} of the run {file.run}, which is "
                f"before {file.path.name}. Restore its file, or delete all files of "
                "this run."
            )
        listed.append(file)
    return listed


def check_target(folder: Path) -> list[BatchFile]:
    """Return the files of a folder to write to; refuse one that holds other things."""
    if not folder.exists():
        return []
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: pass a folder.")
    # Files that another writer adds between the listings are no others.
    others = [p.name for p in folder.glob("[!.]*") if p.name != "README.md"]
    files = list_files(folder, check=False)
    if others and not files:
        raise FileExistsError(
            f"{folder} holds no dataset, but {others[0]}: write to a new or empty "
            "folder."
        )
    return files


def write_table(
    table: pa.Table, name: str, folder: int, path: Path, like: str | None = None
) -> None:
    """Write a file so that it is either complete and on disk, or not there.

    ``folder`` is the descriptor of a folder that was at ``path`` and may have been
    renamed. The file gets the time of modification of ``like``.
    """
    temporary = f".{name}.tmp"
    with naming_deleted(path), named_if_full(path / name):
        try:
            with open(temporary, "wb", opener=inside(folder)) as file:
                pq.write_table(
                    table,
                    file,
                    compression="zstd",
                    compression_level=_ZSTD,
                    use_dictionary=[RUN],
                    # Values of float64 repeat as a whole.
                    use_byte_stream_split=[
                        column.name + ".list.element" * len(column.shape)
                        for column in columns_of(table.schema)
                        if column.dtype == "float32" and not column.is_large
                    ],
                    write_page_checksum=True,
                    row_group_size=_ROW_GROUP,
                    data_page_size=_PAGE_BYTES,
                )
                file.flush()
                os.fsync(file.fileno())
            if like is not None:
                time = os.stat(like, dir_fd=folder).st_mtime_ns
                os.utime(temporary, ns=(time, time), dir_fd=folder)
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            remove(temporary, folder)
            raise


@contextmanager
def naming_deleted(folder: Path) -> Iterator[None]:
    """Say where a folder was that others deleted, itself or files in it."""
    try:
        yield
    except FileNotFoundError as error:
        text = "The folder or files in it were deleted while they were written"
        error.args = (error.errno, text)
        error.strerror, error.filename = text, str(folder)
        raise


def inside(folder: int) -> Callable[[str, int], int]:
    """Return an ``opener`` of ``open`` for names in a folder, by its descriptor."""
    return partial(os.open, mode=0o666, dir_fd=folder)


def remove(name: str, folder: int) -> None:
    """Remove a file that may not be there."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def read_table(file: Any, name: str | Path) -> pa.Table:
    """Read a path or an open file, and compare the checksums of its pages."""
    with (
        naming(name),
        pq.ParquetFile(file, page_checksum_verification=True) as parquet,
    ):
        return parquet.read()


def read_about(
    path: Path, file: Any = None
) -> tuple[tuple[Column, ...], dict[str, Any]]:
    """Read the columns of a file and what its writer said about it.

    ``file`` is open if it is not on this machine.
    """
    with naming(path):
        schema = pq.read_schema(file or path)
        return columns_of(schema), json_of(schema)


@contextmanager
def naming(path: str | Path, cure: str = _CURE) -> Iterator[None]:
    """Name the file in any error raised inside, and what to do if it is damaged."""
    try:
        yield
    except FileNotFoundError:
        raise
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    except Exception as error:  # Building a space can raise anything.
        raise DatasetError(
            f"{path} cannot be read, or is damaged: {type(error).__name__}: {error}. "
            f"If it is damaged, {cure}."
        ) from error


def check_kind(place: str | Path, there: Any, here: Any) -> None:
    """Refuse to add what is described by JSON values ``here`` to a dataset."""
    text = difference(there, here)
    if text:
        raise ValueError(
            f"{place} holds a dataset of another kind: {text}. Choose another place."
        )
