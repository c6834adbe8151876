"""Intervals and tests for pooled ratios: paired bootstrap, sign-flip p-values, Holm's adjustment.

Every example i brings a sum S_i and a count C_i; a metric's value is ΣS/ΣC. A plain per-example value has
C_i = 1, so that the value is the mean. Where ΣC = 0 there is nothing to average and the value is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

#: The level of the intervals in every table.
LEVEL = 0.95
#: An adjusted p-value below this is called significant.
ALPHA = 0.05

# Resamples are multiplied with series in blocks of at most this many numbers, to bound the memory; flips, of which
# there are more, in blocks that stay in a processor's cache.
_BLOCK, _FLIPS = 8_000_000, 2**17
# Draws of at most this many numbers are cached, because drawing takes longer than the statistics.
_KEPT = 4_000_000

# Ratios of resamples that differ by less, relative to their size, differ by rounding.
_SAME = 1e-9

Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def _draw_blocks(
    seed: int, draw: Draw, seed_stream: int, count: int, examples: int, step: int
) -> Iterator[np.ndarray]:
    """Yields blocks [example draw] from one generator; neither their size nor caching changes a number."""
    step = max(1, step)
    if count * examples <= _KEPT:
        drawn = _cached_draws(draw, seed, seed_stream, count, examples)
        return (drawn[:, start : start + step].astype(float) for start in range(0, count, step))
    rng = np.random.default_rng([seed, seed_stream])
    starts = range(0, count, step)
    return (draw(rng, min(step, count - start), examples).T.astype(float, order="C") for start in starts)


@lru_cache(maxsize=8)
def _cached_draws(draw: Draw, seed: int, seed_stream: int, count: int, examples: int) -> np.ndarray:
    """Returns all draws of one kind, which the tables of all sweeps of so many examples share: [example draw], as
    products with the few series of a table are faster so.
    """
    drawn = draw(np.random.default_rng([seed, seed_stream]), count, examples)
    return drawn.T.astype(np.min_scalar_type(examples), order="C")


def _bootstrap_counts(rng: np.random.Generator, count: int, examples: int) -> np.ndarray:
    """Returns how often each example is in a resample, [draw example]."""
    return rng.multinomial(examples, np.full(examples, 1 / examples), size=count)


def _draw_swaps(rng: np.random.Generator, count: int, examples: int) -> np.ndarray:
    """Returns 1 where the pair of an example is swapped, else 0, [flip example]."""
    return rng.integers(0, 2, size=(count, examples))


def summary_columns(
    sums: np.ndarray, counts: np.ndarray, seed: int, draws: int, flips: int, level: float
) -> dict[str, np.ndarray]:
    """Returns columns of a table, each an array [series]: value, interval, paired effect, ratio and p-value. Inputs are
    [series examples]; series 0 is the unedited model, with effects of 0, ratios of 1.

    Intervals are percentile bootstrap over examples. One resample serves all series, so that effects and
    ratios are paired; a resample that holds no entry at all (ΣC = 0) is left out. With fewer than two examples there
    is no interval, nor of a ratio whose denominator may be 0.
    """
    value = ratio(sums.sum(-1), counts.sum(-1))
    resampled = bootstrap_ratios(sums, counts, seed, draws)
    paired = (resampled, resampled - resampled[:, :1], ratio(resampled, resampled[:, :1]))
    # All at once, as a call takes longer than its work where there are few series.
    bounds = percentile_bounds(np.concatenate(paired, axis=-1), level)
    (low, effect_low, share_low), (high, effect_high, share_high) = (np.split(bound, 3) for bound in bounds)
    # Where the denominator may be 0 no interval of the ratio has both ends (Fieller 1954), and percentiles of resamples
    # cover it far less often than they say; but a ratio that is the same in all resamples is known.
    known = share_high - share_low <= _SAME * np.abs(share_high)
    endless = (low[:1] <= 0) & (high[:1] >= 0) & ~known
    share_low, share_high = (np.where(endless, np.nan, bound) for bound in (share_low, share_high))
    effect, share = value - value[:1], ratio(value, value[:1])
    p_value = sign_flip_p_values(sums, counts, seed, flips)
    # Changes that cancel in the mean are an effect of 0, not none.
    same = (sums == sums[0]).all(1) & (counts == counts[0]).all(1) & counts[0].any()
    return {
        "value": value,
        "value_ci_low": low,
        "value_ci_high": high,
        "effect": effect,
        "effect_ci_low": effect_low,
        "effect_ci_high": effect_high,
        "ratio": share,
        "ratio_ci_low": share_low,
        "ratio_ci_high": share_high,
        "p_value": p_value,
        "null_effect": same,
    }


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Returns numerator / denominator, NaN where the denominator is 0."""
    if np.all(denominator):
        return numerator / denominator
    return np.divide(
        numerator, denominator, out=np.full_like(numerator, np.nan, dtype=float), where=denominator != 0
    )


