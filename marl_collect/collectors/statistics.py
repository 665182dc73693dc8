"""Counters of a collector, for ``stats()``."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, final

from marl_collect.core.ranks import Ranks
from marl_collect.rollout.episodes import EPISODE_BITS, Episode

_RECENT = 100
_JOIN = "join"
"""How a counter of several collectors becomes one; without it they are added up."""


@final
@dataclass
class Statistics:
    """Counters of one collector; ``stats()`` returns a copy.

    Attributes:
        frames: number of frames collected in all environments.
        batches: number of batches delivered.
        episodes: number of episodes that ended.
        collecting: seconds spent inside the collector.
        rollouts: seconds of all workers in rollouts.
        resets: seconds of all workers in resets.
        restarts: workers that failed and were replaced.
        recycled: workers that grew too large and were replaced.
        cut_trajectories: ids of trajectories that were not continued.
    """

    frames: int = 0
    batches: int = 0
    episodes: int = 0
    collecting: float = field(default=0.0, metadata={_JOIN: max})
    rollouts: float = 0.0
    resets: float = 0.0
    restarts: int = 0
    recycled: int = 0
    cut_trajectories: list[int] = field(
        default_factory=list, metadata={_JOIN: lambda parts: [*chain(*parts)]}
    )
    # Episodes of batches; an episode is made when somebody looks at it.
    _recent: deque[Sequence[Episode]] = field(default_factory=deque)
    _window: int = _RECENT

    @classmethod
    def joined(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """Add up the counters of several collectors that ran at the same time."""
        counters = {
            counter.name: counter.metadata.get(_JOIN, sum)(
                getattr(part, counter.name) for part in parts
            )
            for counter in fields(cls)
            if not counter.name.startswith("_")
        }
        total = cls(**counters, _window=_RECENT * len(parts))
        total.recent = [episode for part in parts for episode in part.recent]
        return total

    @property
    def recent(self) -> list[Episode]:
        """The last hundred episodes, of each collector that was joined."""
        parts = list(self._recent)  # A collecting thread may add episodes.
        return [episode for part in parts for episode in part][-self._window :]

    @recent.setter
    def recent(self, episodes: Sequence[Episode]) -> None:
        self._recent = deque([episodes])

    def add(self, frames: int, episodes: Sequence[Episode], seconds: float) -> None:
        """Count one batch."""
        self.frames += frames
        self.batches += 1
        self.collecting += seconds
        self.episodes += len(episodes)
        if episodes:
            self._recent.append(episodes[-_RECENT:])
        while sum(map(len, [*self._recent][1:])) >= _RECENT:
            self._recent.popleft()

    def cut(self, environments: Iterable[int], running: Iterable[int]) -> None:
        """Note that the running episodes of environments will not be continued.

        Args:
            environments: their indices.
            running: the numbers of their episodes; empty if none has begun.
        """
        pairs = zip(environments, running, strict=False)
        self.cut_trajectories += [(k << EPISODE_BITS) + episode for k, episode in pairs]

    def snapshot(self) -> dict[str, Any]:
        """Return the counters and the episode statistics.

        ``frames_per_second`` is relative to the time spent collecting. The means of
        ``episode_means`` are over the last hundred episodes.
        """
        seconds = self.collecting
        out: dict[str, Any] = {
            "frames": self.frames,
            "batches": self.batches,
            "episodes": self.episodes,
            "seconds_collecting": seconds,
            "frames_per_second": self.frames / seconds if seconds > 0 else 0.0,
            "seconds_in_rollouts": self.rollouts,
            "seconds_in_resets": self.resets,
            "restarts": self.restarts,
            "recycled": self.recycled,
            "cut_trajectories": list(self.cut_trajectories),
        }
        recent = self.recent
        return out | episode_means(recent) if recent else out


def of_all_ranks(
    ranks: Ranks, statistics: Statistics, environments: int, batches: int | None
) -> Statistics:
    """Join the statistics of all ranks, which must all call this after the same batch.

    Args:
        ranks: which of them this is.
        statistics: of this rank.
        environments: their number on this rank.
        batches: which this rank has collected; None if that number may differ.

    Raises:
        RuntimeError: on all ranks, if they differ in environments or batches.
    """
    caller = "stats(all_ranks=True)"
    # A copy: a thread that collects may change the statistics meanwhile.
    mine = Statistics.joined([statistics]), environments, batches
    gathered = ranks.gather(mine, caller)
    parts, sizes, counts = map(list, zip(*gathered, strict=True))
    if len(set(sizes)) > 1:
        raise RuntimeError(
            f"{caller}: the ranks have {sizes} environments. They need equally many, "
            "because rank k numbers its own from k times that: otherwise several "
            "ranks collect the same episodes."
        )
    if len(set(counts)) > 1:
        raise RuntimeError(
            f"{caller}: the ranks have collected {counts} batches, so their "
            "statistics are not of the same time. Call it on all ranks after the same "
            "batch."
        )
    return Statistics.joined(parts)


def episode_means(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the means over at least one episode.

    ===========================  ====================================================
    name                         mean over the episodes
    ===========================  ====================================================
    ``"mean_team_return"``       of the sum over all agents
    ``"mean_agent_return"``      of the mean over all agents
    ``"mean_group_returns"``     of the mean over the agents of each group, by group
    ``"mean_returns"``           of each agent, in a list by group
    ``"mean_length"``            of the frames
    ===========================  ====================================================

    ``Evaluation`` has attributes of these names, ``trajectories.stats()`` of a dataset
    returns them.
    """
    count = len(episodes)
    columns: dict[str, list[tuple[float, ...]]] = {}
    for episode in episodes:
        for group, returns in episode.returns.items():
            columns.setdefault(group, []).append(returns)
    by_agent = {
        group: [sum(agent) / len(rows) for agent in zip(*rows, strict=True)]
        for group, rows in columns.items()
    }
    return {
        "mean_team_return": sum(map(team_return, episodes)) / count,
        "mean_agent_return": sum(map(agent_return, episodes)) / count,
        "mean_group_returns": {
            group: sum(means) / len(means) for group, means in by_agent.items()
        },
        "mean_returns": by_agent,
        "mean_length": sum(episode.length for episode in episodes) / count,
    }


def team_return(episode: Episode) -> float:
    """Sum an episode's returns over all agents."""
    return sum(sum(returns) for returns in episode.returns.values())


def agent_return(episode: Episode) -> float:
    """Average an episode's returns over all agents."""
    return team_return(episode) / sum(len(r) for r in episode.returns.values())
