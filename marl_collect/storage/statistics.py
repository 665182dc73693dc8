"""Ranges and moments of keys."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
import torch

from marl_collect.core.description import Key


@final
@dataclass(frozen=True)
class Range:
    """The range of the values of a tensor.

    Attributes:
        low: the lowest value; None if there is none, or all are NaN.
        high: the highest value.
        nans: how many values are NaN; they are left out.
    """

    low: float | None = None
    high: float | None = None
    nans: int = 0

    def joined(self, values: torch.Tensor) -> Self:
        """Return the range of further values too."""
        if values.is_complex():
            return self
        is_float = values.is_floating_point()  # NumPy has no bfloat16.
        array = (values.double() if is_float else values).numpy()
        nans = int(np.isnan(array).sum()) if is_float else 0
        known = array[~np.isnan(array)] if nans else array
        ends = [end for end in (self.low, self.high) if end is not None]
        if known.size:
            ends += [known.min().item(), known.max().item()]
        low, high = min(ends, default=None), max(ends, default=None)
        return replace(self, low=low, high=high, nans=self.nans + nans)


@final
@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of each element of a key, float32."""

    mean: torch.Tensor
    std: torch.Tensor


def moments_of(
    parts: Iterable[Mapping[Key, torch.Tensor]], groups: Iterable[str]
) -> dict[Key, Moments]:
    """Return the moments over frames ``[n, ...]``, and over the agents of groups.

    The variances of parts are joined, because ``E[x^2] - E[x]^2`` loses digits.
    """
    moments: dict[Key, tuple[int, torch.Tensor, torch.Tensor]] = {}
    names = set(groups)
    for part in parts:
        for key, tensor in part.items():
            if tensor.is_complex():
                raise ValueError(f"{key} is complex: moments are of real numbers.")
            values = tensor.double()
            if key[key[0] == "next"] in names:
                values = values.flatten(0, 1)
            variance = mean = values.new_zeros(values.shape[1:])
            if values.numel():  # Otherwise torch warns.
                variance, mean = torch.var_mean(values, 0, correction=0)
            count, mean_before, before = moments.get(key, (0, mean, variance))
            total, apart = count + len(values), mean - mean_before
            share = len(values) / total
            variance = before * (1 - share) + variance * share
            variance += apart.square() * share * (1 - share)
            moments[key] = total, mean_before + apart * share, variance
    return {
        key: Moments(mean.float(), variance.sqrt().float())
        for key, (_, mean, variance) in moments.items()
    }
