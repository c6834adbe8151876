"""Rows of a number of a checkpoint, and of the same number of untrained models beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The share of the untrained models that their range holds.
RANGE = 0.95
#: How ``intervention`` begins where the row is of the untrained models.
BESIDE = "untrained: "

#: Of a row: variant, intervention, metric.
Key = tuple[str, str, str]


def both(
    key: Key, value: float, beside: Sequence[float], more: Mapping[str, Any], own_row: bool = True
) -> list[dict[str, Any]]:
    """A row, and below it one of the untrained models (but not where ``own_row`` is false)."""
    import numpy as np

    variant, about, metric = key
    row: dict[str, Any] = {"variant": variant, "intervention": about, "metric": metric, "value": value}
    row |= {"engine": "exact", **more}
    if not beside:
        return [row]
    middle = float(np.mean(beside))
    row |= {"baseline": middle, "effect": value - middle}
    if not own_row:
        return [row]
    low, high = np.quantile(beside, [(1 - RANGE) / 2, (1 + RANGE) / 2])
    other = {"variant": variant, "intervention": BESIDE + about, "metric": metric, "value": middle}
    other |= {"site": row["site"], "ci_low": float(low), "ci_high": float(high), "n": len(beside)}
    return [row, {**other, "engine": "exact"}]
