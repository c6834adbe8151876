"""Finds the steps at which curves cross a level; infinite where a run ended before. Numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def lasting_crossing_steps(
    steps: Sequence[int], curves: Array, share: float, start: Array, end: Array
) -> Array:
    """Returns the step after which each curve has lastingly made ``share`` of the way from ``start`` to ``end``.

    After it a curve never falls back below that level (seen from ``start``). Linear between the stored steps;
    NaN for a curve that does not move, the first step for one that is past the level all along.
    """
    at = np.asarray(steps, dtype=float)
    curves, distance = np.atleast_2d(curves), np.atleast_1d(end) - np.atleast_1d(start)
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


def first_and_lasting_steps(
    steps: Sequence[int], values: Sequence[float], level: float
) -> tuple[float, float]:
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
        float(lasting_crossing_steps(steps[part], curve[part], level, np.zeros(1), np.ones(1))[0])
        for part in (begin, slice(None))
    )
    return math.inf if math.isnan(first) else first, math.inf if math.isnan(lasting) else lasting
