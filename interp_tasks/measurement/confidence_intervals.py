"""Intervals by bootstrap over examples, as rows of the table, or over points; and over a few runs. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.result import Row, number_columns

if TYPE_CHECKING:
    import numpy

#: Two-sided significance level: intervals cover 1 − ALPHA.
ALPHA = 0.05
#: An interval over fewer runs is hardly bounded.
MIN_RUNS = 3
#: How many numbers that are known between bounds alone are tried at both ends: 2 to the power of it.
MAX_CORNERS = 12

Interval = tuple[float, float]


def normal_quantile(share: float) -> float:
    """Returns the quantile of the normal distribution."""
    return NormalDist().inv_cdf(share)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def finite_or_nan(value: float) -> float:
    """Returns the value, or NaN where it is infinite: unknown."""
    return float(value) if math.isfinite(value) else math.nan


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of independent numbers, at least two."""
    middle = mean(values)
    spread = math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(spread / len(values))


def t_interval(values: Sequence[float]) -> Interval | None:
    """Returns Student's t interval of a mean over runs; ``None`` for fewer than two."""
    from scipy.special import stdtrit

    if len(values) < 2:
        return None
    half = float(stdtrit(len(values) - 1, 1 - ALPHA / 2)) * standard_error(values)
    return mean(values) - half, mean(values) + half


def interval_over_runs(values: Sequence[float]) -> Interval:
    """Returns a 95% interval over training runs: Student's t of their mean. NaN: an end that is not known.

    There is none below three runs. Where a run never got there, and is infinite, it is one of the median, from order
    statistics, which six runs have.
    """
    ends = None
    if len(values) >= MIN_RUNS:
        known = all(map(math.isfinite, values))
        ends = t_interval(values) if known else median_interval([(value, value) for value in values])
    low, high = ends or (math.nan, math.nan)
    return finite_or_nan(low), finite_or_nan(high)


def binomial_interval(values: Sequence[float]) -> Interval:
    """Returns the exact 95% interval (Clopper, Pearson 1934) of a share of runs, each 1 or 0; NaN below three runs."""
    from scipy.special import betaincinv

    n, hits = len(values), round(sum(values))
    if n < MIN_RUNS:
        return math.nan, math.nan
    low = float(betaincinv(hits, n - hits + 1, ALPHA / 2)) if hits else 0.0
    return low, float(betaincinv(hits + 1, n - hits, 1 - ALPHA / 2)) if hits < n else 1.0


def rank_correlation_interval(correlation: float, n: int) -> Interval:
    """Returns a 95% interval of Spearman's rank correlation over so many runs, by Fisher's z.

    Its variance is (1 + r²/2) / (n - 3) (Bonett, Wright 2000). NaN below four runs, and where the order is perfect,
    which has no bounded z.
    """
    if n < 4 or not abs(correlation) < 1 - 1e-9:
        return math.nan, math.nan
    half = normal_quantile(1 - ALPHA / 2) * math.sqrt((1 + correlation**2 / 2) / (n - 3))
    middle = math.atanh(correlation)
    return math.tanh(middle - half), math.tanh(middle + half)


def bounded_t_interval(bounds: Sequence[Interval]) -> Interval | None:
    """Returns an interval that covers the t interval wherever in their bounds the runs' numbers lie.

    It is ``None`` for open bounds, for fewer than two runs and for too many corners.

    The upper end is convex in the numbers and the lower end concave, so both are extreme at corners of the box of
    bounds.
    """
    ends = [tuple(dict.fromkeys(pair)) for pair in bounds]
    if any(math.isinf(end) for pair in ends for end in pair):
        return None
    if len(bounds) < 2 or sum(len(pair) > 1 for pair in ends) > MAX_CORNERS:
        return None
    corner_intervals = [interval for corner in product(*ends) if (interval := t_interval(corner)) is not None]
    return min(low for low, _ in corner_intervals), max(high for _, high in corner_intervals)


def median_interval(bounds: Sequence[Interval]) -> Interval | None:
    """Returns an interval of the median from order statistics, distribution-free; ``None`` below six runs.

    Of numbers that are known between bounds alone the lower ones give the lower end, the upper ones the upper.
    """
    n = len(bounds)
    # The widest interval misses the median where all runs lie on one side of it.
    rank, below = -1, 0.0
    while below + math.comb(n, rank + 1) / 2**n <= ALPHA / 2:
        rank += 1
        below += math.comb(n, rank) / 2**n
    if rank < 0:
        return None
    lows, highs = (sorted(ends) for ends in zip(*bounds, strict=True))
    return lows[rank], highs[n - 1 - rank]


