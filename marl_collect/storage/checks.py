"""Checks a dataset's files before they are read.

All readers use this module, so a damaged, missing or replaced file raises an error that
names it. Nothing here opens a file for writing.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from marl_collect.core.description import Key

_DEEPEST: Final = 100
"""Parts of the longest key; TensorDicts are nested by recursion."""


class DatasetError(ValueError):
    """A file of a dataset is damaged, missing, or contradicts the journal."""


@contextmanager
def naming(path: str | Path, what: str) -> Iterator[None]:
    """Name the file in any error raised inside; an ``OSError`` already names it.

    Args:
        path: the file whose content is parsed inside.
        what: the expected content, such as ``"an index of a dataset"``.
    """
    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # Building a space can raise anything.
        raise DatasetError(f"{path} is not {what}: {error!r}.") from error


@dataclass(frozen=True)
class Folder:
    """The folder of a dataset.

    Attributes:
        path: absolute, so that ``chdir`` does not change it.
    """

    path: Path

    def local(self, name: str) -> Path:
        """Return where a file is on this machine."""
        return self.path / name

    def named(self, *parts: str) -> str:
        """Return the name of a file for messages."""
        return str(self.path.joinpath(*parts))

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name, which may be a broken link."""
        return os.path.lexists(self.path / name)

    def locate(self, name: str, size: int = 0) -> os.stat_result:
        """Find a file of the dataset, which may not be a link.

        Args:
            name: of the file.
            size: how many bytes it must have at least.

        Raises:
            DatasetError: if it is missing, a link, not a regular file, or too small.
        """
        try:
            status = os.lstat(self.local(name))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DatasetError(
                f"{self.named(name)} is missing, but the dataset needs it."
            ) from error
        if stat.S_ISLNK(status.st_mode):
            raise DatasetError(
                f"{self.named(name)} is a symbolic link. A dataset is read without "
                "following links: put the file itself there."
            )
        if not stat.S_ISREG(status.st_mode):
            raise DatasetError(f"{self.named(name)} is not a regular file.")
        if status.st_size < size:
            raise DatasetError(
                f"{self.named(name)} has {status.st_size:,} bytes, but the journal "
                f"lists {size:,}: the file was truncated or changed."
            )
        return status

    def read(self, name: str) -> bytes:
        """Read a file.

        Raises:
            DatasetError: if it is missing, a link, or not a regular file.
        """
        self.locate(name)
        return (self.path / name).read_bytes()

    def fetch(self, name: str, ranges: Iterable[tuple[int, int]]) -> None:
        """Make ranges of the bytes of a file readable; here they are already."""


def key_of(data: Any) -> Key:
    """Check a key: strings that do not lead out of the dataset's folder."""
    if not isinstance(data, list) or not 0 < len(data) <= _DEEPEST:
        raise DatasetError(
            f"{data!r} is not a key: a key is a list of 1 to {_DEEPEST} strings."
        )
    for part in data:
        if not isinstance(part, str) or part.startswith("/"):
            raise DatasetError(f"{data!r} is not a key of a batch.")
        if not {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", part)):
            raise DatasetError(f"{data!r} is not a key of a batch.")
    return tuple(data)


def integer(data: Mapping[str, Any], name: str, below: int | None = None) -> int:
    """Return an entry that must be a non-negative integer."""
    value = data[name]
    _check_size(name, value)
    if below is not None and value >= below:
        raise DatasetError(f"{name} is {value}, but must be less than {below}.")
    return int(value)


def shape_of(data: Any) -> tuple[int, ...]:
    """Return a shape: a list of non-negative integers."""
    if not isinstance(data, list):
        raise DatasetError(f"{data!r} is not a shape.")
    for size in data:
        _check_size("a size", size)
    return tuple(data)


def numbers(data: Any) -> tuple[float, ...]:
    """Return a list of numbers."""
    if not isinstance(data, list) or any(type(n) not in (int, float) for n in data):
        raise DatasetError(f"{data!r} is not a list of numbers.")
    return tuple(data)


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise DatasetError(
            f"{name} is {value!r}, but must be an integer of at least 0."
        )
