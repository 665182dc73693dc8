"""Maps the tensors of a dataset's batches into memory; files do not stay open."""

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final, final

import torch

from marl_collect.description import Key
from marl_collect.layout import VALID
from marl_collect.storage.index import Index, KeyField

_MOST: Final = 16_000
"""Maps that are kept, of the 65,530 that Linux allows a process by default."""


def map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Map raw numbers copy-on-write: what is written into the tensor stays here."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    flat = torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    return flat.view(shape)


@final
class MappedBatches:
    """The tensors of batches by key, mapped when they are first asked for.

    Attributes:
        path: the dataset's folder.
        index: its contents.
        keys: which keys are mapped.
    """

    def __init__(
        self, path: Path, index: Index, keys: tuple[KeyField, ...] | None = None
    ) -> None:
        """Map nothing yet."""
        self.path = path
        self.index = index
        self.keys = index.keys if keys is None else keys
        self._maps: OrderedDict[int, dict[Key, torch.Tensor]] = OrderedDict()
        self._most = max(1, _MOST // max(1, len(self.keys)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the maps behind: another process makes its own."""
        return self.__dict__ | {"_maps": OrderedDict()}

    def select(self, *keys: str | Key) -> "MappedBatches":
        """Return the same batches with these keys, and those below them, only.

        Raises:
            KeyError: for a key that is not there.
        """
        wanted = [(key,) if isinstance(key, str) else tuple(key) for key in keys]
        for key in wanted:
            if not any(field.key[: len(key)] == key for field in self.keys):
                found = ", ".join("/".join(field.key) for field in self.keys)
                raise KeyError(f"There is no {'/'.join(key)} in {self.path}: {found}.")
        chosen = tuple(
            field
            for field in self.keys
            if any(field.key[: len(key)] == key for key in wanted)
        )
        return MappedBatches(self.path, self.index, chosen)

    def tensors(self, batch: int) -> dict[Key, torch.Tensor]:
        """Return the tensors ``[B, T, ...]`` of a batch: not to be written to."""
        found = self._maps.pop(batch, None)
        if found is None:
            found = {field.key: self.tensor(batch, field) for field in self.keys}
            while len(self._maps) >= self._most:
                self._maps.popitem(last=False)
        self._maps[batch] = found
        return found

    def tensor(self, batch: int, field: KeyField) -> torch.Tensor:
        """Map one tensor of a batch, ``[B, T, ...]``."""
        entry = self.index.batches[batch]
        file = Path(*field.key[:-1], f"{field.key[-1]}.memmap")
        return map_file(
            self.path / entry.name / file,
            (*entry.shape, *field.shape),
            getattr(torch, field.dtype),
        )

    def valid_frames(self, batch: int) -> list[int]:
        """Return how many frames of each row of a batch count, always the first."""
        size, frames = self.index.batches[batch].shape
        for field in self.index.keys:
            if field.key == VALID and self.index.batches[batch].frames < size * frames:
                return self.tensor(batch, field).sum(-1).tolist()
        return [frames] * size
