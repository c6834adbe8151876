"""Against loops in plain numpy, exact enumeration, and what the definitions say."""

import itertools
import re
import warnings

import numpy as np
import pytest

from circuits.statistics import (
    bootstrap_ratios,
    holm_adjusted,
    p_value_floor_notes,
    percentile_bounds,
    sign_flip_p_values,
    summary_columns,
)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, size=(3, 40)).astype(float)
    sums = rng.normal(1.0, 1.0, size=(3, 40)) * counts + np.array([[0.0], [0.3], [0.0]]) * counts
    return sums, counts


@pytest.mark.parametrize("kept", [10**9, 0])
def test_bootstrap_resamples_examples_and_recomputes_the_ratio(data, kept, monkeypatch):
    """The same weights, spelled out as explicit lists of examples; whether they are kept for others or not."""
    monkeypatch.setattr("circuits.statistics._KEPT", kept)
    sums, counts = data
    weights = np.random.default_rng([7, 1]).multinomial(40, np.full(40, 1 / 40), size=50)
    expected = []
    for draw in weights:
        rows = [example for example, times in enumerate(draw) for _ in range(times)]
        assert len(rows) == 40
        expected.append([s[rows].sum() / c[rows].sum() for s, c in zip(sums, counts, strict=True)])
    np.testing.assert_allclose(bootstrap_ratios(sums, counts, seed=7, draws=50), expected, rtol=1e-12)


def test_intervals_are_percentiles_of_paired_resamples(data):
    found = summary_columns(*data, seed=3, draws=500, flips=100, level=0.9)
    draws = bootstrap_ratios(*data, seed=3, draws=500)
    changes, ratios = draws - draws[:, :1], draws / draws[:, :1]
    for name, drawn in {"value": draws, "effect": changes, "ratio": ratios}.items():
        for end, expected in zip(("low", "high"), np.quantile(drawn, [0.05, 0.95], axis=0), strict=True):
            np.testing.assert_allclose(found[f"{name}_ci_{end}"], expected)
    np.testing.assert_allclose(found["ratio"], found["value"] / found["value"][0])
    # An edit that adds the same to every entry, or doubles it, has an effect or a ratio without spread.
    (sums, *_), (counts, *_) = data
    given = np.stack([sums, sums + 0.5 * counts, 2 * sums]), np.stack([counts] * 3)
    paired = summary_columns(*given, seed=3, draws=500, flips=1, level=0.9)
    np.testing.assert_allclose([paired["effect_ci_low"][1], paired["effect_ci_high"][1]], 0.5)
    np.testing.assert_allclose([paired["ratio"][2], paired["ratio_ci_low"][2], paired["ratio_ci_high"][2]], 2)
    assert paired["value_ci_high"][1] - paired["value_ci_low"][1] > 0.1
    # Nothing can be said in multiples of an error of zero, nor of one example.
    none = summary_columns(np.array([[0.0, 0], [1, 2]]), np.ones((2, 2)), seed=0, draws=9, flips=1, level=0.9)
    assert np.isnan([none["ratio"][1], none["ratio_ci_low"][1], none["ratio_ci_high"][1]]).all()
    one = summary_columns(np.array([[1.0], [3.0]]), np.ones((2, 1)), seed=0, draws=9, flips=1, level=0.9)
    assert one["ratio"][1] == 3
    assert np.isnan([one["ratio_ci_low"][1], one["ratio_ci_high"][1]]).all()


@pytest.mark.parametrize(("base", "edited"), [(0.02, 0.5), (0.1, 0.5), (1.0, 2.0)])
def test_ratios_of_a_baseline_near_zero_have_no_interval_that_misses_them(base, edited):
    """Percentiles alone missed the first in 44% of these samples."""
    rng = np.random.default_rng(0)
    misses, trials, counts = 0, 400, np.ones((2, 30))
    for trial in range(trials):
        values = rng.normal(base, 1, 30)
        sums = np.stack([values, 0.5 * values + rng.normal(edited - 0.5 * base, 0.8, 30)])
        found = summary_columns(sums, counts, seed=trial, draws=300, flips=1, level=0.95)
        misses += not (
            np.isnan(found["ratio_ci_low"][1])
            or found["ratio_ci_low"][1] <= edited / base <= found["ratio_ci_high"][1]
        )
    # A bootstrap of 30 examples covers a little less than it says.
    assert misses / trials < 0.1


def test_a_ratio_that_no_resample_changes_is_known_beside_a_baseline_that_may_be_zero():
    sums = np.array([[1.0, -1, 2, -2.5], [0.3, -0.3, 0.6, -0.75], [1, -1, 2, -2.5], [2, 2, 2, 2]])
    found = summary_columns(sums, np.ones((4, 4)), seed=0, draws=200, flips=1, level=0.95)
    assert found["value_ci_low"][0] < 0 < found["value_ci_high"][0]
    np.testing.assert_allclose(found["ratio"], [1, 0.3, 1, -16])
    for bound in (found["ratio_ci_low"], found["ratio_ci_high"]):
        np.testing.assert_allclose(bound, [1, 0.3, 1, np.nan])


