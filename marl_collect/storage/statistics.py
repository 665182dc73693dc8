"""Statistics of a dataset: returns, lengths, and the range of every key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, final

from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Key
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.ranges import Range


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
    def of(cls, episodes: EpisodeTable, ranges: Iterable[Mapping[Key, Range]]) -> Self:
        """Summarise episodes, and join the ranges of batches."""
        joined: dict[Key, Range] = {}
        for batch in ranges:
            for key, found in batch.items():
                joined[key] = joined.get(key, Range()).joined(found)
        if not episodes:
            return cls(0, None, {}, None, joined)
        return cls(
            len(episodes),
            Summary.of(episodes.team_returns),
            {
                group: tuple(map(Summary.of, values.T))
                for group, values in episodes.returns.items()
            },
            Summary.of(episodes.length),
            joined,
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
