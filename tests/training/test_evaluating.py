"""Evaluations of a run."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from workloads.counting import CountingEnv

from marl_collect.training import evaluating
from marl_collect.training.evaluating import evaluate_policy, evaluator_of
from marl_collect.training.options import TrainingOptions
from marl_collect.training.run_folder import EPISODES, RunFolder

pytestmark = pytest.mark.processes


class Returning:
    """An evaluator whose only episode has this return."""

    def __init__(self, value: float) -> None:
        self.value = value

    environments = 1

    def evaluate(self, episodes: Any, *, seeds: Any, first: Any) -> Any:
        del seeds
        assert episodes == first + 1
        return SimpleNamespace(
            episodes=[SimpleNamespace(returns={"agents": [self.value]})],
            team_returns=[self.value],
            lengths=[3],
        )


ONE = TrainingOptions().with_settings({"eval_episodes": 1})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_an_error(value: Any, tmp_path: Path) -> None:
    evaluator: Any = Returning(value)
    folder = RunFolder(tmp_path)
    with pytest.raises(ValueError, match="reward of agents in an evaluation is NaN"):
        evaluate_policy(evaluator, ONE, folder, {}, frames=0)
    evaluator = Returning(1.0)
    assert evaluate_policy(evaluator, ONE, folder, {}, frames=0).team == 1.0


def test_an_evaluation_that_was_killed_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TrainingOptions().with_settings(
        {"eval_episodes": 9, "envs_per_worker": 2, "workers": 1}
    )
    folder, about = RunFolder(tmp_path), {"setup": "random"}
    monkeypatch.setattr(evaluating, "_NOTE_SECONDS", 0.0)
    with evaluator_of(None, CountingEnv, options) as evaluator:
        expected = evaluate_policy(evaluator, options, folder, about, frames=0)
        assert not (tmp_path / EPISODES).exists()
        played: list[int] = []
        evaluate = evaluator.evaluate

        def evaluate_or_stop(episodes: int, **keywords: Any) -> Any:
            played.append(keywords["first"])
            if len(played) == 3:
                raise KeyboardInterrupt
            return evaluate(episodes, **keywords)

        monkeypatch.setattr(evaluator, "evaluate", evaluate_or_stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate_policy(evaluator, options, folder, about, frames=0)
        assert played == [0, 2, 6]  # Slices grow while they are short.
        resumed = evaluate_policy(evaluator, options, folder, about, frames=0)
        assert played[3:] == [6, 8]
        assert resumed == expected
        folder.write_json(EPISODES, {"about": "another", "record": None})
        assert evaluate_policy(evaluator, options, folder, about, frames=0) == expected
