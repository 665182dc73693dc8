"""Evaluations of a run."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchrl")

from marl_collect.training.evaluating import evaluate_policy
from marl_collect.training.options import TrainingOptions


class Returning:
    """An evaluator whose only episode has this return."""

    def __init__(self, value: float) -> None:
        self.value = value

    def evaluate(self, episodes: Any, *, seeds: Any) -> Any:
        del episodes, seeds
        return SimpleNamespace(
            episodes=[SimpleNamespace(returns={"agents": [self.value]})],
            team_returns=[self.value],
            lengths=[3],
        )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_an_error(value: Any) -> None:
    evaluator: Any = Returning(value)
    with pytest.raises(ValueError, match="reward of agents in an evaluation is NaN"):
        evaluate_policy(evaluator, TrainingOptions(), frames=0)
    evaluator = Returning(1.0)
    assert evaluate_policy(evaluator, TrainingOptions(), frames=0).team == 1.0