def one_sided_p_value(value: float, error: float, df: int | None, bound: float) -> float:
    """Returns the share of the t distribution (normal: ``df`` is ``None``) beyond a bound, on its side of the number.

    One-sided: small where the number is well below the bound.

    Args:
        error: above 0; numbers that do not differ have no such share.
    """
    from scipy.special import ndtr, stdtr

    t = (bound - value) / error
    return 1 - float(ndtr(t) if df is None else stdtr(df, t))


#: Resamples behind an interval, and its level.
DRAWS, LEVEL = 1000, 0.95


def bootstrap_rows(
    metrics: Mapping[str, Any], baselines: Mapping[str, Any] | None, seed: int
) -> list[dict[str, Any]]:
    """Returns a row per metric, of per-example values or (sum, count) pairs as a task gives them.

    The value is pooled over examples, Σsum / Σcount; ``effect`` is value − baseline. Intervals: 95%, bootstrap over
    examples, the same resamples for both.
    """
    import numpy as np

    from circuits.statistics import ratio

    rows = []
    for name, metric in metrics.items():
        both = [metric] if baselines is None else [metric, baselines[name]]
        series = [sums_and_counts(one) for one in both]
        sums, counts = (np.stack(part) for part in zip(*series, strict=True))
        weights = bootstrap_counts(seed, sums.shape[1])
        resampled = ratio(weights @ sums.T, weights @ counts.T)
        row = {"metric": name, "n": sums.shape[1]}
        row |= paired_columns(ratio(sums.sum(1), counts.sum(1)), resampled)
        rows.append(row if sums.shape[1] > 1 else without_intervals(row))
    return rows


def paired_columns(values: numpy.ndarray, resampled: numpy.ndarray) -> Row:
    """Returns the columns of the first value, where there are two with the second as baseline, with their intervals.

    Args:
        resampled: ``[draw value]``.
    """
    from circuits.statistics import percentile_bounds

    (low,), (high,) = percentile_bounds(resampled[:, :1], LEVEL)
    if len(values) == 1:
        return number_columns(values[0], (low, high))
    (below,), (above,) = percentile_bounds(resampled[:, :1] - resampled[:, 1:], LEVEL)
    return number_columns(values[0], (low, high), values[1], (below, above))


@lru_cache(maxsize=4)
def bootstrap_counts(seed: int, examples: int, stream: int = 1) -> numpy.ndarray:
    """Returns how often each example is in each resample: [draws examples]; the same for every row of a table.

    Args:
        stream: tells apart what is resampled under one seed.
    """
    import numpy as np

    counts = np.random.default_rng([seed, stream]).multinomial(
        examples, np.full(examples, 1 / examples), size=DRAWS
    )
    return counts.astype(float)


def sums_and_counts(metric: Any) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns (sums, counts) of the examples, in double precision."""
    import torch

    total, count = metric if isinstance(metric, tuple) else (metric, torch.ones_like(metric))
    return total.double().cpu().numpy(), count.double().cpu().numpy()


def without_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """Removes the intervals: one example says nothing about how examples differ."""
    return {name: float("nan") if "ci_" in name else value for name, value in row.items()}


def ones_and_bootstrap_weights(points: int, seed: int) -> numpy.ndarray:
    """Returns weights ``[1 + draws, point]``: ones, then those of a bootstrap."""
    import numpy as np

    return np.concatenate([np.ones((1, points)), bootstrap_counts(seed, points, stream=4)])


def weighted_correlation(one: numpy.ndarray, other: numpy.ndarray, weights: numpy.ndarray) -> numpy.ndarray:
    """Returns Pearson's weighted correlation, of points ``[point k]`` over all k together; 0 where nothing varies."""
    import numpy as np

    # Without the overall mean, as an offset would cost the products below their digits.
    one, other = (x.reshape(len(x), -1) - x.reshape(len(x), -1).mean(0) for x in (one, other))
    total = weights.sum(1)
    means = [(weights @ x) / total[:, None] for x in (one, other)]
    products = {
        (i, j): (weights @ (x * y) / total[:, None] - means[i] * means[j]).sum(1)
        for i, x in enumerate((one, other))
        for j, y in enumerate((one, other))
        if i <= j
    }
    scale = np.sqrt(np.clip(products[0, 0] * products[1, 1], 0, None))
    return np.divide(products[0, 1], scale, out=np.zeros_like(scale), where=scale > 1e-300)


def percentile_interval(resampled: numpy.ndarray) -> tuple[float, float]:
    """Returns the percentile interval of resamples; NaN where there are none, or all are equal."""
    import numpy as np

    if not len(resampled) or np.ptp(resampled) == 0:
        return float("nan"), float("nan")
    low, high = np.nanquantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
