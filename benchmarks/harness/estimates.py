"""Medians with the 95 % interval of their bootstrap, of values and of paired ratios."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

_RESAMPLES = 2000


@final
@dataclass(frozen=True)
class Estimate:
    """A median, with the 95 % interval of its bootstrap."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Estimate the median of ``values``; the same values give the same interval."""
        generator = np.random.default_rng(0)
        picked = generator.choice(values, (_RESAMPLES, len(values)))
        low, high = np.quantile(np.median(picked, 1), [0.025, 0.975])
        middle = statistics.median(values)
        return cls(float(middle), float(low), float(high), len(values))

    @classmethod
    def of_ratios(cls, ours: Sequence[float], others: Sequence[float]) -> "Estimate":
        """Estimate the ratio of measurements that were taken in pairs.

        One side may have more: of a system that left, the rounds until then count.
        """
        pairs = zip(ours, others, strict=False)
        return cls.of([our_value / other_value for our_value, other_value in pairs])

    def __str__(self) -> str:
        low, high = (number(value) for value in (self.low, self.high))
        return f"{number(self.median)} ({low} to {high})"


def beside_the_others(rates: Mapping[str, Sequence[float | None]]) -> dict[str, float]:
    """Return the median over rounds of each rate, as a part of the round's mean.

    A machine is faster in one round than in the next, which says nothing about who ran
    in it. Where a round has no rate of somebody, it does not count for them; who has
    none at all is left out.

    Args:
        rates: by name, one of each round.
    """
    relative: dict[str, list[float]] = {}
    for round_values in zip(*rates.values(), strict=True):
        round_rates = {
            name: rate
            for name, rate in zip(rates, round_values, strict=True)
            if rate is not None
        }
        mean = (
            statistics.mean(round_rates.values()) if any(round_rates.values()) else 1.0
        )
        for name, rate in round_rates.items():
            relative.setdefault(name, []).append(rate / mean)
    return {name: statistics.median(ratios) for name, ratios in relative.items()}


def number(value: float) -> str:
    """Return a number with about three digits that count."""
    size = abs(value)
    digits = (
        0 if size >= 100 or size == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    )
    return f"{value:,.{digits}f}"
