"""Maps the tensors of a dataset into memory; no file stays open."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch

from marl_collect.buffers.layout import VALID
from marl_collect.core.description import Key
from marl_collect.storage.checks import (
    DatasetError,
    dtype_of,
    naming,
    tensor_file,
)
from marl_collect.storage.episodes import EndedEpisode
from marl_collect.storage.index import EPISODES, Index, KeyField

_MOST: Final = 16_000
"""Number of maps that are kept. Linux allows a process 65,530 by default."""
_DONE: Final = ("next", "done")


@final
class MappedBatches:
    """The tensors of batches by key, mapped on first use.

    Attributes:
        path: the dataset's folder.
        index: its contents.
        keys: the mapped keys.
    """

    def __init__(
        self, path: Path, index: Index, keys: tuple[KeyField, ...] | None = None
    ) -> None:
        """Prepare the maps; nothing is mapped yet."""
        self.path = path
        self.index = index
        self.keys = index.keys if keys is None else keys
        self._maps: OrderedDict[int, dict[Key, torch.Tensor]] = OrderedDict()
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
                    f"There is no key {'/'.join(key)} in {self.path}; it has {found}."
                )
        chosen = tuple(
            field
            for field in self.keys
            if any(field.key[: len(key)] == key for key in wanted)
        )
        return MappedBatches(self.path, self.index, chosen)

    def tensors(self, batch: int) -> dict[Key, torch.Tensor]:
        """Return the tensors ``[B, T, ...]`` of a batch; they are read-only."""
        found = self._maps.pop(batch, None)
        if found is None:
            found = {field.key: self.tensor(batch, field) for field in self.keys}
            while len(self._maps) >= self._most:
                self._maps.popitem(last=False)
        self._maps[batch] = found
        return found

    def tensor(self, batch: int, field: KeyField) -> torch.Tensor:
        """Map one tensor of a batch, ``[B, T, ...]``, copy-on-write.

        The file is never opened for writing. Writes into the tensor stay in the memory
        of this process.

        Raises:
            DatasetError: if the file is missing, a link, or of the wrong size.
        """
        entry = self.index.batches[batch]
        shape, dtype = (*entry.shape, *field.shape), dtype_of(field.dtype)
        count = math.prod(shape)
        if not count:  # An empty tensor has no file.
            return torch.empty(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        path = tensor_file(self.path, entry.name, field.key, nbytes)
        with naming(path, f"a readable file of {nbytes:,} bytes"):
            # Not shared: opened read-only, mapped privately, and closed again.
            flat = torch.from_file(str(path), shared=False, size=count, dtype=dtype)
        return flat.view(shape)

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
                    name = self.path / entry.name / "/".join(VALID)
                    raise DatasetError(
                        f"{name}.memmap does not mark the first frames of each row, "
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
            path = self.path / self.index.batches[batch].name / EPISODES
            raise DatasetError(
                f"{path} says that an episode ends where ('next', 'done') is False."
            )
