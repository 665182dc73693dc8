"""Evaluations of a run: complete episodes, with seeds that training never uses."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from marl_collect.evaluation.evaluator import Evaluator
from marl_collect.training.learner import NotFiniteError
from marl_collect.training.options import TrainingOptions
from marl_collect.training.run_folder import EPISODES, RunFolder

SEED = 1_000_000_007
"""Seed of all evaluations during training; the same episodes for every run."""

FINAL_SEED = 1_000_000_009
"""Seed of the final evaluations; differs from the one that selected the weights."""

_SLICE_SECONDS = 15.0
_NOTE_SECONDS = 60.0
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

    def and_then(self, later: "EvaluationRecord") -> "EvaluationRecord":
        """Return the record of these episodes and later ones."""
        return replace(
            self,
            team_returns=self.team_returns + later.team_returns,
            lengths=self.lengths + later.lengths,
        )

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
    folder: RunFolder,
    about: Mapping[str, Any],
    *,
    frames: int,
    final: bool = False,
) -> EvaluationRecord:
    """Evaluate a policy with its current weights.

    The episodes that are played are noted in the folder every minute. If the process is
    killed, an evaluation of the same policy goes on with the others.

    Args:
        evaluator: of the policy.
        options: of the run.
        folder: of the run, for the episodes so far.
        about: plain data that tell this policy, task and settings from all others.
        frames: number of frames that the policy was trained with.
        final: whether this is a final evaluation, which has its own seed.

    Raises:
        NotFiniteError: if a return is NaN or infinite.
    """
    seed, count = SEED, options.eval_episodes
    if final:
        seed, count = FINAL_SEED, options.final_episodes
    about = json.loads(json.dumps({**about, "frames": frames, "seed": seed}))
    noted = folder.read_json(EPISODES)
    record = None
    if noted is not None and noted["about"] == about:  # It was interrupted.
        record = EvaluationRecord(**noted["record"])
    saved = time.monotonic()
    episodes = evaluator.environments
    while record is None or len(record.lengths) < count:
        first = 0 if record is None else len(record.lengths)
        before = time.monotonic()
        part = _played(evaluator, frames, seed, first, min(count, first + episodes))
        record = part if record is None else record.and_then(part)
        now = time.monotonic()
        if now - before < _SLICE_SECONDS:
            episodes *= 2
        if now - saved > _NOTE_SECONDS:
            folder.write_json(EPISODES, {"about": about, "record": asdict(record)})
            saved = now
    (folder.path / EPISODES).unlink(missing_ok=True)
    return record


def _played(
    evaluator: Evaluator, frames: int, seed: int, first: int, last: int
) -> EvaluationRecord:
    """Play the episodes with the numbers from ``first`` to ``last - 1``."""
    evaluation = evaluator.evaluate(last, seeds=seed, first=first)
    wrong = {
        group
        for episode in evaluation.episodes
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
        sum(len(returns) for returns in evaluation.episodes[0].returns.values()),
        [
            _rounded(value, episode.returns)
            for value, episode in zip(
                evaluation.team_returns, evaluation.episodes, strict=True
            )
        ],
        evaluation.lengths,
    )


def _rounded(team: float, returns: Mapping[str, Sequence[float]]) -> float:
    """Return the return of a team with six digits of its agents' returns.

    Further digits are noise of float32, of which zero-sum games have nothing else.
    """
    largest = max(abs(value) for agents in returns.values() for value in agents)
    return round(team, 5 - math.floor(math.log10(largest))) if largest else 0.0
