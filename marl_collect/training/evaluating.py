"""Evaluations of a run: complete episodes, with seeds that training never uses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from marl_collect.evaluation.evaluator import Evaluator
from marl_collect.training.learner import NotFiniteError
from marl_collect.training.options import TrainingOptions

SEED = 1_000_000_007
"""Seed of all evaluations during training; the same episodes for every run."""

FINAL_SEED = 1_000_000_009
"""Seed of the final evaluations; differs from the one that selected the weights."""

_SHARES = 4
"""At least so many workers share an evaluation, if there are as many."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation.

    Attributes:
        frames: number of frames that the policy was trained with.
        n_agents: number of agents in the environment.
        team_returns: return of each episode, summed over all agents.
        lengths: length of each episode in frames.
    """

    frames: int
    n_agents: int
    team_returns: list[float]
    lengths: list[int]

    @property
    def agent_returns(self) -> list[float]:
        """Return of each episode, averaged over all agents."""
        return [value / self.n_agents for value in self.team_returns]

    @property
    def team(self) -> float:
        """Mean return of the team."""
        return sum(self.team_returns) / len(self.team_returns)

    @property
    def agent(self) -> float:
        """Mean return of an agent."""
        return self.team / self.n_agents

    @property
    def length(self) -> float:
        """Mean length in frames."""
        return sum(self.lengths) / len(self.lengths)


def evaluator_of(
    policy: nn.Module | None, factory: Callable[[], Any], options: TrainingOptions
) -> Evaluator:
    """Start the workers of a run's evaluations.

    Args:
        policy: as for collectors; None for random actions.
        factory: of the environment.
        options: of the run.
    """
    # The number of rows of a forward pass, and thus the last bit of its outputs, must
    # not depend on the number of workers. A few long episodes need several workers.
    episodes = min(options.eval_episodes, options.final_episodes)
    return Evaluator(
        policy,
        factory,
        deterministic=options.deterministic and policy is not None,
        max_frames_per_traj=options.max_frames_per_traj,
        num_workers=options.workers,
        envs_per_worker=min(options.envs_per_worker, -(-episodes // _SHARES)),
        seeds=SEED,
    )


def evaluate_policy(
    evaluator: Evaluator,
    options: TrainingOptions,
    *,
    frames: int,
    final: bool = False,
) -> EvaluationRecord:
    """Evaluate a policy with its current weights.

    Args:
        evaluator: of the policy.
        options: of the run.
        frames: number of frames that the policy was trained with.
        final: whether this is a final evaluation, which has its own seed.

    Raises:
        NotFiniteError: if a return is NaN or infinite.
    """
    found = evaluator.evaluate(
        options.final_episodes if final else options.eval_episodes,
        seeds=FINAL_SEED if final else SEED,
    )
    wrong = {
        group
        for episode in found.episodes
        for group, returns in episode.returns.items()
        if not all(map(math.isfinite, returns))
    }
    if wrong:
        raise NotFiniteError(
            f"A reward of {', '.join(sorted(wrong))} in an evaluation is NaN or "
            "infinite. Correct the environment; check_env(factory) reports the frame."
        )
    return EvaluationRecord(
        frames,
        sum(len(returns) for returns in found.episodes[0].returns.values()),
        [round(value, 3) for value in found.team_returns],
        found.lengths,
    )
