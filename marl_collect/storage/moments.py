"""Mean and standard deviation of keys, kept in a file beside the dataset."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, final

import torch

from marl_collect.core.atomic import write_atomically
from marl_collect.core.description import Key
from marl_collect.storage.checks import DatasetError, Folder, key_of, naming, numbers
from marl_collect.storage.remote import RemoteFolder

MOMENTS: Final = "moments.json"


@final
@dataclass(frozen=True)
class Moments:
    """Describes the values of a key.

    Attributes:
        mean: of each element.
        std: standard deviation of each element.
    """

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def of(
        cls, count: torch.Tensor, total: torch.Tensor, squares: torch.Tensor
    ) -> Self:
        """Return the moments of values, from their number and sums in float64."""
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        return cls(mean.float(), variance.sqrt().float())

    @property
    def plausible(self) -> bool:
        """Whether values without NaN and infinity can have these moments."""
        finite = self.mean.isfinite().all() and self.std.isfinite().all()
        return bool(finite and (self.std >= 0).all())


@final
@dataclass(frozen=True)
class MomentsFile:
    """The file with the moments of all frames of a folder.

    It is only a copy of what can be computed: a file that is missing, damaged, or of
    another state of the journal counts as empty, and failing to write it is no error.

    Attributes:
        folder: of the dataset.
        journal: bytes and checksum of the journal, which has checksums of all frames.
        shapes: shape of the moments of each key of the dataset.
    """

    folder: Folder
    journal: tuple[int, int]
    shapes: Mapping[Key, tuple[int, ...]]

    def read(self) -> dict[Key, Moments]:
        """Return the moments in the file, as float32."""
        try:
            content = self.folder.read(MOMENTS)
            with naming(self.folder.named(MOMENTS), "a file of moments"):
                return self._parse(content)
        except (DatasetError, OSError):
            return {}

    def _parse(self, content: bytes) -> dict[Key, Moments]:
        data = json.loads(content)
        if data["journal"] != list(self.journal):
            return {}
        moments = {}
        for item in data["moments"]:
            key = key_of(item["key"])
            lists = (numbers(item[name]) for name in ("mean", "std"))
            tensors = (torch.tensor(values, dtype=torch.float32) for values in lists)
            moments[key] = Moments(*(t.view(self.shapes[key]) for t in tensors))
            if not moments[key].plausible:
                raise DatasetError(f"the moments of {key!r} are impossible.")
        return moments

    def write(self, moments: Mapping[Key, Moments]) -> None:
        """Replace the file, except in an object store; NaN and infinity are left out.

        Processes that train together may do so at once: the last one wins.
        """
        if isinstance(self.folder, RemoteFolder):
            return
        items = [
            {"key": key} | {name: t.flatten().tolist() for name, t in vars(m).items()}
            for key, m in moments.items()
            if m.plausible
        ]
        content = json.dumps({"journal": self.journal, "moments": items})
        with suppress(OSError):  # The folder may be read-only, or the disk full.
            write_atomically(self.folder.path / MOMENTS, content)
