from typing import Any

import numpy as np
import pytest

from marl_collect.evaluation.intervals import bootstrap, interquartile_mean, rank_sum_p


def test_eight_scores_are_averaged_over_the_middle_four() -> None:
    assert interquartile_mean([100, 1, 2, 3, 4, 5, 6, -100]) == pytest.approx(3.5)


def test_of_three_scores_the_outer_two_have_weight_one_quarter() -> None:
    # The middle half of three is 0.75 to 2.25: a quarter, one whole, a quarter.
    assert interquartile_mean([0, 1, 8]) == pytest.approx((0.25 * 0 + 1 + 2) / 1.5)


def test_an_axis_is_averaged_row_by_row() -> None:
    rows = np.array([[1.0, 2, 3, 4], [10.0, 20, 30, 40]])
    assert interquartile_mean(rows, axis=1) == pytest.approx([2.5, 25])


def test_one_score_has_no_spread_and_strata_are_resampled_separately() -> None:
    assert str(bootstrap([[2.0]])) == "2.00 (2.00 to 2.00)"
    assert str(bootstrap([[-20.04]])) == "-20.0 (-20.0 to -20.0)"
    # Each stratum has equal scores, so every resample is the same.
    apart = bootstrap([[0.0] * 4, [10.0] * 4])
    assert (apart.low, apart.value, apart.high) == (5, 5, 5)
    together = bootstrap([[0.0] * 4 + [10.0] * 4])
    assert together.low < 5 < together.high


def test_a_stratum_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one score"):
        bootstrap([[1.0], []])


@pytest.mark.parametrize("sizes", [(3, 3), (3, 6), (5, 5), (7, 7)])
@pytest.mark.parametrize("digits", [1, 15])
def test_the_rank_sum_test_equals_scipys(sizes: tuple[int, int], digits: int) -> None:
    """One digit has ties. Scipy's takes seconds for ten scores each."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    one, two = (rng.normal(size=size).round(digits) for size in sizes)
    every = stats.PermutationMethod(n_resamples=np.inf)
    expected = stats.mannwhitneyu(one, two + 0.5, method=every).pvalue
    assert rank_sum_p(one, two + 0.5) == pytest.approx(expected)


@pytest.mark.parametrize("estimate", [interquartile_mean, np.mean])
@pytest.mark.parametrize("sizes", [(5,), (10,), (3, 6)])
def test_intervals_equal_scipys_up_to_chance(sizes: Any, estimate: Any) -> None:
    """Scipy's bootstrap refuses a stratum of one score, which has an interval here."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    strata = [rng.normal(size=size) for size in sizes]

    def joined(*samples: Any, axis: int = -1) -> Any:
        return estimate(np.concatenate(samples, axis), axis=axis)

    low, high = stats.bootstrap(
        strata, joined, n_resamples=20_000, method="percentile", rng=1
    ).confidence_interval
    interval = bootstrap(strata, estimate=estimate, repetitions=20_000)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.03)
