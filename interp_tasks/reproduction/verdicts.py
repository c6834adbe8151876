"""Judges claims: makes an interval of the numbers of training runs, and a verdict of the interval and the rule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import ALPHA, MIN_RUNS, Interval
from interp_tasks.pages.numbers import digits
from interp_tasks.published import Bounds, Claim
from interp_tasks.reproduction.claim_numbers import (
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
        claimed = claim_numbers(claim, table, seeds or {})
    except Unmeasured as unmeasured:
        if isinstance(unmeasured, NoRow) and claim.absent:
            return Outcome(claim, run, 0, "not run", reason=claim.absent)
        return Outcome(claim, run, 0, "error", reason=str(unmeasured))
    outcome = verdict_of_numbers(claim, run, claimed)
    all_runs = len([name for name in by_run(single_runs(table)) if name])
    if claim.absent and not claimed.pooled and len(claimed.numbers) < all_runs:
        remark = f"{len(claimed.numbers)} of {all_runs} seeds have such a row; of the others, {claim.absent}"
        outcome = replace(outcome, reason="; ".join(filter(None, (outcome.reason, remark))))
    control_numbers = []
    for name, rows in (controls or {}).items():
        try:
            number = shown_value(claim, claim_numbers(claim, rows, seeds or {}))
        except Unmeasured:  # an untrained model may have no such row
            number = None
        control_numbers.append((name, number))
    passing_controls = [
        name for name, number in control_numbers if number is not None and claim.holds.contains(number)
    ]
    outcome = replace(outcome, controls=tuple(control_numbers))
    if passing_controls and not claim.uncontrolled:
        names = " and ".join(CONTROLS.get(name, name) for name in passing_controls)
        reason = "; ".join(filter(None, (f"{names} passes too", outcome.reason)))
        verdict: Verdict = "not testable" if outcome.verdict == "held" else outcome.verdict
        return replace(outcome, verdict=verdict, reason=reason)
    return outcome


CONTROLS = {
    "untrained": "an untrained model",
    "memorised": "a checkpoint that has only memorised",
    "shuffled": "a model trained on shuffled labels",
}


def verdict_of_numbers(claim: Claim, run: str, claimed: ClaimNumbers) -> Outcome:
    """Returns the verdict of the rule on a claim's numbers."""
    n_runs = claimed.n_runs
    value = shown_value(claim, claimed)
    run_values = () if claimed.against else tuple((each.run, or_none(each.value)) for each in claimed.numbers)
    medians = [each.median for each in claimed.numbers if each.median is not None]
    middle = intervals.mean(medians) if medians else None
    outcome = Outcome(claim, run, n_runs, "undecided", value, median=middle, runs=run_values)
    if any(each.known is not None for each in claimed.numbers) and not claimed.against:
        lows, highs = zip(*(each.bounds for each in claimed.numbers), strict=True)
        outcome = replace(outcome, bounds=(min(lows), max(highs)))
    lacking = [each.run for each in claimed.numbers if math.isnan(each.value) and each.known is None]
    if lacking:
        share = "" if len(claimed.numbers) == 1 else f" on {len(lacking)} of {len(claimed.numbers)} runs"
        return replace(
            outcome, reason=f"there is no such number{share}: its row is empty, or it is a share of 0"
        )
    over_examples = claim.over == "examples" or n_runs == 0
    if over_examples or n_runs < 2:
        return verdict_over_examples(claim, outcome, claimed, decided=over_examples)
    interval, basis, error = interval_over_runs(claim, claimed)
    outcome = replace(outcome, interval=basis)
    if interval is not None:
        outcome = replace(outcome, low=interval[0], high=interval[1])
    if n_runs < MIN_RUNS:
        return replace(outcome, reason=too_few_runs(n_runs, where_numbers_lie(claim.holds, claimed)))
    if interval is None:
        return replace(outcome, reason=f"no interval: {basis}", interval="")
    outcome = replace(outcome, **decision(claim.holds, interval))
    values = [each.value for each in claimed.numbers]
    if claim.over == "share of runs":
        outcome = replace(outcome, p=share_p_value(claim.holds, values))
    elif error and len(set(values)) > 1:
        outcome = replace(outcome, p=p_value(claim, values, error))
    elif error is not None:
        # A t of no spread would have a p-value of 0, which a few runs that agree cannot show.
        alike = f"all {n_runs} runs give the same number: no spread, and no p-value"
        outcome = replace(outcome, reason=alike)
    bounded = [each.known for each in claimed.numbers if each.known is not None]
    if bounded:
        ends = range_text(min(low for low, _ in bounded), max(high for _, high in bounded))
        remark = f"{len(bounded)} of {n_runs} runs end too soon: their numbers are known to lie {ends}"
        outcome = replace(outcome, reason="; ".join(filter(None, (outcome.reason, remark))))
    return outcome


