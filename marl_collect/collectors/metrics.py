"""What became of a crew's workers, in figures for ``stats()``."""

from collections.abc import Iterable, Mapping
from typing import Any, final

from marl_collect.rollout.episodes import EPISODE_BITS


@final
class CrewFigures:
    """Counts workers that were replaced, and where the time of all went.

    Attributes:
        restarts: workers that failed and were replaced.
        recycled: workers that grew too large and were replaced.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self.restarts = 0
        self.recycled = 0
        self._cut: list[int] = []
        self._seconds = {"rollout": 0.0, "reset": 0.0}

    def cut(self, environments: Iterable[int], running: Iterable[int]) -> None:
        """Note that the running episodes of environments will not be continued.

        Args:
            environments: their indices.
            running: the numbers of their episodes; none if they have begun none.
        """
        pairs = zip(environments, running, strict=False)
        self._cut += [(k << EPISODE_BITS) + episode for k, episode in pairs]

    def add(self, seconds: Mapping[str, float]) -> None:
        """Note what a worker's batch has taken."""
        for name, value in seconds.items():
            self._seconds[name] += value

    def snapshot(self) -> dict[str, Any]:
        """Return all figures as they are now."""
        return {
            "restarts": self.restarts,
            "recycled": self.recycled,
            "cut_trajectories": list(self._cut),
            "seconds_in_rollouts": self._seconds["rollout"],
            "seconds_in_resets": self._seconds["reset"],
        }
