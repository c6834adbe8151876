"""Pairs of results on the same examples as rows of the table: values, baselines, differences, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

#: Resamples behind an interval, and its level.
DRAWS, LEVEL = 1000, 0.95


def paired(
    metrics: Mapping[str, Any], baselines: Mapping[str, Any] | None, seed: int
) -> list[dict[str, Any]]:
    """Returns a row per metric, of per-example values or (sum, count) pairs as a task gives them.

    The value is pooled over examples, Σsum / Σcount; ``effect`` is value − baseline. Intervals: 95%, bootstrap over
    examples, the same resamples for both.
    """
    import numpy as np

    from circuits.statistics import interval, ratio

    rows = []
    for name, metric in metrics.items():
        series = [read(metric)] if baselines is None else [read(metric), read(baselines[name])]
        sums, counts = (np.stack(part) for part in zip(*series, strict=True))
        pooled = ratio(sums.sum(1), counts.sum(1))
        weights = resamples(seed, sums.shape[1])
        resampled = ratio(weights @ sums.T, weights @ counts.T)
        low, high = interval(resampled[:, :1], LEVEL)
        row: dict[str, Any] = {"metric": name, "n": sums.shape[1], "value": pooled[0]}
        row |= {"value_ci_low": low[0], "value_ci_high": high[0]}
        if baselines is not None:
            low, high = interval(resampled[:, :1] - resampled[:, 1:], LEVEL)
            row |= {"baseline": pooled[1], "effect": pooled[0] - pooled[1]}
            row |= {"effect_ci_low": low[0], "effect_ci_high": high[0]}
        rows.append(row if sums.shape[1] > 1 else without_intervals(row))
    return rows


@lru_cache(maxsize=4)
def resamples(seed: int, examples: int, stream: int = 1) -> numpy.ndarray:
    """Returns how often each example is in each resample: [draws examples]; the same for every row of a table.

    Args:
        stream: tells apart what is resampled under one seed.
    """
    import numpy as np

    counts = np.random.default_rng([seed, stream]).multinomial(
        examples, np.full(examples, 1 / examples), size=DRAWS
    )
    return counts.astype(float)


def read(metric: Any) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Returns (sums, counts) of the examples, in double precision."""
    import torch

    total, count = metric if isinstance(metric, tuple) else (metric, torch.ones_like(metric))
    return total.double().cpu().numpy(), count.double().cpu().numpy()


def without_intervals(row: dict[str, Any]) -> dict[str, Any]:
    """Removes the intervals: one example says nothing about how examples differ."""
    return {name: float("nan") if "ci_" in name else value for name, value in row.items()}
