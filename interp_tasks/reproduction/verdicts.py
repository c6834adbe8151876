"""Judges claims: makes an interval of the numbers of training runs, and a verdict of the interval and the rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import ALPHA, MIN_RUNS, Interval
from interp_tasks.pages.numbers import digits
from interp_tasks.published import Bounds, Claim
from interp_tasks.reproduction.numbers import (
    NOTHING,
    ClaimNumbers,
    NoRow,
    Rows,
    Seeds,
    Unmeasured,
    by_run,
    claim_numbers,
    single_runs,
)

Verdict = Literal["held", "failed", "undecided", "not testable", "not run", "error"]
CONTROLS = {
    "untrained": "an untrained model",
    "memorised": "a checkpoint that has only memorised",
    "shuffled": "a model trained on shuffled labels",
}
#: Whether on a logarithmic scale -> to the scale on which runs are averaged, and back.
SCALES: Mapping[bool, tuple[Callable[[float], float], Callable[[float], float]]] = {
    False: (float, float),
    True: (math.log, math.exp),
}


@dataclass(frozen=True)
class Outcome:
    """The verdict on one claim for the runs of one condition.

    Attributes:
        run: the name of the condition: that of its first run.
        n_runs: the number of training runs behind the value; 0 where no training run is.
        value, low, high: our number with its 95% interval; over runs, their mean with Student's interval.
        median: of a largest or smallest number, the median of the same numbers (over runs, the mean of theirs).
        bounds: what the numbers of all runs lie between, where of some no more is known.
        interval: a phrase that says over what the interval is taken.
        runs: the name and number of each run.
        verdict: the rule's verdict on the interval.
        reason: why there is no verdict, or a remark about it.
        p: the two-sided p-value against the nearest bound of the rule; ``p_holm`` is adjusted over the headlines of a
            paper.
        controls: the number of each model that should not pass, by the name of the control.
        hours: of training that a claim still needs where it was not run.
        published: whether it is of the paper's own configuration.
    """

    claim: Claim
    run: str
    n_runs: int
    verdict: Verdict
    value: float | None = None
    low: float | None = None
    high: float | None = None
    median: float | None = None
    bounds: Interval | None = None
    reason: str = ""
    interval: str = ""
    runs: tuple[tuple[str, float | None], ...] = ()
    p: float | None = None
    p_holm: float | None = None
    controls: tuple[tuple[str, float | None], ...] = ()
    hours: float | None = None
    published: bool = False


class Estimate(NamedTuple):
    """An interval of a claim's number, over what it is taken (or why there is none), its p-value, and a remark."""

    interval: Interval | None
    basis: str
    p: float | None = None
    remark: str = ""


def judge(
    claim: Claim,
    table: Rows,
    run: str,
    seeds: Seeds | None = None,
    controls: Mapping[str, Rows] | None = None,
) -> Outcome:
    """Returns the verdict on a claim, from its study's rows of all runs of one condition.

    Args:
        table: the rows of the study's table.
        run: the name that the outcome gives to the condition.
        seeds: says which runs are seeds of each other.
        controls: tables of the same study on models that should not pass, by the name of the control.
    """
    try:
        claimed = claim_numbers(claim, table, seeds)
    except Unmeasured as unmeasured:
        if isinstance(unmeasured, NoRow) and claim.absent:
            return Outcome(claim, run, 0, "not run", reason=claim.absent)
        return Outcome(claim, run, 0, "error", reason=str(unmeasured))
    outcome = verdict_of_numbers(claim, run, claimed)
    all_runs = len([name for name in by_run(single_runs(table)) if name])
    if claim.absent and not claimed.pooled and len(claimed.numbers) < all_runs:
        remark = f"{len(claimed.numbers)} of {all_runs} seeds have such a row; of the others, {claim.absent}"
        outcome = replace(outcome, reason=joined(outcome.reason, remark))
    shown: dict[str, float | None] = {}
    for name, rows in (controls or {}).items():
        try:
            shown[name] = shown_value(claim, claim_numbers(claim, rows, seeds))
        except Unmeasured:  # an untrained model may have no such row
            shown[name] = None
    outcome = replace(outcome, controls=tuple(shown.items()))
    passing = [name for name, value in shown.items() if value is not None and claim.holds.contains(value)]
    if not passing or claim.uncontrolled:
        return outcome
    reason = joined(f"{' and '.join(CONTROLS[name] for name in passing)} passes too", outcome.reason)
    verdict: Verdict = "not testable" if outcome.verdict == "held" else outcome.verdict
    return replace(outcome, verdict=verdict, reason=reason)


def joined(*parts: str) -> str:
    """Returns remarks as one line, without those that are empty."""
    return "; ".join(filter(None, parts))


