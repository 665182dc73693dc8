"""Reads the tensors of a dataset through memory maps; no file stays open."""

import math
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.buffers.layout import VALID
from marl_collect.core.description import Key
from marl_collect.storage.checks import (
    DatasetError,
    Folder,
    check_sum,
    dtype_of,
    naming,
    tensor_file,
    tensor_parts,
)
from marl_collect.storage.compression import CODECS
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.index import (
    EPISODES,
    FILES,
    Index,
    KeyField,
    StoredFile,
    read_files,
)
from marl_collect.storage.packed import PackedFile, root_of, unpack
from marl_collect.storage.ranges import Range, range_of

_MOST: Final = 16_000
"""Number of maps that are kept. Linux allows a process 65,530 by default."""
_DONE: Final = ("next", "done")


@final
@dataclass(frozen=True)
class _Batch:
    """The mapped files of a batch.

    Attributes:
        raw: raw numbers by key, ``[B * T, ...]``.
        packed: packed files by key, including the roots of wanted keys.
        wanted: the packed keys to read.
    """

    raw: Mapping[Key, torch.Tensor]
    packed: Mapping[Key, PackedFile]
    wanted: tuple[Key, ...]


@final
class MappedBatches:
    """The tensors of batches by key, mapped on first use.

    Attributes:
        name: of the dataset in messages.
        folders: the folder of each batch.
        index: all batches.
        keys: the mapped keys.
    """

    def __init__(
        self,
        name: str,
        folders: Sequence[Folder],
        index: Index,
        keys: tuple[KeyField, ...] | None = None,
    ) -> None:
        """Prepare the maps; nothing is mapped yet."""
        self.name = name
        self.folders = folders
        self.index = index
        self.keys = index.keys if keys is None else keys
        self._maps: OrderedDict[int, _Batch] = OrderedDict()
        self._checked: dict[tuple[int, Key], tuple[int, ...]] = {}
        """Raw files whose checksums were right, and which files they were."""
        self._most = max(1, _MOST // max(1, len(self.keys)))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without maps; another process creates its own."""
        return self.__dict__ | {"_maps": OrderedDict()}

    def select(self, *keys: str | Key) -> "MappedBatches":
        """Return the same batches with these keys, and those below them, only.

        Raises:
            KeyError: if a key does not exist.
        """
        wanted = [(key,) if isinstance(key, str) else tuple(key) for key in keys]
        for key in wanted:
            if not any(field.key[: len(key)] == key for field in self.keys):
                found = ", ".join("/".join(field.key) for field in self.keys)
                raise KeyError(
                    f"There is no key {'/'.join(key)} in {self.name}; it has {found}."
                )
        chosen = tuple(
            field
            for field in self.keys
            if any(field.key[: len(key)] == key for key in wanted)
        )
        return MappedBatches(self.name, self.folders, self.index, chosen)

    def read(
        self,
        batch: int,
        numbers: NDArray[np.int64],
        out: Mapping[Key, torch.Tensor],
        places: NDArray[np.int64],
    ) -> None:
        """Copy frames of a batch.

        Args:
            batch: index of the batch.
            numbers: positions ``row * T + frame``, ``[n]``.
            out: memory ``[m, ...]`` of every key.
            places: position in ``out`` of each frame, ``[n]``.
        """
        mapped = self._mapped(batch)
        chosen, targets = torch.from_numpy(numbers), torch.from_numpy(places)
        for key, tensor in mapped.raw.items():
            out[key].index_copy_(0, targets, tensor.index_select(0, chosen))
        unpack(mapped.packed, mapped.wanted, numbers, out, places)

    def read_range(
        self, batch: int, begin: int, end: int, out: Mapping[Key, torch.Tensor], at: int
    ) -> None:
        """Copy consecutive frames of a batch.

        Args:
            batch: index of the batch.
            begin: position ``row * T + frame`` of the first frame.
            end: position after the last frame.
            out: memory ``[m, ...]`` of every key.
            at: position in ``out`` of the first frame.
        """
        mapped = self._mapped(batch)
        for key, tensor in mapped.raw.items():
            out[key][at : at + end - begin] = tensor[begin:end]
        places = np.arange(at, at + end - begin)
        unpack(mapped.packed, mapped.wanted, np.arange(begin, end), out, places)

    def whole(
        self, batch: int, keys: Sequence[KeyField] | None = None
    ) -> dict[Key, torch.Tensor]:
        """Return tensors ``[B, T, ...]`` of a batch, which the caller may change.

        Raw keys are mapped copy-on-write: writes stay in the memory of this process.

        Raises:
            DatasetError: if a file is missing, damaged, a link, or of the wrong size.
        """
        keys = self.keys if keys is None else keys
        mapped = self._map(batch, keys)
        size, length = self.index.batches[batch].shape
        every = np.arange(size * length)
        packed = {
            field.key: torch.empty(
                (len(every), *field.shape), dtype=dtype_of(field.dtype)
            )
            for field in keys
            if field.key in mapped.wanted
        }
        unpack(mapped.packed, mapped.wanted, every, packed, every)
        found = dict(mapped.raw) | packed
        return {
            field.key: found[field.key].view(size, length, *field.shape)
            for field in keys
        }

    def tensor(self, batch: int, field: KeyField) -> torch.Tensor:
        """Return one tensor of a batch; like ``whole``."""
        return self.whole(batch, [field])[field.key]

    def _mapped(self, batch: int) -> "_Batch":
        found = self._maps.pop(batch, None)
        if found is None:
            found = self._map(batch, self.keys)
            while len(self._maps) >= self._most:
                self._maps.popitem(last=False)
        self._maps[batch] = found
        return found

    def _map(self, batch: int, keys: Sequence[KeyField]) -> "_Batch":
        entry = self.index.batches[batch]
        files = read_files(self.folders[batch], entry)
        packed_keys = {key for key, file in files.items() if file.codec is not None}
        raw: dict[Key, torch.Tensor] = {}
        wanted = []
        for field in keys:
            if field.key in packed_keys:
                wanted.append(field.key)
            else:
                raw[field.key] = self._raw(batch, field, files.get(field.key))
        needed = {*wanted, *(root_of(key, packed_keys) for key in wanted)}
        packed = {
            field.key: self._packed(batch, field, files[field.key])
            for field in self.index.keys
            if field.key in needed
        }
        return _Batch(raw, packed, tuple(wanted))

    def _raw(
        self, batch: int, field: KeyField, file: StoredFile | None
    ) -> torch.Tensor:
        """Map a raw file, ``[B * T, ...]``, copy-on-write; it is never written to."""
        entry, folder = self.index.batches[batch], self.folders[batch]
        count, dtype = math.prod(entry.shape), dtype_of(field.dtype)
        nbytes = count * field.nbytes
        if not nbytes:  # An empty tensor has no file.
            return torch.empty((count, *field.shape), dtype=dtype)
        if file is None and entry.checksums:
            raise DatasetError(
                f"{folder.named(entry.name, FILES)} does not list "
                f"{'/'.join(field.key)}."
            )
        path = tensor_file(folder, entry.name, field.key, nbytes)
        name = folder.named(entry.name, *tensor_parts(field.key, "memmap"))
        with naming(name, f"a readable file of {nbytes:,} bytes"):
            # Not shared: opened read-only, mapped privately, and closed again.
            flat = torch.from_file(
                str(path), shared=False, size=nbytes // dtype.itemsize, dtype=dtype
            )
        status = path.lstat()
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        if file is not None and self._checked.get((batch, field.key)) != now:
            content: Any = flat.view(torch.uint8).numpy()
            check_sum(name, zlib.crc32(content), file.checksum)
            self._checked[batch, field.key] = now
        return flat.view(count, *field.shape)

    def _packed(self, batch: int, field: KeyField, file: StoredFile) -> PackedFile:
        entry, folder = self.index.batches[batch], self.folders[batch]
        codec = file.codec or ""
        if codec not in CODECS:
            raise DatasetError(
                f"{folder.named(entry.name, FILES)} names the codec {codec!r}, which "
                "this version of marl_collect does not have. Install a newer one."
            )
        path = tensor_file(folder, entry.name, field.key, file.nbytes, codec)
        name = folder.named(entry.name, *tensor_parts(field.key, codec))
        with naming(name, "a packed file"):
            found = PackedFile(path, entry.shape, codec, name)
        check_sum(name, found.checksum(), file.checksum)
        return found

    def ranges(self, batch: int) -> dict[Key, Range]:
        """Return the range of each key in the valid frames of a batch.

        The writer notes them. Where an earlier version wrote the batch, they are
        computed from its tensors.
        """
        files = read_files(self.folders[batch], self.index.batches[batch])
        found = {}
        for field in self.keys:
            file = files.get(field.key)
            noted = None if file is None else file.range
            if noted is None:
                noted = range_of(self.tensor(batch, field), self.valid_frames(batch))
            found[field.key] = noted
        return found

    def verify(self, batch: int) -> None:
        """Check every file of a batch, without decoding frames.

        Raises:
            DatasetError: if a file is missing, damaged, a link, or of the wrong size.
        """
        for field in self.keys:
            self._checked.pop((batch, field.key), None)
        for file in self._map(batch, self.keys).packed.values():
            file.verify()

    def valid_frames(self, batch: int) -> list[int]:
        """Return the number of valid frames of each row; they are the first ones.

        Raises:
            DatasetError: if the batch's mask contradicts the index.
        """
        entry = self.index.batches[batch]
        size, frames = entry.shape
        for field in self.index.keys:
            if field.key == VALID and entry.frames < size * frames:
                mask = self.tensor(batch, field).view(torch.uint8)
                counts = mask.sum(-1, dtype=torch.int64)
                prefix = torch.arange(frames) < counts[:, None]
                if int(counts.sum()) != entry.frames or not torch.equal(
                    mask, prefix.view(torch.uint8)
                ):
                    parts = tensor_parts(VALID, "memmap")
                    name = self.folders[batch].named(entry.name, *parts)
                    raise DatasetError(
                        f"{name} does not mark the first frames of each row, "
                        f"{entry.frames} in all, as the index says."
                    )
                return counts.tolist()
        return [frames] * size

    def check_ends(self, batch: int, episodes: Sequence[EndedEpisode]) -> None:
        """Check that the listed episodes of a batch end where the list says.

        Raises:
            DatasetError: if one does not. The message names the list.
        """
        done = next((f for f in self.index.keys if f.key == _DONE), None)
        if done is None or not episodes:
            return
        ends = torch.tensor([(e.environment, e.frame) for e in episodes]).T
        if not bool(self.tensor(batch, done)[ends[0], ends[1]].all()):
            entry = self.index.batches[batch]
            raise DatasetError(
                f"{self.folders[batch].named(entry.name, EPISODES)} says that an "
                "episode ends where ('next', 'done') is False."
            )
