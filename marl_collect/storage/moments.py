"""Mean and standard deviation of keys, kept in the cache."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import torch

from marl_collect.core.description import Key


@final
@dataclass(frozen=True)
class Moments:
    """Describes the values of a key.

    Attributes:
        mean: of each element, float32.
        std: standard deviation of each element, float32.
    """

    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    def of(cls, count: int, total: torch.Tensor, squares: torch.Tensor) -> Self:
        """Return the moments of values, from their number and sums in float64."""
        mean = total / count
        variance = (squares / count - mean.square()).clamp(min=0)
        return cls(mean.float(), variance.sqrt().float())

    def to_json(self) -> list[Any]:
        """Return the moments as JSON values, which may be NaN."""
        return [self.mean.tolist(), self.std.tolist()]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Return the moments from the output of ``to_json``."""
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device="cpu") for values in data
        )
        return cls(mean, std)


def moments_of(
    parts: Iterable[Mapping[Key, torch.Tensor]], groups: Iterable[str]
) -> dict[Key, Moments]:
    """Return the moments over frames, and over the agents of groups.

    Args:
        parts: of frames, ``[n, ...]`` for each key.
        groups: names of the groups.
    """
    sums: dict[Key, list[Any]] = {}
    names = set(groups)
    for part in parts:
        for key, tensor in part.items():
            values = tensor.double()
            if key[0] in names:
                values = values.flatten(0, 1)
            added = len(values), values.sum(0), values.square().sum(0)
            before = sums.get(key, [0, 0, 0])
            sums[key] = [a + b for a, b in zip(before, added, strict=True)]
    return {key: Moments.of(*values) for key, values in sums.items()}
