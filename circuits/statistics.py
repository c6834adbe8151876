"""Intervals and tests for pooled ratios: paired bootstrap, sign-flip p-values, Holm's adjustment.

Every example i brings a sum S_i and a count C_i; a metric's value is ΣS/ΣC. A plain per-example value has
C_i = 1, so that the value is the mean. Where ΣC = 0 there is nothing to average and the value is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

#: Of the intervals in every table.
LEVEL = 0.95

# Drawn, and multiplied with series, in blocks of at most this many numbers, which bounds the memory.
_BLOCK = 8_000_000
# Draws of no more numbers are kept: they take longer than what is computed from them.
_KEPT = 4_000_000

Draw = Callable[[np.random.Generator, int, int], np.ndarray]


@dataclass
class Resampling:
    """The draws of one table. What is drawn depends on seed and number of examples alone, not on what it is for."""

    seed: int
    draws: int = 1
    flips: int = 1
    _kept: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    def weights(self, examples: int, series: int) -> Iterator[np.ndarray]:
        """Blocks [draw example]: how often an example is in a resample."""
        return self._blocks(_weights, 1, self.draws, examples, series)

    def flips_are_all(self, examples: int) -> bool:
        """Whether all 2^n flips are no more than `flips`."""
        return examples < 63 and 2**examples <= self.flips

    def swaps(self, examples: int, series: int) -> Iterator[np.ndarray]:
        """Blocks [flip example]: 1 where the pair of an example is swapped, else 0."""
        if self.flips_are_all(examples):
            numbers = np.arange(2**examples)[:, None]
            return iter([((numbers >> np.arange(examples)) & 1).astype(float)])
        return self._blocks(_swaps, 2, self.flips, examples, series)

    def _blocks(
        self, draw: Draw, stream: int, count: int, examples: int, series: int
    ) -> Iterator[np.ndarray]:
        """Row after row from one generator: neither the size of blocks nor keeping them changes a number."""
        rng = np.random.default_rng([self.seed, stream])
        step = max(1, _BLOCK // max(1, examples, series))
        if count * examples > _KEPT:
            for start in range(0, count, step):
                yield draw(rng, min(step, count - start), examples)
            return
        if (stream, examples) not in self._kept:
            self._kept[stream, examples] = draw(rng, count, examples)
        for start in range(0, count, step):
            yield self._kept[stream, examples][start : start + step]


def _weights(rng: np.random.Generator, count: int, examples: int) -> np.ndarray:
    return rng.multinomial(examples, np.full(examples, 1 / examples), size=count).astype(float)


def _swaps(rng: np.random.Generator, count: int, examples: int) -> np.ndarray:
    return rng.integers(0, 2, size=(count, examples)).astype(float)


# Series of several groups are summarised together up to this many numbers at a time.
_TOGETHER = 1_000_000


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
    return summarise_groups([(sums, counts)], Resampling(seed, draws, flips), level)[0]


def summarise_groups(
    groups: Sequence[tuple[np.ndarray, np.ndarray]], resampling: Resampling, level: float
) -> list[Summary]:
    """`summarise` of each (sums, counts), with the same draws; those of one shape are computed together."""
    found: list[Summary | None] = [None] * len(groups)
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, (sums, _) in enumerate(groups):
        alike.setdefault(sums.shape, []).append(place)
    for (series, _), places in alike.items():
        step = max(1, _TOGETHER // (series * max(resampling.draws, resampling.flips)))
        for start in range(0, len(places), step):
            several = places[start : start + step]
            sums, counts = (np.stack([groups[place][which] for place in several]) for which in (0, 1))
            together = _summarise(sums, counts, resampling, level)
            for at, place in enumerate(several):
                found[place] = Summary(*(getattr(together, each.name)[at] for each in fields(Summary)))
    return [one for one in found if one is not None]


def _summarise(sums: np.ndarray, counts: np.ndarray, resampling: Resampling, level: float) -> Summary:
    """Of groups [group series examples]; series 0 of each group is what its others are compared with."""
    value = ratio(sums.sum(-1), counts.sum(-1))
    effect = value - value[:, :1]
    resampled = _resampled(sums, counts, resampling)
    low, high = interval(resampled, level)
    effect_low, effect_high = interval(resampled - resampled[..., :1], level)
    share_low, share_high = interval(ratio(resampled, resampled[..., :1]), level)
    if sums.shape[-1] < 2:
        low, high, effect_low, effect_high, share_low, share_high = (
            np.full_like(value, np.nan) for _ in range(6)
        )
    share = ratio(value, value[:, :1])
    p_value = _sign_flip(sums, counts, resampling)
    return Summary(value, low, high, effect, effect_low, effect_high, share, share_low, share_high, p_value)


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """numerator / denominator, NaN where there is no entry."""
    return np.divide(
        numerator, denominator, out=np.full_like(numerator, np.nan, dtype=float), where=denominator != 0
    )


def bootstrap(sums: np.ndarray, counts: np.ndarray, seed: int, draws: int) -> np.ndarray:
    """Pooled ratios [draws series], the same resamples of examples for every series."""
    return _resampled(sums, counts, Resampling(seed, draws=draws))


def _resampled(sums: np.ndarray, counts: np.ndarray, resampling: Resampling) -> np.ndarray:
    """[*group draws series]"""
    series, examples = sums.shape[-2:]
    found = [
        ratio(weights @ sums.swapaxes(-1, -2), weights @ counts.swapaxes(-1, -2))
        for weights in resampling.weights(examples, series)
    ]
    return found[0] if len(found) == 1 else np.concatenate(found, axis=-2)


def sign_flip(sums: np.ndarray, counts: np.ndarray, seed: int, flips: int) -> np.ndarray:
    """Two-sided p-value [series] that a series differs from series 0.

    Under the null the edited and the unedited result of an example are exchangeable: each flip swaps the
    pair (S, C) of every example with probability 1/2 and recomputes both pooled ratios. For plain values
    this is the sign-flip test of the mean difference. All 2^n flips are used where they are no more than
    `flips`; else that many are drawn, and p = (1 + hits) / (1 + flips). A flip that leaves a ratio without
    entries counts as a hit.
    """
    return _sign_flip(sums, counts, Resampling(seed, flips=flips))


def _sign_flip(sums: np.ndarray, counts: np.ndarray, resampling: Resampling) -> np.ndarray:
    """[*group series]"""
    series, examples = sums.shape[-2:]
    total, entries = sums.sum(-1), counts.sum(-1)
    observed = np.abs(ratio(total, entries) - ratio(total[..., :1], entries[..., :1]))
    # Rounding must not turn the observed arrangement, or one as extreme, into a smaller one.
    scale = np.abs(ratio(total, entries)) + np.abs(ratio(total[..., :1], entries[..., :1]))
    bar = (observed - 1e-11 * scale)[..., None, :]
    moved, moved_counts = ((each[..., :1, :] - each).swapaxes(-1, -2) for each in (sums, counts))
    same_counts = not moved_counts.any()
    total, entries = total[..., None, :], entries[..., None, :]
    hits = np.zeros(observed.shape)
    for swap in resampling.swaps(examples, series):
        shift = swap @ moved
        shift_counts = np.zeros_like(shift) if same_counts else swap @ moved_counts
        gap = ratio(total + shift, entries + shift_counts) - ratio(
            total[..., :1] - shift, entries[..., :1] - shift_counts
        )
        hits += (~(np.abs(gap) < bar)).sum(-2)
    every = resampling.flips_are_all(examples)
    p_value = hits / 2.0**examples if every else (1 + hits) / (1 + resampling.flips)
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
    """Percentile bounds [*group series] of resamples [*group draws series], those without any entry (NaN) left out."""
    columns = np.moveaxis(resampled, -2, 0).reshape(resampled.shape[-2], -1)
    bounds = np.full((2, columns.shape[1]), np.nan)
    gone = np.isnan(columns)
    some, lacking = ~gone.all(0), gone.any(0)
    tails = [(1 - level) / 2, (1 + level) / 2]
    # The same numbers, ten times slower, where entries are left out.
    for which, quantile in ((some & ~lacking, np.quantile), (some & lacking, np.nanquantile)):
        if which.any():
            bounds[:, which] = quantile(columns if which.all() else columns[:, which], tails, axis=0)
    low, high = bounds.reshape(2, *resampled.shape[:-2], resampled.shape[-1])
    return low, high
