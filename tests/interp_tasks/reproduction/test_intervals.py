"""Intervals over runs against closed forms, scipy, and repeated draws."""

import itertools
import math

import numpy as np
import pytest

from interp_tasks.published import Bounds
from interp_tasks.reproduction import intervals
from interp_tasks.reproduction.verdicts import decision, two_sided

DRAWS = 4000
#: Four standard errors of a share of 0.95 of the draws.
TOLERANCE = 4 * math.sqrt(0.95 * 0.05 / DRAWS)


@pytest.mark.parametrize("share", [0.6, 0.9, 0.975, 0.999])
def test_t_quantiles_of_one_and_two_degrees_of_freedom_are_known(share):
    assert intervals.t_quantile(share, 1) == pytest.approx(math.tan(math.pi * (share - 0.5)))
    two = (2 * share - 1) * math.sqrt(2 / (4 * share * (1 - share)))
    assert intervals.t_quantile(share, 2) == pytest.approx(two)
    assert intervals.t_quantile(1 - share, 2) == pytest.approx(-two)
    assert intervals.t_cdf(two, 2) == pytest.approx(share)


def test_t_shares_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for df, t in itertools.product((1, 2, 3, 9, 30, 200), (-8.0, -1.3, 0.0, 0.2, 2.1, 40.0)):
        assert intervals.t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), abs=1e-12)


def test_an_interval_over_runs_is_that_of_scipy_and_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = rng.normal(2.0, 3.0, (DRAWS, 3)).tolist()
    found = [intervals.t_interval(values) for values in draws]
    assert np.mean([low < 2.0 < high for low, high in found]) == pytest.approx(0.95, abs=TOLERANCE)
    assert intervals.t_interval([1.0]) is None
    assert intervals.t_interval([1.0, 1.0, 1.0]) == (1.0, 1.0)
    stats = pytest.importorskip("scipy.stats")
    for values in draws[:5]:
        expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
        assert intervals.t_interval(values) == pytest.approx(expected)


def test_a_ratio_of_means_covers_and_is_not_told_where_the_divisor_may_be_0():
    rng = np.random.default_rng(1)
    found = [
        intervals.fieller_interval(rng.normal(3.0, 0.5, 5).tolist(), rng.normal(2.0, 0.3, 5).tolist())
        for _ in range(DRAWS)
    ]
    covered = np.mean([ends is None or ends[0] < 1.5 < ends[1] for ends in found])
    # The degrees of freedom are of one group: no less than 95%, and not much more.
    assert 0.95 - TOLERANCE < covered < 0.985
    above = [1.0, 2.0, 4.0]
    half = [end / 2 for end in intervals.t_interval(above)]
    assert intervals.fieller_interval(above, [2.0, 2.0, 2.0]) == pytest.approx(half)
    assert intervals.fieller_interval(above, [-1.0, 1.0, 1.5]) is None
    assert intervals.fieller_interval(above, [2.0]) is None


def test_bounded_runs_cover_every_interval_of_numbers_within_the_bounds():
    bounds = [(0.0, 1.0), (0.4, 0.4), (2.0, 5.0)]
    low, high = intervals.bounded_t_interval(bounds)
    grids = [np.linspace(*pair, 13) for pair in bounds]
    every = [intervals.t_interval(values) for values in itertools.product(*grids)]
    assert low == pytest.approx(min(each[0] for each in every))
    assert high == pytest.approx(max(each[1] for each in every))
    exact = [(value, value) for value in (1.0, 2.0, 4.0)]
    assert intervals.bounded_t_interval(exact) == intervals.t_interval([1.0, 2.0, 4.0])
    assert intervals.bounded_t_interval([*exact, (3.0, math.inf)]) is None


def test_an_interval_of_a_median_takes_six_runs_and_asks_nothing_of_the_numbers():
    assert intervals.median_interval([(1.0, 1.0)] * 5) is None
    numbers = [(float(value), float(value)) for value in (3, 1, 2, 6, 5, 4)]
    assert intervals.median_interval(numbers) == (1, 6)
    censored = [*numbers[:4], (7.0, math.inf), (7.0, math.inf)]
    assert intervals.median_interval(censored) == (1, math.inf)
    rng = np.random.default_rng(2)
    # All on one side of the median: 2 in 2^6, and of nine runs fewer than two on a side: 20 in 2^9.
    for n, missed in ((6, 2 / 64), (9, 20 / 512)):
        draws = rng.exponential(1.0, (DRAWS, n))
        found = [intervals.median_interval([(value, value) for value in values]) for values in draws]
        covered = np.mean([low <= math.log(2) <= high for low, high in found])
        assert covered == pytest.approx(1 - missed, abs=TOLERANCE)


def test_looks_that_hold_together_are_wider():
    assert intervals.bonferroni_interval((1.0, 4.0), 2.0, 1) == pytest.approx((1.0, 4.0))
    factor = intervals.z_quantile(1 - 0.025 / 4) / intervals.z_quantile(0.975)
    assert intervals.bonferroni_interval((1.0, 4.0), 2.0, 4) == pytest.approx((2 - factor, 2 + 2 * factor))


def test_a_quotient_is_all_that_it_can_be():
    assert intervals.quotient((1.0, 2.0), (4.0, 5.0)) == pytest.approx((0.2, 0.5))
    assert intervals.quotient((-1.0, 2.0), (4.0, 5.0)) == pytest.approx((-0.25, 0.5))
    assert intervals.quotient((1.0, 2.0), (-4.0, 5.0)) is None


def test_p_values_decide_as_the_interval_does():
    """Below 0.05 exactly where the interval lies on one side of the rule."""
    rng = np.random.default_rng(4)
    seen = set()
    for bounds in (Bounds(above=0.5), Bounds(below=0.5), Bounds(above=-0.8, below=0.9)):
        for _ in range(300):
            values = rng.normal(rng.uniform(-3, 3), 0.4, 4).tolist()
            p = two_sided(bounds, intervals.mean(values), intervals.standard_error(values), 3)
            verdict = decision(bounds, intervals.t_interval(values))["verdict"]
            assert (p < 0.05) == (verdict != "undecided"), (bounds, values)
            seen.add((str(bounds), verdict))
    assert len(seen) == 9
    stats = pytest.importorskip("scipy.stats")
    p = two_sided(Bounds(above=0.5), intervals.mean(values), intervals.standard_error(values), 3)
    assert p == pytest.approx(stats.ttest_1samp(values, 0.5).pvalue)
