"""Statistics of a dataset: returns, lengths, ranges and moments of keys."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Key


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

    Its means have the names that ``Evaluation`` and ``collector.stats()`` have too.

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

    @property
    def mean_team_return(self) -> float:
        """Mean over episodes of the sum over agents; NaN without episodes."""
        return math.nan if self.team_return is None else self.team_return.mean

    @property
    def mean_agent_return(self) -> float:
        """Mean over episodes and agents; NaN without episodes."""
        count = sum(map(len, self.returns.values()))
        return self.mean_team_return / count if count else math.nan

    @property
    def mean_group_returns(self) -> dict[str, float]:
        """Mean over episodes and the agents of each group, by group."""
        means = self.mean_returns.items()
        return {group: sum(agents) / len(agents) for group, agents in means}

    @property
    def mean_returns(self) -> dict[str, list[float]]:
        """Mean over episodes of each agent's return, by group."""
        return {
            group: [agent.mean for agent in agents]
            for group, agents in self.returns.items()
        }

    @property
    def mean_length(self) -> float:
        """Mean over episodes of the number of frames; NaN without episodes."""
        return math.nan if self.lengths is None else self.lengths.mean

    @classmethod
    def of(
        cls,
        lengths: NDArray[np.int64],
        returns: Mapping[str, NDArray[np.float64]],
        ranges: Mapping[Key, Range],
    ) -> Self:
        """Summarise episodes.

        Args:
            lengths: of the episodes, ``[n]``.
            returns: of each agent, ``[n, n_agents]``, by group.
            ranges: of each key.
        """
        if not len(lengths):
            return cls(0, None, {}, None, ranges)
        team = np.sum([values.sum(1) for values in returns.values()], 0)
        agents = {
            group: tuple(map(Summary.of, values.T)) for group, values in returns.items()
        }
        return cls(len(lengths), Summary.of(team), agents, Summary.of(lengths), ranges)

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
