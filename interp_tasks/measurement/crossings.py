"""Finds the steps at which curves cross a level, and statistics of such steps over runs, some of them censored.

A run that ended before is censored: its step is infinite here, and NaN in a table. That it lies beyond every step
reached is all that is known of it, which is enough for a median, a rank, or a bound on a ratio. Numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def crossing(steps: Sequence[int], values: Array, share: float, start: Array, end: Array) -> Array:
    """Returns the step after which each curve has lastingly made ``share`` of the way from ``start`` to ``end``.

    After it a curve never falls back below that level (seen from ``start``). Linear between the stored steps;
    NaN for a curve that does not move, the first step for one that is past the level all along.
    """
    at = np.asarray(steps, dtype=float)
    curves, distance = np.atleast_2d(values), np.atleast_1d(end) - np.atleast_1d(start)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (curves - np.atleast_1d(start)[:, None]) / distance[:, None]
    crossings = np.full(len(curves), np.nan)
    for row, curve in enumerate(shares):
        if not np.isfinite(curve).all():
            continue
        below = np.flatnonzero(curve < share)
        if not len(below):
            crossings[row] = at[0]
        elif below[-1] + 1 < len(at):
            last = below[-1]
            part = (share - curve[last]) / (curve[last + 1] - curve[last])
            crossings[row] = at[last] + part * (at[last + 1] - at[last])
    return crossings


def reached(steps: Sequence[int], values: Sequence[float], level: float) -> tuple[float, float]:
    """Returns the first step at a level and the first step of staying there; infinite where there is none.

    Linear between logged steps.
    """
    curve = np.asarray(values, dtype=float)
    if not len(curve):
        return math.inf, math.inf
    there = np.flatnonzero(curve >= level)
    # As far as to where it first is there, it lastingly is from there on.
    begin = slice(None, int(there[0]) + 1 if len(there) else None)
    first, lasting = (
        float(crossing(steps[part], curve[part], level, np.zeros(1), np.ones(1))[0])
        for part in (begin, slice(None))
    )
    return (
        math.inf if math.isnan(first) else first,
        math.inf if math.isnan(lasting) else lasting,
    )


def median(values: Array) -> Array:
    """Returns medians ``[...]`` of ``[... run]`` with infinite values; infinite, or NaN, where unknown."""
    ordered = np.sort(values, axis=-1)
    n = values.shape[-1]
    with np.errstate(invalid="ignore"):
        return np.asarray((ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2)


def finite_or_nan(value: float) -> float:
    """Returns the value, or NaN where it is infinite: unknown."""
    return float(value) if math.isfinite(value) else math.nan


def ratio_of_steps(
    one: float, one_until: float, other: float, other_until: float
) -> tuple[float, float, float]:
    """Returns the ratio of the steps that two runs need, and its least and greatest possible value.

    Where both get there all three are the same number, infinite for a later one beside one that is there at step 0.
    Where one is censored the ratio is infinite, or zero, and the last steps (``until``) bound it from one side; where
    both are, or both are there at step 0, it is NaN, and nothing bounds it.
    """
    if math.isinf(one) and math.isinf(other):
        return math.nan, 0.0, math.inf
    if math.isinf(one):
        return math.inf, one_until / other if other else math.inf, math.inf
    if math.isinf(other):
        return 0.0, 0.0, one / other_until if other_until else math.inf
    if not other:
        return (math.inf,) * 3 if one else (math.nan, 0.0, math.inf)
    return (one / other,) * 3


def share_in_order(steps: Array) -> float:
    """Returns the share of pairs in which the second step is later; ties count half, two censored steps not at all."""
    counted = [
        0.5 if steps[i] == steps[j] else float(steps[i] < steps[j])
        for i in range(len(steps))
        for j in range(i + 1, len(steps))
        if not (math.isinf(steps[i]) and math.isinf(steps[j]))
    ]
    return float(np.mean(counted)) if counted else math.nan
