"""Reads datasets of the format versions 1 and 2, for ``compact`` only.

Such a dataset is a folder ``batch-NNNNNN`` per batch, with a file per key, and
``index.json``. This module can be removed when nobody has such datasets any more.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError, Folder, naming
from marl_collect.storage.formats.blocks import RunBatch, header_from_json
from marl_collect.storage.formats.hdf5 import encoded
from marl_collect.storage.frames import tensor_of
from marl_collect.storage.index import OLD_INDEX, Index, KeyField
from marl_collect.storage.packed import ENTRY, PackedFrames

_READABLE: Final = (1, 2)


def read_format2(path: Path) -> tuple[Index, Iterator[RunBatch]]:
    """Read a dataset of format version 1 or 2.

    Returns:
        What it holds, without the list of batches, and its batches.

    Raises:
        DatasetError: if a file is missing or damaged, or the dataset is of another
            version. It names the file.
    """
    content = Folder(path).read(OLD_INDEX)
    with naming(path / OLD_INDEX, "an index of a dataset"):
        data = json.loads(content)
        if data["format_version"] not in _READABLE:
            raise DatasetError(f"this is version {data['format_version']}.")
        begin = content.rfind(b'"checksum"')
        if data.get("checksum") not in (None, f"{zlib.crc32(content[:begin]):08x}"):
            raise DatasetError("its checksum is wrong: it was damaged.")
        contents = header_from_json(data | data["totals"])

    def batches() -> Iterator[RunBatch]:
        for entry in data["batches"]:
            with naming(path / str(entry["name"]), "a batch"):
                number = int(entry["name"].removeprefix("batch-"))
                tensors = _tensors(path, f"batch-{number:06d}", entry, contents.keys)
                yield contents.runs[entry["run"]], number, tensors

    return contents, batches()


def _tensors(
    path: Path, folder: str, entry: Mapping[str, Any], keys: Sequence[KeyField]
) -> dict[Key, torch.Tensor]:
    sums = entry.get("checksums", {})
    files: dict[Key, Mapping[str, Any]] = {}
    if "files.json" in sums:
        listed = _read(path, f"{folder}/files.json")
        _check(f"{folder}/files.json", listed, sums["files.json"])
        files = {tuple(item["key"]): item for item in json.loads(listed)}
    size, length = entry["shape"]
    contents: dict[Key, NDArray[np.uint8]] = {}
    # A frame under `next` may be stored as the root's following one.
    for field in sorted(keys, key=lambda field: field.key[0] == "next"):
        file = files.get(field.key, {"codec": None, "checksum": None})
        codec = file["codec"]
        name = "/".join([folder, *map(encoded, field.key)]) + f".{codec or 'memmap'}"
        if not field.nbytes * size * length:
            content = np.empty(0, np.uint8)
        elif codec is None:
            data = _read(path, name)
            if file["checksum"] is not None:
                _check(name, data, file["checksum"])
            content = np.frombuffer(data, np.uint8)
        else:
            data, table = _read(path, name), ENTRY * size * length
            _check(name, data[:table], file["checksum"])
            packed = PackedFrames.of(
                name, codec, data[:table], table, len(data) - table
            )
            root = contents.get(field.key[1:])
            content = _unpack(packed, memoryview(data), field.nbytes, root)
        if content.size != field.nbytes * size * length:
            raise DatasetError(f"{name} has {content.size:,} bytes.")
        contents[field.key] = content
    tensors = {}
    for field in keys:
        rows = contents[field.key].reshape(size * length, field.nbytes).copy()
        tensors[field.key] = tensor_of(field, rows).view(size, length, *field.shape)
    return tensors


def _unpack(
    packed: PackedFrames, data: memoryview, size: int, root: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    """Return the bytes of frames of ``size`` bytes that were compressed one by one.

    Args:
        packed: where they are in the file.
        data: content of the file.
        size: bytes of a frame.
        root: bytes of the root key; a frame without bytes is its following frame.
    """
    frames = np.empty((len(packed.ends), size), np.uint8)
    for number, follows in enumerate(packed.follows().tolist()):
        if not follows:
            packed.read(data, number, frames[number])
        elif root is None:
            raise DatasetError(f"Frame {number} of {packed.name} is missing.")
        else:
            frames[number] = root.reshape(frames.shape)[number + 1]
    return frames.reshape(-1)


def _read(path: Path, name: str) -> bytes:
    for part in (path / name, *(path / name).parents):
        if part == path:
            break
        if part.is_symlink():
            raise DatasetError(f"{part} is a symbolic link.")
    if not (path / name).is_file():
        raise DatasetError(f"{path / name} is missing.")
    return (path / name).read_bytes()


def _check(name: str, data: bytes, expected: int) -> None:
    if zlib.crc32(data) != expected:
        raise DatasetError(f"{name} is damaged: its checksum is wrong.")
