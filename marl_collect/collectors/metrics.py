"""Counters of a worker group, for ``stats()``."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from marl_collect.rollout.episodes import EPISODE_BITS


@final
class WorkerMetrics:
    """Counts replaced workers, cut trajectories, and seconds in rollouts and resets.

    Attributes:
        restarts: workers that failed and were replaced.
        recycled: workers that grew too large and were replaced.
    """

    def __init__(self) -> None:
        """Start all counters at zero."""
        self.restarts = 0
        self.recycled = 0
        self._cut: list[int] = []
        self._seconds = {"rollout": 0.0, "reset": 0.0}

    def cut(self, environments: Iterable[int], running: Iterable[int]) -> None:
        """Note that the running episodes of environments will not be continued.

        Args:
            environments: their indices.
            running: the numbers of their episodes; empty if none has begun.
        """
        pairs = zip(environments, running, strict=False)
        self._cut += [(k << EPISODE_BITS) + episode for k, episode in pairs]

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds that a worker spent on one batch."""
        for name, value in seconds.items():
            self._seconds[name] += value

    def snapshot(self) -> dict[str, Any]:
        """Return the current counters."""
        return {
            "restarts": self.restarts,
            "recycled": self.recycled,
            "cut_trajectories": list(self._cut),
            "seconds_in_rollouts": self._seconds["rollout"],
            "seconds_in_resets": self._seconds["reset"],
        }
