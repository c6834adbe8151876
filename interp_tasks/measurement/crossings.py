"""When a curve over training steps has made some share of its way. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def crossing(steps: Sequence[int], values: Array, share: float, start: Array, end: Array) -> Array:
    """The step at which curves ``[curve step]`` have made ``share`` of the way from ``start`` to ``end`` for good.

    After it a curve never falls back below that level (seen from ``start``). Linear between the stored steps;
    NaN for a curve that does not move, the first step for one that is past the level all along.
    """
    at = np.asarray(steps, dtype=float)
    curves, way = np.atleast_2d(values), np.atleast_1d(end) - np.atleast_1d(start)
    with np.errstate(divide="ignore", invalid="ignore"):
        made = (curves - np.atleast_1d(start)[:, None]) / way[:, None]
    found = np.full(len(curves), np.nan)
    for row, curve in enumerate(made):
        if not np.isfinite(curve).all():
            continue
        below = np.flatnonzero(curve < share)
        if not len(below):
            found[row] = at[0]
        elif below[-1] + 1 < len(at):
            last = below[-1]
            part = (share - curve[last]) / (curve[last + 1] - curve[last])
            found[row] = at[last] + part * (at[last + 1] - at[last])
    return found
