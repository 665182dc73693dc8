"""How good a policy is: whole episodes, in parallel workers, summed up fairly."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack, final

from marl_collect.collectors import messages
from marl_collect.collectors.options import (
    CollectorKeywords,
    CollectorOptions,
    ExplorationType,
)
from marl_collect.collectors.starting import start_crew
from marl_collect.collectors.statistics import agent_return, team_return
from marl_collect.episodes import Episode
from marl_collect.factories import Factory
from marl_collect.slots import Slots

_MEANINGFUL = {
    "num_workers",
    "envs_per_worker",
    "create_env_kwargs",
    "policy_factory",
    "num_threads",
    "num_sub_threads",
    "init_fn",
    "seed",
    "timeout",
    "start_timeout",
    "start_method",
    "preload",
    "device",
    "policy_device",
    "env_device",
    "on_worker_failure",
    "max_worker_rss",
    "check_actions",
    "trust_policy",
    "compile_policy",
    "cudagraph_policy",
}
"""Options that say who acts and where; the others are about batches."""

_FRAMES = 100  # Of each environment, between two looks at what has ended.


@final
@dataclass(frozen=True)
class Evaluation:
    """The episodes of an evaluation.

    Attributes:
        episodes: ordered by environment, then by number.
    """

    episodes: tuple[Episode, ...]

    @property
    def team_returns(self) -> list[float]:
        """Return of each episode, summed over all agents."""
        return [team_return(episode) for episode in self.episodes]

    @property
    def agent_returns(self) -> list[float]:
        """Return of each episode, averaged over all agents."""
        return [agent_return(episode) for episode in self.episodes]

    @property
    def lengths(self) -> list[int]:
        """Frames of each episode."""
        return [episode.length for episode in self.episodes]

    @property
    def mean_team_return(self) -> float:
        """Mean over episodes of the sum over agents."""
        return sum(self.team_returns) / len(self.episodes)

    @property
    def mean_agent_return(self) -> float:
        """Mean over episodes and agents."""
        return sum(self.agent_returns) / len(self.episodes)


def evaluate(
    policy: Any,
    create_env_fn: Factory | Sequence[Factory],
    *,
    episodes: int,
    deterministic: bool = True,
    max_episode_frames: int | None = None,
    **options: Unpack[CollectorKeywords],
) -> Evaluation:
    """Run whole episodes and return their returns and lengths.

    Each environment gives its first episodes, the same number, so that short ones
    are not preferred. The same seed means the same episodes.

    Args:
        policy: as for collectors; None for random actions.
        create_env_fn: as for collectors.
        episodes: how many; rounded up to a multiple of the environments.
        deterministic: act without drawing.
        max_episode_frames: count an episode as ended after so many frames; needed
            where episodes may never end.
        options: those of :class:`CollectorOptions` that are not about batches, such as
            ``num_workers``; ``seed`` is 0 if not given.

    Raises:
        TypeError: naming options that are about batches.
    """
    useless = sorted(set(options) - _MEANINGFUL)
    if useless:
        raise TypeError(
            f"evaluate() hands out no batches, so it takes no {', '.join(useless)}; "
            f"it takes {', '.join(sorted(_MEANINGFUL))}."
        )
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, but is {episodes}.")
    kind = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
    given: dict[str, Any] = {
        "frames_per_batch": _FRAMES,
        "exploration_type": kind,
        "seed": 0,
        "max_frames_per_traj": max_episode_frames,
        **options,
    }
    parsed = CollectorOptions.parse(given)
    crew = start_crew(create_env_fn, policy, parsed)
    try:
        sizes = [len(own) for own in crew.environments]
        slots = Slots(crew.layout(sum(sizes), _FRAMES), prepared=1)
        found: dict[int, list[Episode]] = {k: [] for k in range(sum(sizes))}
        wanted = -(-episodes // len(found))
        slot = slots.take()
        for index, own in enumerate(crew.environments):
            crew.attach(index, slots, slot, own, _FRAMES)
        while any(len(ended) < wanted for ended in found.values()):
            for index in range(len(crew)):
                crew.collect(index, messages.Collect(slot, version=0))
            waiting = set(range(len(crew)))
            while waiting:
                index, reply = crew.receive(waiting)
                waiting.remove(index)
                for episode in reply.episodes:
                    found[episode.environment].append(episode)
        slots.close()
    finally:
        crew.close(10.0)
    return Evaluation(tuple(e for ended in found.values() for e in ended[:wanted]))
