"""Statistics of a dataset: returns, lengths, ranges and moments of keys."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, final

import numpy as np
import torch
from numpy.typing import NDArray

from marl_collect.core.description import FLAGS, EnvDescription, Key


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
    """Describes one number per episode; ``std`` divides by the number of episodes."""

    mean: float
    std: float
    low: float
    high: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Summarise at least one value, ``[n]``."""
        return cls(*(float(f(values)) for f in (np.mean, np.std, np.min, np.max)))


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
        """Summarise ``n`` episodes; returns are ``[n, n_agents]``."""
        if not len(lengths):
            return cls(0, None, {}, None, ranges)
        team = np.sum([values.sum(1) for values in returns.values()], 0)
        agents = {
            group: tuple(map(Summary.of, values.T)) for group, values in returns.items()
        }
        return cls(len(lengths), Summary.of(team), agents, Summary.of(lengths), ranges)

    def main_ranges(self, environment: EnvDescription) -> dict[Key, Range]:
        """Return the ranges of observations, actions and rewards."""
        wanted = [
            *(key for key in environment.observed() if key[-1] not in FLAGS),
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
            if key[0] in names:
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