def or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def too_few_runs(n_runs: int, remark: str) -> str:
    runs = "one training run" if n_runs == 1 else f"{n_runs} training runs"
    return f"{runs}, of three at least{remark}"


def where_numbers_lie(bounds: Bounds, claimed: ClaimNumbers) -> str:
    """Returns a phrase that says where the numbers of too few runs lie."""
    if claimed.against:
        divided = len(claimed.numbers)
        return f"; {divided} are divided by it" if len(claimed.against) == 1 < divided else ""
    verdicts = [
        decision(bounds, each.bounds, closed=each.known is None)["verdict"] for each in claimed.numbers
    ]
    if verdicts == ["held"]:
        return "; this one lies within the rule"
    if verdicts == ["failed"]:
        return "; this one does not"
    return f"; {verdicts.count('held')} of them within the rule" if len(verdicts) > 1 else ""


def verdict_over_examples(claim: Claim, outcome: Outcome, claimed: ClaimNumbers, decided: bool) -> Outcome:
    """Returns the outcome by the table's own interval over examples; without a verdict unless ``decided``.

    Methods are decided so; too few training runs show the interval and leave the verdict open.
    """
    bounds = [each.known for each in claimed.numbers if each.known is not None]
    outside = too_few_runs(outcome.n_runs, where_numbers_lie(claim.holds, claimed))
    if bounds:
        # A single number of which bounds are all that is known: it lies between them, whatever the examples.
        ends = intervals.mean_interval([each.bounds for each in claimed.numbers])
        outcome = replace(outcome, low=None, high=None)
        reason = f"a run ends too soon: the number is known to lie {range_text(*ends)}"
        if not decided:
            return replace(outcome, reason=f"{outside}; {reason}")
        verdict = decision(claim.holds, ends, closed=False)["verdict"]
        return replace(outcome, verdict=verdict, reason=reason)
    intervals_of = [each.over_examples for each in claimed.numbers]
    known = [each for each in intervals_of if each is not None]
    if len(known) == len(intervals_of) and known:
        low, high = intervals.mean_interval(known)
        outcome = replace(outcome, low=low, high=high, interval="over examples")
    if not decided:
        return replace(outcome, reason=outside)
    if outcome.low is None or outcome.high is None:
        return replace(outcome, reason="the study has no interval of this number")
    error = (outcome.high - outcome.low) / 2 / intervals.z_quantile(1 - ALPHA / 2)
    assert outcome.value is not None
    p = two_sided(claim.holds, outcome.value, error, None) if error else None
    return replace(outcome, p=p, **decision(claim.holds, (outcome.low, outcome.high)))


