"""Intervals over runs against closed forms, scipy, and repeated draws."""

import itertools
import math

import numpy as np
import pytest

from interp_tasks.measurement import confidence_intervals
from interp_tasks.published import Bounds
from interp_tasks.reproduction.claim_verdicts import interval_verdict, two_sided_p_value

DRAWS = 4000
#: Four standard errors of a share of 0.95 of the draws.
TOLERANCE = 4 * math.sqrt(0.95 * 0.05 / DRAWS)


@pytest.mark.parametrize("runs", [3, 4, 5])
def test_an_interval_over_runs_covers_as_often_as_it_says(runs):
    draws = np.random.default_rng(runs).normal(2.0, 3.0, (DRAWS, runs)).tolist()
    found = np.array([confidence_intervals.interval_over_runs(values) for values in draws])
    assert np.mean((found[:, 0] < 2) & (found[:, 1] > 2)) == pytest.approx(0.95, abs=TOLERANCE)
    # With one run that never got there it is of the median, which takes six.
    late = [*range(runs), math.inf]
    assert np.isnan(confidence_intervals.interval_over_runs(late)).all() == (runs < 5)
    assert np.isnan(confidence_intervals.interval_over_runs([1.0, 2.0])).all()


def test_the_interval_of_a_share_of_runs_is_clopper_and_pearsons():
    for n in (3, 5, 8):
        most = 0.025 ** (1 / n)
        assert confidence_intervals.binomial_interval([1.0] * n) == pytest.approx((most, 1))
        assert confidence_intervals.binomial_interval([0.0] * n) == pytest.approx((0, 1 - most))
    # At its ends, 4 or more of 5, and 4 or fewer, have a probability of 0.025.
    low, high = confidence_intervals.binomial_interval([1.0, 1.0, 1.0, 0.0, 1.0])
    assert 5 * low**4 * (1 - low) + low**5 == pytest.approx(0.025)
    assert 1 - high**5 == pytest.approx(0.025)
    assert np.isnan(confidence_intervals.binomial_interval([1.0, 1.0])).all()


@pytest.mark.parametrize("n", [4, 5, 6])
def test_few_unrelated_runs_have_no_sure_rank_correlation(n):
    """Over all orders: a 95% interval misses 0 in at most one of twenty, and none is a point."""
    orders = [np.array(order) for order in itertools.permutations(range(n))]
    found = [np.corrcoef(np.arange(n), order)[0, 1] for order in orders]
    ends = np.array([confidence_intervals.rank_correlation_interval(r, n) for r in found])
    assert np.mean((ends[:, 0] > 0) | (ends[:, 1] < 0)) <= 0.05
    assert not (ends[:, 1] - ends[:, 0] <= 0).any()
    assert np.isnan(ends).any(axis=1).sum() == 2, "in order, and in reverse"
    assert np.isnan(confidence_intervals.rank_correlation_interval(0.5, 3)).all()
    # Half of a z of 1.96, over sqrt(n - 3) of 100 runs.
    low, high = confidence_intervals.rank_correlation_interval(0.0, 103)
    assert (low, high) == pytest.approx((-math.tanh(0.196), math.tanh(0.196)), abs=1e-4)


def test_bounded_runs_cover_every_interval_of_numbers_within_the_bounds():
    bounds = [(0.0, 1.0), (0.4, 0.4), (2.0, 5.0)]
    low, high = confidence_intervals.bounded_t_interval(bounds)
    grids = [np.linspace(*pair, 13) for pair in bounds]
    every = [confidence_intervals.t_interval(values) for values in itertools.product(*grids)]
    assert low == pytest.approx(min(each[0] for each in every))
    assert high == pytest.approx(max(each[1] for each in every))
    exact = [(value, value) for value in (1.0, 2.0, 4.0)]
    assert confidence_intervals.bounded_t_interval(exact) == confidence_intervals.t_interval([1.0, 2.0, 4.0])
    assert confidence_intervals.bounded_t_interval([*exact, (3.0, math.inf)]) is None


def test_an_interval_of_a_median_takes_six_runs_and_asks_nothing_of_the_numbers():
    assert confidence_intervals.median_interval([(1.0, 1.0)] * 5) is None
    numbers = [(float(value), float(value)) for value in (3, 1, 2, 6, 5, 4)]
    assert confidence_intervals.median_interval(numbers) == (1, 6)
    censored = [*numbers[:4], (7.0, math.inf), (7.0, math.inf)]
    assert confidence_intervals.median_interval(censored) == (1, math.inf)
    rng = np.random.default_rng(2)
    # All on one side of the median: 2 in 2^6, and of nine runs fewer than two on a side: 20 in 2^9.
    for n, missed in ((6, 2 / 64), (9, 20 / 512)):
        draws = rng.exponential(1.0, (DRAWS, n))
        exact = [[(value, value) for value in values] for values in draws]
        found = [confidence_intervals.median_interval(one) for one in exact]
        covered = np.mean([low <= math.log(2) <= high for low, high in found])
        assert covered == pytest.approx(1 - missed, abs=TOLERANCE)


def test_p_values_decide_as_the_interval_does():
    """Below 0.05 exactly where the interval lies on one side of the rule."""

    def p_of(bounds, values):
        mean, error = confidence_intervals.mean(values), confidence_intervals.standard_error(values)
        return two_sided_p_value(bounds, mean, error, 3)

    rng = np.random.default_rng(4)
    seen = set()
    for bounds in (Bounds(above=0.5), Bounds(below=0.5), Bounds(above=-0.8, below=0.9)):
        for _ in range(300):
            values = rng.normal(rng.uniform(-3, 3), 0.4, 4).tolist()
            p = p_of(bounds, values)
            verdict = interval_verdict(bounds, confidence_intervals.t_interval(values))
            assert (p < 0.05) == (verdict != "undecided"), (bounds, values)
            seen.add((str(bounds), verdict))
    assert len(seen) == 9
    stats = pytest.importorskip("scipy.stats")
    assert p_of(Bounds(above=0.5), values) == pytest.approx(stats.ttest_1samp(values, 0.5).pvalue)