def verdict_of_numbers(claim: Claim, run: str, claimed: ClaimNumbers) -> Outcome:
    """Returns the verdict of the rule on a claim's numbers."""
    numbers, n_runs, bounded = claimed.numbers, claimed.n_runs, claimed.bounded
    medians = [each.median for each in numbers if each.median is not None]
    outcome = Outcome(
        *(claim, run, n_runs, "undecided", shown_value(claim, claimed)),
        median=intervals.mean(medians) if medians else None,
        bounds=hull([each.bounds for each in numbers]) if bounded and not claimed.against else None,
        runs=() if claimed.against else tuple((each.run, known(each.value)) for each in numbers),
    )
    lacking = [each for each in numbers if math.isnan(each.value) and not each.is_bounded]
    if lacking:
        share = "" if len(numbers) == 1 else f" on {len(lacking)} of {len(numbers)} runs"
        return replace(
            outcome, reason=f"there is no such number{share}: its row is empty, or it is a share of 0"
        )
    ends = f"known to lie {range_text(*hull(bounded))}" if bounded else ""
    is_about_runs = claim.over != "examples" and n_runs > 0
    if is_about_runs and n_runs < MIN_RUNS:
        runs = "one training run" if n_runs == 1 else f"{n_runs} training runs"
        few = f"{runs}, of three at least{where_numbers_lie(claim.holds, claimed)}"
        too_soon = f"a run ends too soon: the number is {ends}" if bounded and n_runs == 1 else ""
        return replace(outcome, reason=joined(few, too_soon))
    estimate = (interval_over_runs if is_about_runs else interval_over_examples)(claim, claimed)
    if estimate.interval is None:
        return replace(outcome, reason=f"no interval: {estimate.basis}" if is_about_runs else estimate.basis)
    verdict = decision(claim.holds, estimate.interval)
    across = "the interval reaches across the rule's bound" if verdict == "undecided" else ""
    too_soon = f"{len(bounded)} of {n_runs} runs end too soon: their numbers are {ends}" if bounded else ""
    low, high = estimate.interval
    return replace(
        outcome,
        low=low,
        high=high,
        verdict=verdict,
        interval=estimate.basis,
        p=estimate.p,
        reason=joined(estimate.remark or across, too_soon),
    )


def known(value: float) -> float | None:
    return None if math.isnan(value) else value


def hull(several: Sequence[Interval]) -> Interval:
    """Returns the smallest interval that holds all of these."""
    lows, highs = zip(*several, strict=True)
    return min(lows), max(highs)


def where_numbers_lie(bounds: Bounds, claimed: ClaimNumbers) -> str:
    """Returns a phrase that says where the numbers of too few runs lie."""
    if claimed.against:
        divided = len(claimed.numbers)
        return f"; {divided} are divided by it" if len(claimed.against) == 1 < divided else ""
    verdicts = [decision(bounds, each.bounds, not each.is_bounded) for each in claimed.numbers]
    if len(verdicts) > 1:
        return f"; {verdicts.count('held')} of them within the rule"
    return {"held": "; this one lies within the rule", "failed": "; this one does not"}.get(verdicts[0], "")


def interval_over_examples(claim: Claim, claimed: ClaimNumbers) -> Estimate:
    """Returns the table's own interval over examples, of several runs the mean of theirs."""
    several = [each.over_examples for each in claimed.numbers if each.over_examples is not None]
    value = shown_value(claim, claimed)
    if value is None or len(several) < len(claimed.numbers):
        return Estimate(None, "the study has no interval of this number")
    low, high = intervals.mean_interval(several)
    error = (high - low) / 2 / intervals.z_quantile(1 - ALPHA / 2)
    return Estimate(
        (low, high), "over examples", two_sided(claim.holds, value, error, None) if error else None
    )


def interval_over_runs(claim: Claim, claimed: ClaimNumbers) -> Estimate:
    """Returns the interval over runs: Student's t unless the claim or what is known of its numbers asks for another."""
    n_runs, values = claimed.n_runs, [each.value for each in claimed.numbers]
    over = f"over {n_runs} runs"
    if claimed.pooled:
        found = claimed.numbers[0].over_examples
        return Estimate(found, f"the study's, {over}" if found else "the study has none of this number")
    if claimed.bounded:
        return interval_of_bounds(claim, claimed)
    if claimed.against:
        found = intervals.fieller_interval(values, claimed.against)
        divisors = f"{len(claimed.against)} runs"
        why = f"the divisor over {divisors} cannot be told from 0"
        return Estimate(found, f"Fieller, over {len(values)} and {divisors}" if found else why)
    if claim.over == "share of runs":
        p = share_p_value(claim.holds, values)
        return Estimate(intervals.share_interval(values), f"exact binomial, {over}", p)
    if claim.log and min(values) <= 0:
        return Estimate(None, "a number that is not above 0 has no logarithm")
    forth, back = SCALES[claim.log]
    scaled = [forth(value) for value in values]
    low, high = intervals.t_interval(scaled) or NOTHING
    found, basis = (back(low), back(high)), f"t, {over}{', of the logarithm' * claim.log}"
    error = intervals.standard_error(scaled)
    # A t of no spread would have a p-value of 0, which a few runs that agree cannot show.
    if not error or len(set(values)) == 1:
        return Estimate(
            found, basis, remark=f"all {n_runs} runs give the same number: no spread, and no p-value"
        )
    ends = {name: forth(end) for name, end in claim.holds if end is not None}
    return Estimate(found, basis, two_sided(Bounds(**ends), intervals.mean(scaled), error, n_runs - 1))