def interval_over_runs(claim: Claim, claimed: ClaimNumbers) -> tuple[Interval | None, str, float | None]:
    """Returns the interval over runs, a phrase that names it or says why it is missing, and the standard error."""
    n_runs = claimed.n_runs
    numbers = [each.value for each in claimed.numbers]
    if claimed.pooled:
        interval = claimed.numbers[0].over_examples
        basis = f"the study's, over {n_runs} runs"
        return interval, basis if interval is not None else "the study has none of this number", None
    if claimed.against:
        counts = f"{len(numbers)} and {len(claimed.against)} runs"
        if any(each.known is not None for each in claimed.numbers):
            return None, "a run ends too soon, and cannot be paired with those it is divided by", None
        interval = intervals.fieller_interval(numbers, claimed.against)
        if interval is None:
            return None, f"the divisor over {len(claimed.against)} runs cannot be told from 0", None
        return interval, f"Fieller, over {counts}", None
    if claim.over == "share of runs":
        return intervals.share_interval(numbers), f"exact binomial, over {n_runs} runs", None
    bounds = [each.bounds for each in claimed.numbers]
    if all(each.known is None for each in claimed.numbers):
        scaled = log_scale(claim, numbers)
        if scaled is None:
            return None, "a number that is not above 0 has no logarithm", None
        interval = intervals.t_interval(scaled)
        assert interval is not None
        basis = f"t, over {n_runs} runs" + (", of the logarithm" if claim.log else "")
        error = intervals.standard_error(scaled)
        return (from_log_scale(claim, interval), basis, error)
    unknown = sum(each.known is not None for each in claimed.numbers)
    # A bound of 0 has no logarithm: then the interval is of the numbers themselves.
    logged = claim.log and all(low > 0 for low, _ in bounds)
    ends = [(math.log(low), math.log(high)) for low, high in bounds] if logged else bounds
    interval = intervals.bounded_t_interval(ends)
    if interval is not None:
        basis = f"t, over {n_runs} runs, of {unknown} of which bounds alone are known"
        if logged:
            return from_log_scale(claim, interval), basis, None
        not_negative = all(low >= 0 for low, _ in bounds)
        return (max(interval[0], 0.0) if not_negative else interval[0], interval[1]), basis, None
    interval = intervals.median_interval(bounds)
    if interval is None:
        lacking = f"{unknown} of {n_runs} runs end too soon to have the number"
        return (
            None,
            f"{lacking}, and an interval of the median takes six{where_numbers_lie(claim.holds, claimed)}",
            None,
        )
    return interval, f"of the median, over {n_runs} runs", None


def log_scale(claim: Claim, values: Iterable[float]) -> list[float] | None:
    """Returns the values, as logarithms where the claim wants them; ``None`` where one has no logarithm."""
    values = list(values)
    if not claim.log:
        return values
    if not all(value > 0 for value in values):
        return None
    return [math.log(value) for value in values]


def from_log_scale(claim: Claim, interval: Interval) -> Interval:
    """Returns an interval that was computed by ``log_scale`` on the scale of the values."""
    return (math.exp(interval[0]), math.exp(interval[1])) if claim.log else interval


def shown_value(claim: Claim, claimed: ClaimNumbers) -> float | None:
    """Returns the mean over runs, the geometric one where the claim is on a log scale; ``None`` where there is none."""
    numbers = [each.value for each in claimed.numbers]
    if any(math.isnan(number) for number in numbers):
        return None
    if claimed.against:
        return intervals.mean(numbers) / intervals.mean(claimed.against)
    scaled = log_scale(claim, numbers)
    if scaled is None:
        return None
    return math.exp(intervals.mean(scaled)) if claim.log else intervals.mean(scaled)


def decision(bounds: Bounds, interval: Interval, closed: bool = True) -> dict[str, Any]:
    """Returns the verdict on an interval as fields of an outcome; an open interval does not hold its ends."""
    low, high = interval
    if closed:
        held = bounds.contains(low) and bounds.contains(high)
        above, below = bounds.above, bounds.below
        failed = (above is not None and high <= above) or (below is not None and low >= below)
    else:
        known = bounds.contains_between(low, high)
        held, failed = known is True, known is False
    if held:
        return {"verdict": "held"}
    if failed:
        return {"verdict": "failed"}
    return {"verdict": "undecided", "reason": "the interval reaches across the rule's bound"}


def p_value(claim: Claim, values: Sequence[float], error: float) -> float:
    """Returns the p-value of the mean over runs, on the scale of the interval."""
    scaled = log_scale(claim, values)
    assert scaled is not None
    bounds = claim.holds
    if claim.log:
        ends = (None if end is None else math.log(end) for end in (bounds.above, bounds.below))
        bounds = Bounds(**dict(zip(("above", "below"), ends, strict=True)))
    return two_sided(bounds, intervals.mean(scaled), error, len(values) - 1)


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

    # Small where the number is well above ``above`` and well below ``below``.
    within = [beyond(bounds.above, -1)] if bounds.above is not None else []
    within += [beyond(bounds.below, 1)] if bounds.below is not None else []
    without = [beyond(bounds.above, 1)] if bounds.above is not None else []
    without += [beyond(bounds.below, -1)] if bounds.below is not None else []
    return min(1.0, 2 * min(max(within), *without))


def range_text(low: float, high: float) -> str:
    """Returns a phrase for a range, such as "between 1 and 2"."""
    if math.isinf(high):
        return "anywhere" if low <= 0 else f"above {digits(low, 3)}"
    return f"below {digits(high, 3)}" if low <= 0 else f"between {digits(low, 3)} and {digits(high, 3)}"