def bootstrap_ratios(sums: np.ndarray, counts: np.ndarray, seed: int, draws: int) -> np.ndarray:
    """Returns pooled ratios [draws series] of resamples, of the same examples for every series; of one example NaN."""
    series, examples = sums.shape
    if examples < 2:
        return np.full((draws, series), np.nan)
    resamples = _draw_blocks(seed, _bootstrap_counts, 1, draws, examples, _BLOCK // max(1, examples, series))
    blocks = [ratio(sums @ weights, counts @ weights) for weights in resamples]
    return np.concatenate(blocks, axis=-1).T


def sign_flip_p_values(sums: np.ndarray, counts: np.ndarray, seed: int, flips: int) -> np.ndarray:
    """Returns two-sided p-values [series] of the difference of each series from series 0.

    Under the null the edited and the unedited result of an example are exchangeable: each flip swaps the
    pair (S, C) of every example with probability 1/2 and recomputes both pooled ratios. For plain values
    this is the sign-flip test of the mean difference. All 2^n flips are used where there are at most
    `flips` of them; else that many are drawn, and p = (1 + hits) / (1 + flips). A flip that leaves a ratio without
    entries counts as a hit.
    """
    examples, exhaustive = sums.shape[-1], 2 ** sums.shape[-1] <= flips
    total, entries = sums.sum(-1, keepdims=True), counts.sum(-1, keepdims=True)
    values = ratio(total, entries)
    observed = np.abs(values - values[:1])
    # Rounding must not turn the observed arrangement, or one as extreme, into a smaller one.
    threshold = observed - 1e-11 * (np.abs(values) + np.abs(values[:1]))
    pair_differences, count_differences = sums[:1] - sums, counts[:1] - counts
    same_counts = not count_differences.any()
    hits = np.zeros(len(sums))
    if exhaustive:
        swaps = iter([((np.arange(2**examples) >> np.arange(examples)[:, None]) & 1).astype(float)])
    else:
        swaps = _draw_blocks(seed, _draw_swaps, 2, flips, examples, _FLIPS // max(1, examples, len(sums)))
    for swap in swaps:
        shift = pair_differences @ swap  # what swaps add to the sums of the edited run, [series flip]
        if same_counts:
            # The difference of the two ratios, times their denominator.
            difference, limit = 2 * shift + total - total[:1], threshold * entries
        else:
            more, limit = count_differences @ swap, threshold
            difference = ratio(total + shift, entries + more) - ratio(total[:1] - shift, entries[:1] - more)
        hits += (~(np.abs(difference) < limit)).sum(-1)
    p_value = hits / 2.0**examples if exhaustive else (1 + hits) / (1 + flips)
    return np.where(np.isnan(observed[:, 0]), np.nan, p_value)


def holm_adjusted(p_values: np.ndarray) -> np.ndarray:
    """Returns Holm-adjusted p-values (Holm 1979); NaN stays NaN and is not counted in the family."""
    adjusted = np.full(p_values.shape, np.nan)
    order = np.argsort(p_values, kind="stable")[: np.isfinite(p_values).sum()]  # NaN come last
    steps = p_values[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps))
    return adjusted


def min_adjusted_p(tests: int, examples: int, flips: int) -> float:
    """Returns the smallest Holm-adjusted p-value that the first of so many sign-flip tests can have, at most 1."""
    exhaustive = 2**examples <= flips
    # Of all flips two are as extreme as can be: no pair swapped, and every pair.
    return min(1.0, tests * (2 / 2**examples if exhaustive else 1 / (1 + flips)))


def p_value_floor_notes(p_values: np.ndarray, examples: int, flips: int) -> list[str]:
    """Returns a line where adjusted p-values cannot come below 0.05 whatever the effects, with what would do."""
    tests = int((~np.isnan(p_values)).sum())
    least = min_adjusted_p(tests, examples, flips)
    if least < ALPHA:
        return []
    needed = round(tests / ALPHA)
    wanted = [f"flips={needed}"] if needed > flips else []
    if min_adjusted_p(tests, examples, max(flips, needed)) >= ALPHA:
        wanted.insert(0, f"{(2 * needed).bit_length()} examples")
    number = f"{tests} test{'' if tests == 1 else 's'}"
    return [
        f"No p_adjusted of {number} of {examples} examples with flips={flips} is below {least:.2g}; "
        f"{' and '.join(wanted)} would do."
    ]


def percentile_bounds(resampled: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns percentile bounds [*group series] of resamples [*group draws series]; NaN resamples are left out."""
    # Of NaN alone the bounds are NaN, without numpy's warning; nanquantile takes much longer.
    some = np.where(np.isnan(resampled).all(-2, keepdims=True), 0.0, resampled)
    quantile = np.nanquantile if np.isnan(some).any() else np.quantile
    bounds = quantile(some, [(1 - level) / 2, (1 + level) / 2], axis=-2)
    low, high = np.where(np.isnan(resampled).all(-2), np.nan, bounds) + 0.0  # no negative zero
    return low, high
