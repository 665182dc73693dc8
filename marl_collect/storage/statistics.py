"""Statistics of a dataset: returns, lengths, and the range of every key.

Ranges of values are in the notes of each batch, so statistics read no frames.
"""

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

from numpy.typing import NDArray

from marl_collect.core.description import EnvDescription, Key
from marl_collect.storage.checks import DatasetError, integer
from marl_collect.storage.episodes import EpisodeTable
from marl_collect.storage.index import KeyField

_RANGE: Final = 1000
"""Bytes of the JSON text of a range, at most."""


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

    def joined(self, other: "Range") -> "Range":
        """Return the range of the values of both."""
        lows = [r.low for r in (self, other) if r.low is not None]
        highs = [r.high for r in (self, other) if r.high is not None]
        return Range(
            min(lows, default=None), max(highs, default=None), self.nans + other.nans
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; infinity is a string, because JSON has none."""
        return {
            "low": _number(self.low),
            "high": _number(self.high),
            "nans": self.nans,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the range from the output of ``to_json``."""
        low, high = (_value(data[name]) for name in ("low", "high"))
        return cls(low, high, integer(data, "nans"))


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
            for key, values in batch.items():
                joined[key] = joined.get(key, Range()).joined(values)
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


def read_notes(
    notes: bytes, episodes: int, keys: Sequence[KeyField], rewards: Mapping[str, int]
) -> tuple[EpisodeTable, dict[Key, Range]]:
    """Return the episodes of a batch, and the range of each key.

    Args:
        notes: as ``encode`` writes them.
        episodes: number of episodes.
        keys: of the batch.
        rewards: groups with rewards, each with its number of agents.

    Raises:
        Exception: if the notes are not of such a batch.
    """
    size = episodes * EpisodeTable.entry_size(rewards)
    # Damage is found by its checksum; this is a limit for what others have written.
    text = zlib.decompressobj().decompress(notes, size + len(keys) * _RANGE)
    table = EpisodeTable.from_bytes(text[:size], episodes, rewards)
    ranges = json.loads(text[size:])
    return table, {
        item.key: Range.from_json(data) for item, data in zip(keys, ranges, strict=True)
    }


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _value(data: Any) -> float | None:
    if data is None or type(data) in (int, float):
        return data
    if data in ("inf", "-inf"):
        return float(data)
    raise DatasetError(f"{data!r} is not the end of a range.")
