"""Reads datasets of the format versions 1 and 2, for ``compact`` only.

Such a dataset is a folder ``batch-NNNNNN`` per batch, with a file per key, and
``index.json``. This module can be removed when nobody has such datasets any more.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError, Folder, dtype_of, naming
from marl_collect.storage.compression import load_codec
from marl_collect.storage.description import DatasetDescription, RunDescription
from marl_collect.storage.index import OLD_INDEX, KeyField, keys_from_json

_READABLE: Final = (1, 2)


@final
class OldDataset:
    """A dataset of format version 1 or 2.

    Attributes:
        description: task, groups and spaces.
        keys: key, shape of a frame, and dtype of every tensor.
    """

    def __init__(self, path: Path) -> None:
        """Read the index.

        Raises:
            DatasetError: if it is damaged, or of another version.
        """
        self._path = path
        content = Folder(path).read(OLD_INDEX)
        with naming(path / OLD_INDEX, "an index of a dataset"):
            data = json.loads(content)
            if data["format_version"] not in _READABLE:
                raise DatasetError(f"this is version {data['format_version']}.")
            begin = content.rfind(b'"checksum"')
            if data.get("checksum") not in (None, f"{zlib.crc32(content[:begin]):08x}"):
                raise DatasetError("its checksum is wrong: it was damaged.")
            self.description = DatasetDescription.from_json(data)
            self.keys = keys_from_json(data["keys"])
            self._runs = [RunDescription.from_json(run) for run in data["runs"]]
            self._batches: list[Any] = data["batches"]

    def batches(self) -> Iterator[tuple[RunDescription, int, dict[Key, torch.Tensor]]]:
        """Yield each batch: its run, its number, and tensors ``[B, T, ...]`` by key.

        The numbers have a gap where a batch is missing.

        Raises:
            DatasetError: if a file is missing or damaged. It names the file.
        """
        for entry in self._batches:
            with naming(self._path / str(entry["name"]), "a batch"):
                number = int(entry["name"].removeprefix("batch-"))
                yield self._runs[entry["run"]], number, self._tensors(number, entry)

    def _tensors(
        self, number: int, entry: Mapping[str, Any]
    ) -> dict[Key, torch.Tensor]:
        folder = f"batch-{number:06d}"
        sums = entry.get("checksums", {})
        files: dict[Key, Mapping[str, Any]] = {}
        if "files.json" in sums:
            listed = self._read(folder, "files.json")
            _check(folder, "files.json", zlib.crc32(listed), sums["files.json"])
            files = {tuple(item["key"]): item for item in json.loads(listed)}
        size, length = entry["shape"]
        packed: dict[Key, _Packed] = {}
        tensors: dict[Key, torch.Tensor] = {}
        # A frame under `next` may be stored as the root's following one.
        for field in sorted(self.keys, key=lambda field: field.key[0] == "next"):
            file = files.get(field.key, {"codec": None, "checksum": None})
            codec = file["codec"]
            name = "/".join(map(_encoded, field.key)) + f".{codec or 'memmap'}"
            if not field.nbytes * size * length:
                content = np.empty(0, np.uint8)
            elif codec is None:
                content = np.frombuffer(self._read(folder, name), np.uint8)
                if file["checksum"] is not None:
                    _check(folder, name, zlib.crc32(content.data), file["checksum"])
            else:
                data = self._read(folder, name)
                packed[field.key] = _Packed(data, size * length, codec, field)
                _check(folder, name, packed[field.key].checksum, file["checksum"])
                content = packed[field.key].frames(packed.get(field.key[1:]))
            if content.size != field.nbytes * size * length:
                raise DatasetError(f"{name} has {content.size:,} bytes.")
            tensor = torch.from_numpy(content.copy()).view(dtype_of(field.dtype))
            tensors[field.key] = tensor.view(size, length, *field.shape)
        return tensors

    def _read(self, folder: str, name: str) -> bytes:
        path = self._path / folder / name
        for part in (path, *path.parents):
            if part == self._path:
                break
            if part.is_symlink():
                raise DatasetError(f"{part} is a symbolic link.")
        if not path.is_file():
            raise DatasetError(f"{path} is missing.")
        return path.read_bytes()


@final
class _Packed:
    """A file of frames that were compressed one by one."""

    def __init__(self, data: bytes, count: int, codec: str, field: KeyField) -> None:
        self._ends = np.frombuffer(data, "<u8", count).tolist()
        self._sums = np.frombuffer(data, "<u4", count, 8 * count).tolist()
        self._stored = memoryview(data)[12 * count :]
        self._decode = load_codec(codec)[1]
        self._field = field
        self.checksum = zlib.crc32(data[: 12 * count])

    def frames(self, root: "_Packed | None") -> NDArray[np.uint8]:
        """Return all frames; one without bytes is the following frame of ``root``."""
        count = len(self._ends)
        out = np.empty((count, self._field.nbytes), np.uint8)
        for number in range(count):
            begin = self._ends[number - 1] if number else 0
            if begin < self._ends[number]:
                self.read(number, out[number])
            elif root is None:
                raise DatasetError("A frame is missing.")
            else:
                root.read(number + 1, out[number])
        return out.reshape(-1)

    def read(self, number: int, out: NDArray[np.uint8]) -> None:
        """Read one stored frame."""
        begin = self._ends[number - 1] if number else 0
        stored = self._stored[begin : self._ends[number]]
        if zlib.crc32(stored) != self._sums[number]:
            raise DatasetError(f"Frame {number} of {self._field.key} is damaged.")
        self._decode(stored, out)


def _encoded(name: str) -> str:
    """Return one part of a key as a file name, as tensordict writes it."""
    return "".join(
        f"%{ord(c):02X}" if c in '/<>:"|?*\\ %' or ord(c) in {*range(32), 127} else c
        for c in name
    )


def _check(folder: str, name: str, checksum: int, expected: int) -> None:
    if checksum != expected:
        raise DatasetError(f"{folder}/{name} is damaged: its checksum is wrong.")
