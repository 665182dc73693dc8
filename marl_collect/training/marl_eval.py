"""The JSON of results that marl-eval, Mava and BenchMARL share.

``environment -> task -> algorithm -> seed -> step_k -> metrics``, and beside the steps
``absolute_metrics``: the best weights, evaluated on further episodes.

Source: Gorsane et al., "Towards a Standardised Performance Evaluation Protocol for
Cooperative MARL", arXiv 2209.10485, and the format's page in marl-eval's README.
"""

from collections.abc import Iterable
from typing import Any

from marl_collect.training.evaluating import EvaluationRecord
from marl_collect.training.results import Run


def results_json(runs: Iterable[Run]) -> dict[str, Any]:
    """Return the runs in that format; metrics are lists with a value per episode."""
    data: dict[str, Any] = {}
    for run in runs:
        environment, _, task = run.task.rpartition("/")
        steps: dict[str, Any] = {
            f"step_{index}": {"step_count": record.frames} | _metrics(record)
            for index, record in enumerate(run.evaluations)
        }
        if run.best is not None:
            steps["absolute_metrics"] = _metrics(run.best)
        tasks = data.setdefault(environment or "pettingzoo", {})
        algorithms = tasks.setdefault(task, {})
        algorithms.setdefault(run.setup, {})[f"seed_{run.seed}"] = steps
    return data


def _metrics(record: EvaluationRecord) -> dict[str, list[float]]:
    return {
        "team_return": record.team_returns,
        "mean_agent_return": record.agent_returns,
        "episode_length": [float(length) for length in record.lengths],
    }