def interval_of_bounds(claim: Claim, claimed: ClaimNumbers) -> Estimate:
    """Returns the interval over runs of which some end too soon to give more than bounds of their number."""
    bounds, n_runs = [each.bounds for each in claimed.numbers], claimed.n_runs
    if claimed.against:
        return Estimate(None, "a run ends too soon, and cannot be paired with those it is divided by")
    lowest, unknown = min(low for low, _ in bounds), len(claimed.bounded)
    # A bound of 0 has no logarithm: then the interval is of the numbers themselves.
    forth, back = SCALES[claim.log and lowest > 0]
    found = intervals.bounded_t_interval([(forth(low), forth(high)) for low, high in bounds])
    if found is not None:
        low, high = map(back, found)
        basis = f"t, over {n_runs} runs, of {unknown} of which bounds alone are known"
        return Estimate((max(low, 0.0) if lowest >= 0 else low, high), basis)
    found = intervals.median_interval(bounds)
    if found is not None:
        return Estimate(found, f"of the median, over {n_runs} runs")
    lacking = f"{unknown} of {n_runs} runs end too soon to have the number"
    where = where_numbers_lie(claim.holds, claimed)
    return Estimate(None, f"{lacking}, and an interval of the median takes six{where}")


def shown_value(claim: Claim, claimed: ClaimNumbers) -> float | None:
    """Returns the mean over runs, the geometric one where the claim is on a log scale; ``None`` where there is none."""
    values, (forth, back) = [each.value for each in claimed.numbers], SCALES[claim.log]
    if claimed.against:
        return known(intervals.mean(values) / intervals.mean(claimed.against))
    if any(math.isnan(value) for value in values) or (claim.log and min(values) <= 0):
        return None
    return back(intervals.mean([forth(value) for value in values]))


def decision(bounds: Bounds, interval: Interval, closed: bool = True) -> Verdict:
    """Returns the verdict on an interval; an open one does not hold its ends."""
    (low, high), above, below = interval, bounds.above, bounds.below
    is_above = above is None or low > above or (low == above and not closed)
    is_below = below is None or high < below or (high == below and not closed)
    if is_above and is_below:
        return "held"
    if (above is not None and high <= above) or (below is not None and low >= below):
        return "failed"
    return "undecided"


def share_p_value(bounds: Bounds, values: Sequence[float]) -> float:
    """Returns the exact binomial p-value of a share of runs against the rule's bound, twice the smaller tail."""
    from scipy.special import bdtr, bdtrc

    n, hits = len(values), round(sum(values))
    (bound,) = (end for end in (bounds.above, bounds.below) if end is not None)
    as_few, as_many = bdtr(hits, n, bound), bdtrc(hits - 1, n, bound) if hits else 1.0
    return min(1.0, 2 * float(min(as_few, as_many)))


def two_sided(bounds: Bounds, value: float, error: float, df: int | None) -> float:
    """Returns twice the smaller of two one-sided p-values: that the number breaks the rule, and that it keeps it.

    Below 0.05 exactly where the 95% interval lies on one side of the rule.
    """

    def beyond(bound: float, sign: int) -> float:
        return intervals.p_value_at_bound(sign * value, error, df, sign * bound)

    # Each bound with the sign of its inside: small where the number is well within, and where it is well without.
    ends = [(end, sign) for end, sign in ((bounds.above, -1), (bounds.below, 1)) if end is not None]
    within = max(beyond(end, sign) for end, sign in ends)
    without = min(beyond(end, -sign) for end, sign in ends)
    return min(1.0, 2 * min(within, without))


def range_text(low: float, high: float) -> str:
    """Returns a phrase for a range, such as "between 1 and 2"."""
    if math.isinf(high):
        return "anywhere" if low <= 0 else f"above {digits(low, 3)}"
    return f"below {digits(high, 3)}" if low <= 0 else f"between {digits(low, 3)} and {digits(high, 3)}"
