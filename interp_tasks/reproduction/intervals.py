"""Computes 95% intervals over a few training runs, and their p-values. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from statistics import NormalDist

#: Two-sided significance level: intervals cover 1 − ALPHA.
ALPHA = 0.05
#: An interval over fewer runs is hardly bounded.
MIN_RUNS = 3
#: How many numbers that are known between bounds alone are tried at both ends: 2 to the power of it.
MAX_CORNERS = 12

Interval = tuple[float, float]


def t_cdf(t: float, df: int) -> float:
    """Returns the share of Student's t distribution below ``t``."""
    beyond = regularised_incomplete_beta(df / (df + t * t), df / 2, 0.5) / 2
    return 1 - beyond if t > 0 else beyond


def regularised_incomplete_beta(x: float, a: float, b: float) -> float:
    """Returns the regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - regularised_incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d or tiny)
    fraction = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a


@cache
def t_quantile(share: float, df: int) -> float:
    """Returns the number below which a share of Student's t distribution lies."""
    if share < 0.5:
        return -t_quantile(1 - share, df)
    low, high = 0.0, 2.0
    while t_cdf(high, df) < share:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < share else (low, middle)
    return (low + high) / 2


def z_quantile(share: float) -> float:
    """Returns the quantile of the normal distribution."""
    return NormalDist().inv_cdf(share)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def mean_interval(several: Sequence[Interval]) -> Interval:
    """Returns an interval of a mean of numbers however dependent they are: the mean of their ends."""
    lows, highs = zip(*several, strict=True)
    return sum(lows) / len(lows), sum(highs) / len(highs)


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of independent numbers, at least two."""
    middle = mean(values)
    spread = math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(spread / len(values))


def t_interval(values: Sequence[float]) -> Interval | None:
    """Returns Student's t interval of a mean over runs; ``None`` for fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(1 - ALPHA / 2, len(values) - 1) * standard_error(values)
    return mean(values) - half, mean(values) + half


def fieller_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Returns Fieller's interval of the ratio of two means over independent runs.

    The degrees of freedom are of the smaller group, which is the careful choice. ``None`` where the divisor cannot be
    told from 0 (the set is unbounded then), or a group has fewer than two runs.
    """
    fewest = min(len(above), len(below))
    if fewest < 2 or not mean(below):
        return None
    t = t_quantile(1 - ALPHA / 2, fewest - 1)
    ratio = mean(above) / mean(below)
    above_variance, below_variance = (standard_error(values) ** 2 for values in (above, below))
    g = t * t * below_variance / mean(below) ** 2
    if g >= 1:
        return None
    half = t / abs(mean(below)) * math.sqrt(above_variance * (1 - g) + ratio * ratio * below_variance)
    return (ratio - half) / (1 - g), (ratio + half) / (1 - g)


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


def bonferroni_interval(interval: Interval, value: float, looks: int) -> Interval:
    """Returns an interval for one of several looks that are to hold together (Bonferroni, normal)."""
    factor = z_quantile(1 - ALPHA / 2 / looks) / z_quantile(1 - ALPHA / 2)
    return value - factor * (value - interval[0]), value + factor * (interval[1] - value)


def quotient(above: Interval, below: Interval) -> Interval | None:
    """Returns all that one number between bounds can be of another; ``None`` where that may be 0."""
    if below[0] <= 0 <= below[1]:
        return None
    ends = [over / under for over in above for under in below]
    return min(ends), max(ends)


def p_value_at_bound(value: float, error: float, df: int | None, bound: float) -> float:
    """Returns the share of the t distribution (normal: ``df`` is ``None``) beyond a bound, on its side of the number.

    One-sided: small where the number is well below the bound.

    Args:
        error: above 0; numbers that do not differ have no such share.
    """
    t = (bound - value) / error
    return 1 - (NormalDist().cdf(t) if df is None else t_cdf(t, df))
