"""Statistics of a dataset: returns, lengths, and the range of every key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Key

if TYPE_CHECKING:
    from marl_collect.storage.trajectories import Trajectories


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
class Summary:
    """Describes one number per episode.

    Attributes:
        mean: arithmetic mean.
        std: standard deviation of the episodes, divided by ``n``.
        low: the lowest value.
        high: the highest value.
    """

    mean: float
    std: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Summarise at least one value, ``[n]``."""
        return cls(
            float(values.mean()),
            float(values.std()),
            float(values.min()),
            float(values.max()),
        )


@final
@dataclass(frozen=True)
class Statistics:
    """Statistics of a dataset.

    Attributes:
        episodes: number of complete episodes; without any, the next three are empty.
        team_return: sum of the rewards of all agents, per episode.
        returns: of each agent, by group.
        lengths: frames of an episode.
        ranges: lowest and highest value of each key, over all valid frames and agents.
    """

    episodes: int
    team_return: Summary | None
    returns: Mapping[str, tuple[Summary, ...]]
    lengths: Summary | None
    ranges: Mapping[Key, Range]

    @classmethod
    def of(cls, trajectories: "Trajectories", ranges: Mapping[Key, Range]) -> Self:
        """Summarise episodes."""
        count = len(trajectories)
        if not count:
            return cls(0, None, {}, None, ranges)
        return cls(
            count,
            Summary.of(trajectories.returns),
            {
                group: tuple(map(Summary.of, values.T))
                for group, values in trajectories.agent_returns.items()
            },
            Summary.of(trajectories.lengths),
            ranges,
        )

    def main_ranges(self, environment: EnvDescription) -> dict[Key, Range]:
        """Return the ranges of observations, actions and rewards."""
        flags = ("done", "terminated", "truncated")
        wanted = [
            *(key for key in environment.observed() if key[-1] not in flags),
            *environment.actions(),
            *(("next", *key) for key in environment.outcome()),
        ]
        return {key: self.ranges[key] for key in wanted if key in self.ranges}


def ranges_of(parts: Iterable[Mapping[Key, torch.Tensor]]) -> dict[Key, Range]:
    """Return the range of each key over frames, which come in parts."""
    ranges: dict[Key, Range] = {}
    for part in parts:
        for key, values in part.items():
            ranges[key] = ranges.get(key, Range()).joined(values)
    return ranges
