"""Interquartile means over runs, with stratified bootstrap intervals.

Source: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", arXiv 2108.13264, section 4.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval, whose ends are NaN if there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        """Return text such as ``-52.3 (-54.0 to -50.9)`` or ``0.75 (0.74 to 0.76)``."""
        value, low, high = self.parts
        return f"{value} ({low} to {high})" if low else value

    @property
    def parts(self) -> tuple[str, str, str]:
        """The value, the low and the high end, with equally many digits.

        Without an interval, its ends are empty.
        """
        alone = math.isnan(self.low)
        ends = (self.value,) if alone else (self.low, self.high)
        digits = 1 if max(map(abs, ends)) >= 10 else 2
        value = f"{self.value:.{digits}f}"
        if alone:
            return value, "", ""
        return value, f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"


def rank_sum_p(one: ArrayLike, two: ArrayLike) -> float:
    """Return the two-sided p-value of the exact rank-sum test of two sets of scores.

    It is the share of all divisions of the scores into two sets of these sizes whose
    rank sum is at least as far from its mean. Equal scores have their mean rank.
    (scipy's exact test has no equal scores, and its test of all divisions tries each of
    them, which takes seconds for ten scores each.)

    Source:
        Mann and Whitney, "On a Test of Whether one of Two Random Variables is
        Stochastically Larger than the Other", Annals of Mathematical Statistics 18.
    """
    first, second = np.asarray(one, np.float64), np.asarray(two, np.float64)
    scores = np.concatenate([first, second])
    below = (scores < scores[:, None]).sum(1)
    ranks = 2 * below + (scores == scores[:, None]).sum(1)  # Twice, less one.
    # The number of subsets by their size and rank sum.
    ways = np.zeros((first.size + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    mean = first.size * ranks.mean()
    distance = np.abs(np.arange(ways.shape[1]) - mean)
    seen = abs(ranks[: first.size].sum() - mean)
    counts = ways[-1]
    return float(counts[distance >= seen - 1e-9].sum() / counts.sum())


def interquartile_mean(values: ArrayLike, axis: int | None = None) -> Any:
    """Return the mean of the values between the quartiles.

    The lowest and the highest quarter are left out. If a quarter is not a whole number
    of values, the values at its edge have a fractional weight. (scipy's ``trim_mean``
    rounds the quarter down, so it trims nothing of three values.)

    Args:
        values: an array.
        axis: axis to average over; None for all values.
    """
    array = np.asarray(values, dtype=np.float64)
    if axis is None:
        array, axis = array.reshape(-1), 0
    array = np.moveaxis(np.sort(array, axis), axis, -1)
    count = array.shape[-1]
    edges = np.arange(count + 1)
    inside = np.clip(edges, count / 4, 3 * count / 4)
    weights = np.diff(inside)
    return (array * weights).sum(-1) / weights.sum()


_TAIL = 0.025


def bootstrap(
    strata: Sequence[ArrayLike],
    *,
    estimate: Callable[..., Any] = interquartile_mean,
    repetitions: int = 2000,
) -> Interval:
    """Return the interquartile mean of scores, or another estimate, and its interval.

    It is the 95 % interval; equal scores always have equal intervals.

    Runs are resampled with replacement within each stratum. (So does scipy's bootstrap,
    which refuses a stratum of one score.)

    Args:
        strata: scores of the runs, one sequence per task or other stratum.
        estimate: reduces an array, along ``axis`` if given; such as ``np.mean``.
        repetitions: number of resamples.

    Raises:
        ValueError: if there are no strata, or one has no scores.
    """
    arrays = [np.asarray(scores, dtype=np.float64) for scores in strata]
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError("Every stratum needs at least one score.")
    rng = np.random.default_rng(0)
    resampled: list[Floats] = [
        array[rng.integers(array.size, size=(repetitions, array.size))]
        for array in arrays
    ]
    means = estimate(np.concatenate(resampled, axis=1), axis=1)
    low, high = np.quantile(means, [_TAIL, 1 - _TAIL])
    value = float(estimate(np.concatenate(arrays)))
    return Interval(value, float(low), float(high))
