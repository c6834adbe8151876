"""Statistics of steps over runs, some of them censored: infinite, beyond every step reached.

That is all that is known of them, which is enough for a median, a rank, or a bound on a ratio. Numpy only.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def median(values: Array) -> Array:
    """Returns medians ``[...]`` of ``[... run]`` with infinite values; infinite, or NaN, where unknown."""
    ordered = np.sort(values, axis=-1)
    n = values.shape[-1]
    with np.errstate(invalid="ignore"):
        return np.asarray((ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2)


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
