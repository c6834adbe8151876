"""Intervals and tests for pooled ratios: paired bootstrap, sign-flip p-values, Holm's adjustment.

Every example i brings a sum S_i and a count C_i; a metric's value is ΣS/ΣC. A plain per-example value has
C_i = 1, so that the value is the mean. Where ΣC = 0 there is nothing to average and the value is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Weights or flips are drawn in blocks of at most this many numbers, which bounds the memory.
_BLOCK = 8_000_000


@dataclass(frozen=True)
class Summary:
    """Arrays [series]; series 0 is the unedited model, its effects are zero and its ratios one."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    effect: np.ndarray
    effect_low: np.ndarray
    effect_high: np.ndarray
    ratio: np.ndarray
    ratio_low: np.ndarray
    ratio_high: np.ndarray
    p_value: np.ndarray


def summarise(
    sums: np.ndarray, counts: np.ndarray, seed: int, draws: int, flips: int, level: float
) -> Summary:
    """Value, interval, paired effect and ratio, p-value of each series. `sums` and `counts` are [series examples].

    Intervals are percentile bootstrap over examples. One resample serves all series, so that effects and
    ratios are paired; a resample that holds no entry at all (ΣC = 0) is left out. With fewer than two examples there
    is no interval.
    """
    value = ratio(sums.sum(1), counts.sum(1))
    effect = value - value[0]
    resampled = bootstrap(sums, counts, seed, draws)
    low, high = interval(resampled, level)
    effect_low, effect_high = interval(resampled - resampled[:, :1], level)
    share_low, share_high = interval(ratio(resampled, resampled[:, :1]), level)
    if sums.shape[1] < 2:
        low, high, effect_low, effect_high, share_low, share_high = (
            np.full_like(value, np.nan) for _ in range(6)
        )
    share = ratio(value, value[:1])
    p_value = sign_flip(sums, counts, seed, flips)
    return Summary(value, low, high, effect, effect_low, effect_high, share, share_low, share_high, p_value)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """numerator / denominator, NaN where there is no entry."""
    return np.divide(
        numerator, denominator, out=np.full_like(numerator, np.nan, dtype=float), where=denominator != 0
    )


def bootstrap(sums: np.ndarray, counts: np.ndarray, seed: int, draws: int) -> np.ndarray:
    """Pooled ratios [draws series], the same resamples of examples for every series."""
    examples = sums.shape[1]
    rng = np.random.default_rng([seed, 1])
    found = []
    for size in _blocks(draws, max(examples, len(sums))):
        weights = rng.multinomial(examples, np.full(examples, 1 / examples), size=size).astype(float)
        found.append(ratio(weights @ sums.T, weights @ counts.T))
    return np.concatenate(found)


def sign_flip(sums: np.ndarray, counts: np.ndarray, seed: int, flips: int) -> np.ndarray:
    """Two-sided p-value [series] that a series differs from series 0.

    Under the null the edited and the unedited result of an example are exchangeable: each flip swaps the
    pair (S, C) of every example with probability 1/2 and recomputes both pooled ratios. For plain values
    this is the sign-flip test of the mean difference. All 2^n flips are used where they are no more than
    `flips`; else that many are drawn, and p = (1 + hits) / (1 + flips). A flip that leaves a ratio without
    entries counts as a hit.
    """
    examples = sums.shape[1]
    total, entries = sums.sum(1), counts.sum(1)
    observed = np.abs(ratio(total, entries) - ratio(total[:1], entries[:1]))
    # Rounding must not turn the observed arrangement, or one as extreme, into a smaller one.
    scale = np.abs(ratio(total, entries)) + np.abs(ratio(total[:1], entries[:1]))
    bar = observed - 1e-11 * scale
    moved, moved_counts = (sums[:1] - sums).T, (counts[:1] - counts).T
    same_counts = not moved_counts.any()
    exact = examples < 63 and 2**examples <= flips
    hits = np.zeros(len(sums))
    for swap in _all_flips(examples) if exact else _random_flips(examples, flips, seed, len(sums)):
        shift = swap @ moved
        shift_counts = np.zeros_like(shift) if same_counts else swap @ moved_counts
        gap = ratio(total + shift, entries + shift_counts) - ratio(
            total[:1] - shift, entries[:1] - shift_counts
        )
        hits += (~(np.abs(gap) < bar)).sum(0)
    p_value = hits / 2.0**examples if exact else (1 + hits) / (1 + flips)
    return np.where(np.isnan(observed), np.nan, p_value)


def holm(p_values: np.ndarray) -> np.ndarray:
    """Holm-adjusted p-values (Holm 1979); NaN stays NaN and is no part of the family."""
    adjusted = np.full(p_values.shape, np.nan)
    known = np.flatnonzero(~np.isnan(p_values))
    order = known[np.argsort(p_values[known], kind="stable")]
    steps = p_values[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else steps
    return adjusted


def interval(resampled: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bounds [series] of resamples [draws series], those without any entry (NaN) left out."""
    bounds = np.full((2, resampled.shape[1]), np.nan)
    some = ~np.isnan(resampled).all(0)
    if some.any():
        tails = [(1 - level) / 2, (1 + level) / 2]
        # The same numbers, ten times slower, where entries are left out.
        quantile = np.nanquantile if np.isnan(resampled[:, some]).any() else np.quantile
        bounds[:, some] = quantile(resampled[:, some], tails, axis=0)
    return bounds[0], bounds[1]


def _blocks(draws: int, width: int) -> Iterator[int]:
    step = max(1, _BLOCK // max(1, width))
    for start in range(0, draws, step):
        yield min(step, draws - start)


def _all_flips(examples: int) -> Iterator[np.ndarray]:
    numbers = np.arange(2**examples)[:, None]
    yield ((numbers >> np.arange(examples)) & 1).astype(float)


def _random_flips(examples: int, flips: int, seed: int, series: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng([seed, 2])
    for size in _blocks(flips, max(examples, series)):
        yield rng.integers(0, 2, size=(size, examples)).astype(float)