def test_exact_swaps_on_ratios():
    rng = np.random.default_rng(2)
    counts = rng.integers(1, 4, size=(2, 7)).astype(float)
    sums = rng.normal(1, 1, size=(2, 7)) * counts + np.array([[0], [0.5]]) * counts
    observed = abs(sums[1].sum() / counts[1].sum() - sums[0].sum() / counts[0].sum())
    hits = 0
    for swap in itertools.product([False, True], repeat=7):
        first, second = np.where(swap, [1], [0]), np.where(swap, [0], [1])
        s = [sums[first, range(7)].sum(), sums[second, range(7)].sum()]
        c = [counts[first, range(7)].sum(), counts[second, range(7)].sum()]
        hits += abs(s[1] / c[1] - s[0] / c[0]) >= observed - 1e-12
    found = sign_flip_p_values(sums, counts, seed=0, flips=128)
    np.testing.assert_allclose(found[1], hits / 128)
    assert 0 < found[1] < 1


def test_counts_of_zero():
    sums, counts = np.zeros((2, 5)), np.zeros((2, 5))
    found = summary_columns(sums, counts, seed=0, draws=20, flips=40, level=0.95)
    for array in (
        found["value"],
        found["value_ci_low"],
        found["value_ci_high"],
        found["effect"],
        found["p_value"],
    ):
        assert np.isnan(array).all()
    counts[:, 2], sums[:, 2] = 1.0, [0.5, 0.75]
    found = summary_columns(sums, counts, seed=0, draws=200, flips=40, level=0.95)
    np.testing.assert_allclose(found["value"], [0.5, 0.75])
    np.testing.assert_allclose([found["value_ci_low"][1], found["value_ci_high"][1]], 0.75)
    assert found["p_value"][1] == 1


@pytest.mark.parametrize("draws", [1, 2, 7, 40, 1000])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_percentiles_are_those_of_numpy_without_nan(draws, level):
    resampled = np.random.default_rng(draws).normal(size=(2, draws, 5))
    resampled[0, : draws // 2, 1] = np.nan
    resampled[1, :, 2] = np.nan
    resampled[:, :, 3] = resampled[:, :, 3].round()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all are NaN
        expected = np.nanquantile(resampled, [(1 - level) / 2, (1 + level) / 2], axis=1)
    np.testing.assert_array_equal(percentile_bounds(resampled, level), expected)


def test_holm_by_hand():
    """Holm 1979: multiply the sorted p by m, m-1, ..., keep it from falling, stop at 1."""
    found = holm_adjusted(np.array([0.01, 0.04, np.nan, 0.03, 0.5]))
    np.testing.assert_allclose(found, [0.04, 0.09, np.nan, 0.09, 0.5])
    np.testing.assert_allclose(holm_adjusted(np.array([0.6, 0.7])), [1.0, 1.0])
    assert len(holm_adjusted(np.array([]))) == 0


@pytest.mark.parametrize(
    ("tests", "examples", "flips"),
    [(600, 100, 9999), (600, 10, 9999), (1, 4, 9999), (1, 6, 9999), (3, 9, 9), (5, 9, 511), (14, 9, 512)],
)
def test_advice_is_given_where_the_strongest_data_fail_and_is_enough(tests, examples, flips):
    """Every example changes by the same."""

    def smallest(examples, flips):
        sums = np.repeat([[0.0], [1.0]], [1, tests], axis=0) * np.ones(examples)
        p_values = sign_flip_p_values(sums, np.ones_like(sums), seed=0, flips=flips)[1:]
        return holm_adjusted(p_values).min(), p_value_floor_notes(
            np.append(p_values, np.nan), examples, flips
        )

    best, notes = smallest(examples, flips)
    assert bool(notes) == (best >= 0.05)
    for line in notes:
        assert f"of {tests} test{'s' * (tests > 1)} of {examples} examples with flips={flips} is" in line
        assert f"below {best:.2g}; " in line
        numbers = re.findall(r"(flips=)?(\d+)", line.partition("; ")[2])
        advised = {"flips" if is_flips else "examples": int(n) for is_flips, n in numbers}
        enough = (given := {"examples": examples, "flips": flips}) | advised
        assert all(more > given[name] for name, more in advised.items())
        assert smallest(**enough) == (pytest.approx(0.05, abs=0.05), [])
        for name in advised:
            assert smallest(**enough | {name: enough[name] - 2})[0] >= 0.05


def test_p_values_are_uniform_when_nothing_happens():
    rng = np.random.default_rng(4)
    clean = rng.normal(size=(1, 30))
    edited = clean + rng.normal(size=(400, 30))
    found = sign_flip_p_values(np.concatenate([clean, edited]), np.ones((401, 30)), seed=0, flips=999)[1:]
    assert 0.02 < (found <= 0.05).mean() < 0.09
