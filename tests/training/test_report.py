"""What reports of a comparison say in words."""

from typing import Any

from marl_collect.evaluation.intervals import Interval
from marl_collect.training.report import conclusion
from marl_collect.training.results import BEST_WEIGHTS, TEAM


class Scored:
    """A setup with an interval of its final return."""

    def __init__(self, setup: str, low: float, high: float) -> None:
        self.setup = setup
        self.returns = {(TEAM, BEST_WEIGHTS): Interval((low + high) / 2, low, high)}


class Random:
    team = 0.5


def test_the_conclusion_tells_setups_apart_by_their_intervals() -> None:
    setups: Any = [Scored("a", 0, 1), Scored("b", 2, 4), Scored("c", 3, 5)]
    best = "c has the highest team return"
    assert conclusion(setups) == f"{best}; only b overlaps its interval."
    assert conclusion(setups[1:]) == f"{best}; b overlaps its interval."
    assert conclusion([setups[0], setups[2]]) == f"{best}; no other interval overlaps."
    random: Any = Random
    assert conclusion(setups, random).endswith("Not shown to exceed random actions: a.")
