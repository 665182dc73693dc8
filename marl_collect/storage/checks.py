"""Checks a dataset's files before they are read.

All readers use this module, so a damaged, missing or replaced file raises an error that
names it. Nothing here opens a file for writing.
"""

import json
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from marl_collect.core.description import Key

_UNSAFE = re.compile(r'[/<>:"|?*\\ %\x00-\x1f\x7f]')


class DatasetError(ValueError):
    """A file of a dataset is damaged, missing, or contradicts the index."""


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

    def named(self, *parts: str) -> str:
        """Return the name of a file for messages."""
        return str(self.path.joinpath(*parts))

    def files(self, batch: str) -> list[tuple[str, ...]]:
        """Return the paths of all files of a batch, in this folder."""
        found = []
        for parent, _, names in os.walk(self.path / batch):
            parts = Path(parent).relative_to(self.path).parts
            found += [(*parts, name) for name in names]
        return sorted(found)

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name, which may be a broken link."""
        return os.path.lexists(self.path / name)

    def locate(self, parts: Sequence[str]) -> tuple[Path, os.stat_result]:
        """Find a file of the dataset; neither it nor its folders may be links.

        Raises:
            DatasetError: if it is missing, a link, or not a regular file.
        """
        path = self.path
        status = None
        for part in parts:
            path = path / part
            try:
                status = os.lstat(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise DatasetError(
                    f"{path} is missing, but the dataset's index needs it."
                ) from error
            if stat.S_ISLNK(status.st_mode):
                raise DatasetError(
                    f"{path} is a symbolic link. A dataset is read without following "
                    "links: put the file itself there."
                )
        if status is None or not stat.S_ISREG(status.st_mode):
            raise DatasetError(f"{path} is not a regular file.")
        return path, status


def read_text(folder: Folder, parts: Sequence[str], checksum: int | None = None) -> str:
    """Read a text file of a dataset.

    Args:
        folder: of the dataset.
        parts: path of the file in it.
        checksum: CRC-32 of its content; None if it is not known.

    Raises:
        DatasetError: if it is missing, a link, damaged or not UTF-8.
    """
    path, _ = folder.locate(parts)
    content = path.read_bytes()
    name = folder.named(*parts)
    if checksum is not None:
        check_sum(name, zlib.crc32(content), checksum)
    with naming(name, "UTF-8 text"):
        return content.decode("utf-8")


def read_json(
    folder: Folder, parts: Sequence[str], what: str, checksum: int | None = None
) -> Any:
    """Parse a JSON file of a dataset; like ``read_text``.

    Raises:
        DatasetError: if it is missing, a link, damaged, not UTF-8 or not JSON.
    """
    text = read_text(folder, parts, checksum)
    with naming(folder.named(*parts), what):
        return json.loads(text)


def check_sum(path: str | Path, found: int, expected: int) -> None:
    """Compare the checksum of a file.

    Raises:
        DatasetError: if it is wrong.
    """
    if found != expected:
        raise DatasetError(
            f"{path} is damaged: its checksum is {found:08x}, not {expected:08x}. "
            "Restore the file from a copy."
        )


def tensor_file(
    folder: Folder, batch: str, key: Key, nbytes: int, suffix: str = "memmap"
) -> Path:
    """Find the file of a tensor.

    Args:
        folder: of the dataset.
        batch: name of the batch's folder.
        key: of the tensor.
        nbytes: how large the file must be.
        suffix: of the file.

    Raises:
        DatasetError: if the file is missing, a link, or of another size.
    """
    parts = [batch, *tensor_parts(key, suffix)]
    path, status = folder.locate(parts)
    if status.st_size != nbytes:
        raise DatasetError(
            f"{folder.named(*parts)} has {status.st_size:,} bytes, but the index says "
            f"{nbytes:,}: the file was truncated or changed."
        )
    return path


def tensor_parts(key: Key, suffix: str) -> list[str]:
    """Return the path of a tensor's file in the folder of its batch."""
    return [*map(encode_name, key[:-1]), f"{encode_name(key[-1])}.{suffix}"]


def encode_name(name: str) -> str:
    """Return the file name of one part of a key, as TensorDict.memmap writes it."""
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", name)


def key_of(data: Any) -> Key:
    """Check a key: strings that do not lead out of the dataset's folder."""
    if not isinstance(data, list) or not data:
        raise DatasetError(f"{data!r} is not a key: a key is a list of strings.")
    for part in data:
        if not isinstance(part, str) or part.startswith("/"):
            raise DatasetError(f"{data!r} is not a key of a batch.")
        if not {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", part)):
            raise DatasetError(f"{data!r} is not a key of a batch.")
    return tuple(data)


def dtype_of(name: Any) -> torch.dtype:
    """Return the dtype of a name such as ``"float32"``."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise DatasetError(f"{name!r} is not a dtype of torch.")
    return dtype


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
