"""What reports of a comparison say in words."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from marl_collect.evaluation.intervals import bootstrap
from marl_collect.training.report import conclusion
from marl_collect.training.results import BEST_WEIGHTS, TEAM


def scored(setup: str, *scores: float) -> Any:
    returns = {(TEAM, BEST_WEIGHTS): bootstrap([scores])}
    return SimpleNamespace(setup=setup, returns=returns, scores=list(scores))


RANDOM: Any = SimpleNamespace(team=0.5)


def test_nothing_is_claimed_below_five_seeds() -> None:
    setups = [scored("a", 0, 1, 0, 1), scored("b", 9, 8, 9, 8, 9)]
    assert conclusion(setups, RANDOM) == (
        "b has the highest team return. With fewer than 5 seeds of each setup, no "
        "difference is shown. Not shown to exceed random actions: a."
    )


def test_the_conclusion_tells_setups_apart_by_a_corrected_test() -> None:
    low = scored("low", 0, 1, 0.2, 0.4, 1)
    near = scored("near", 8, 11, 12, 13, 9)
    best = scored("best", 10, 14, 12, 13, 11)
    assert conclusion([low, near, best], RANDOM) == (
        "best has the highest team return. Shown to be lower (p < 0.05): low. Not "
        "shown to differ from it: near. Not shown to exceed random actions: low."
    )
    # With more pairs, the same scores show less.
    more = [scored(f"more_{i}", 8, 11, 12, 13, 9) for i in range(3)]
    text = conclusion([low, near, best, *more])
    assert "Shown to be" not in text
    assert text.endswith("So many setups need more than 5 seeds.")


def test_identical_setups_are_rarely_told_apart() -> None:
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(300):
        setups = [scored(f"s{i}", *rng.normal(size=5)) for i in range(4)]
        told += "Shown to be lower" in conclusion(setups)
    assert told <= 0.05 * 300
