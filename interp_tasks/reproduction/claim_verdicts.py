"""Judges claims: a number on every training run, chosen from a study's rows, then an interval, then a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, Literal, NamedTuple

from interp_tasks.measurement import confidence_intervals
from interp_tasks.measurement.confidence_intervals import ALPHA, MIN_RUNS, Interval
from interp_tasks.measurement.logged_runs import glob_of_seeds
from interp_tasks.pages import number
from interp_tasks.published import Bounds, Claim

#: A row of a study's table, and several, as ``rows_of_records`` gives them.
Row = dict[str, Any]
Rows = list[Row]

#: The reduction that says by how much the rows of one run differ.
MAX_OVER_MIN = "max / min"
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "one": max,
    "min": min,
    "max": max,
    "mean": confidence_intervals.mean,
    MAX_OVER_MIN: lambda values: max(values) / min(values),
}


class UnmeasuredError(Exception):
    """A claim's number is not in the table; the message says what is there instead."""


class NoRowError(UnmeasuredError):
    """The table has no row that a claim could be about."""


class RunNumber(NamedTuple):
    """A claim's number on one training run.

    Attributes:
        bounds: what it lies between: equal ends where it is known, NaN where there is none, others where the run ended
            too soon to give more.
        over_examples: the interval over examples, where the study's table has one.
        median: of the rows that the value is the largest or smallest of, three at least.
    """

    run: str
    bounds: Interval
    over_examples: Interval | None = None
    median: float | None = None

    @property
    def value(self) -> float:
        """Returns the number; NaN where there is none, or where only its bounds are known."""
        return self.bounds[0] if self.bounds[0] == self.bounds[1] else math.nan

    @property
    def has_only_bounds(self) -> bool:
        """Returns whether bounds are all that is known."""
        return self.bounds[0] < self.bounds[1]


@dataclass(frozen=True)
class ClaimNumbers:
    """A claim's number on every run.

    Attributes:
        n_runs: training runs behind them, none of a claim about a method.
        pooled: whether they are of a row that pools several runs; its interval is the table's.
    """

    numbers: tuple[RunNumber, ...]
    n_runs: int
    pooled: bool = False

    @property
    def bounds_without_value(self) -> list[Interval]:
        """Returns the bounds of the numbers of which no more is known."""
        return [each.bounds for each in self.numbers if each.has_only_bounds]


def claim_numbers(claim: Claim, table: Rows) -> ClaimNumbers:
    """Returns a claim's number on every run, or on every seed where the claim is about several conditions.

    Raises:
        UnmeasuredError: where the table does not have it.
    """
    rows = rows_of_single_runs(filter_rows(table, claim.where))
    if not rows:
        raise NoRowError(f"no row has {claim.where}")
    counts = [1 if row["n_runs"] is None else int(row["n_runs"]) for row in rows]
    groups, pooled = rows_by_run(rows), max(counts) > 1
    if pooled:
        groups = {rows[0]["run"]: rows}
    elif claim.reduce == MAX_OVER_MIN:
        groups = {name: several for name, several in groups.items() if len(several) > 1}
        if not groups:
            raise NoRowError(f"no run has two rows of {claim.where}")
    if not pooled and len({row["condition"] for several in groups.values() for row in several}) > 1:
        groups = rows_by_seed(claim, groups)
    most = max(map(len, groups.values()))
    if claim.reduce == "one" and most > 1:
        raise UnmeasuredError(f"{most} rows have {claim.where}")
    if isinstance(claim.per, dict):
        bounds = paired_ratios(claim, groups, table)
    else:
        bounds = {name: [claimed_bounds(claim, row) for row in several] for name, several in groups.items()}
    numbers = tuple(reduce_rows(claim, name, ends, groups.get(name, [])) for name, ends in bounds.items())
    # A row of a method, which no model was trained for, says that it is of no run.
    return ClaimNumbers(numbers, min(counts) if pooled else len(numbers) if any(counts) else 0, pooled)


# ---- rows


def filter_rows(rows: Rows, where: Mapping[str, Any]) -> Rows:
    """Returns the rows that have these values; without `draw` among them, rows that are of no single draw."""
    for column in where:
        if rows and column not in rows[0]:
            raise UnmeasuredError(f"the table has no column {column!r}")
    return [
        row
        for row in rows
        if (row["draw"] is not None) is ("draw" in where)
        and all(cell_matches(row[column], column, wanted) for column, wanted in where.items())
    ]


def cell_matches(value: Any, column: str, wanted: Any) -> bool:
    """Returns whether a cell has a wanted value, or one of several; of a REF what stands after the ``@`` counts."""
    several = wanted if isinstance(wanted, list) else [wanted]
    if column == "run":
        return has_ending(str(value), map(str, several))
    if column == "ref" and value is not None:
        value = value.rpartition("@")[2]
    return value is not None and value in several


def has_ending(name: str, ends: Iterable[str]) -> bool:
    """Returns whether a run's name ends with one of these, which may be globs: ``sweep/seed-*``."""
    return any(fnmatchcase(name, f"*{end}") for end in ends)


def rows_by_run(rows: Rows) -> dict[str, Rows]:
    """Returns the rows of each run by its name."""
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["run"] or "", []).append(row)
    return groups


def rows_of_single_runs(rows: Rows) -> Rows:
    """Returns the rows of single runs, or all where there are none; rows over several runs are made of them."""
    # Of several seeds one alone may have the number: the row that pools them is then over one run.
    families = {glob_of_seeds(row["run"] or "") for row in rows}
    return [row for row in rows if (row["n_runs"] or 0) <= 1 and row["run"] not in families] or rows


def rows_by_seed(claim: Claim, groups: Mapping[str, Rows]) -> dict[str, Rows]:
    """Returns the rows of each seed that was trained under every condition.

    What a claim says of several conditions is measured again where each of them is trained again.
    """
    rows = [row for several in groups.values() for row in several]
    conditions = {row["condition"] for row in rows}
    if claim.reduce == "one":
        raise UnmeasuredError(f"{len(rows)} rows have {claim.where}, of {len(conditions)} conditions")
    seeds: dict[Any, Rows] = {}
    for row in rows:
        seeds.setdefault(row["trained_seed"], []).append(row)
    complete = {seed: of for seed, of in seeds.items() if {row["condition"] for row in of} == conditions}
    if not complete:
        raise UnmeasuredError(f"no seed was trained under all {len(conditions)} conditions of {claim.where}")
    return {f"seed {seed}": of for seed, of in complete.items()}


# ---- numbers


def paired_ratios(claim: Claim, groups: Mapping[str, Rows], table: Rows) -> dict[str, list[Interval]]:
    """Returns bounds of each row's number as a share of the other row's, which is of the same run or seed.

    Of runs that cannot be paired by seed it is one number, that of their means.
    """
    column, where = claim.divisor()
    others = rows_by_run(rows_of_single_runs(filter_rows(table, where)))
    if not all(len(others.get(name, ())) == 1 for name in groups):
        several = sum(map(len, others.values()))
        conditions = {row["condition"] for rows in others.values() for row in rows}
        ambiguous = len(conditions) != 1 or several > len(others) or ("run" not in where and several > 1)
        if ambiguous or claim.reduce != "one":
            raise UnmeasuredError(f"{several} rows have {where}")
        of_seed = {rows[0]["trained_seed"]: rows for rows in others.values()}
        seeds = {name: rows[0]["trained_seed"] for name, rows in groups.items()}
        if len(of_seed) < len(others) or not of_seed.keys() >= set(seeds.values()):
            above = mean_interval(number_bounds(row, claim.column) for (row,) in groups.values())
            below = mean_interval(number_bounds(row, column) for (row,) in others.values())
            return {"mean" if len(groups) > 1 else next(iter(groups)): [ratio_bounds(above, below)]}
        others = {name: of_seed[seed] for name, seed in seeds.items()}
    return {
        name: [
            ratio_bounds(number_bounds(row, claim.column), number_bounds(others[name][0], column))
            for row in rows
        ]
        for name, rows in groups.items()
    }


def mean_interval(several: Iterable[Interval]) -> Interval:
    """Returns bounds, or an interval, of a mean of numbers however dependent they are: the mean of their ends."""
    lows, highs = zip(*several, strict=True)
    return confidence_intervals.mean(lows), confidence_intervals.mean(highs)


def claimed_bounds(claim: Claim, row: Row) -> Interval:
    """Returns bounds of the number of a row, as a share of another number of it where the claim says so."""
    own = number_bounds(row, claim.column)
    return own if claim.per is None else ratio_bounds(own, number_bounds(row, str(claim.per)))


def number_bounds(row: Row, column: str) -> Interval:
    """Returns bounds of a number of a row; a step that the run did not reach is later than its last.

    Of how far apart steps are, and of what holds at a step, nothing is known where the run ends too soon.
    """
    value, metric = row.get(column), str(row["metric"])
    if value is not None and value == value:
        return float(value), float(value)
    is_step = metric.startswith("step at")
    if metric.startswith(("last step / first step", "validation when train is at ")) or (
        is_step and column == "effect"
    ):
        return -math.inf, math.inf
    return (float(row["step"] or 0), math.inf) if is_step else (math.nan, math.nan)


def ratio_bounds(numerator: Interval, denominator: Interval) -> Interval:
    """Returns bounds of a share of another number; infinite where one that is bounded may be negative, or is NaN."""
    (low, high), (least, most) = numerator, denominator
    if not low < high and not least < most:
        value = low / least if least else math.nan
        return value, value
    if any(map(math.isnan, (low, high, least, most))) or min(low, least) < 0:
        return -math.inf, math.inf
    return (low / most if most < math.inf else 0.0), (high / least if least else math.inf)


def reduce_rows(claim: Claim, name: str, bounds: Sequence[Interval], rows: Rows) -> RunNumber:
    """Returns the number that the claim reduces the rows of one run to."""
    lows, highs = zip(*bounds, strict=True)
    bounded, reduce = lows != highs, REDUCTIONS[claim.reduce]
    if any(map(math.isnan, (*lows, *highs))) or (claim.reduce == MAX_OVER_MIN and min(lows) <= 0):
        return RunNumber(name, (math.nan, math.nan))
    if bounded and claim.reduce not in ("one", "min", "max"):
        return RunNumber(name, (math.nan, math.nan))
    examples = None
    if len(rows) == 1 and claim.per is None:
        low, high = (rows[0].get(f"{claim.column}_ci_{end}") for end in ("low", "high"))
        examples = None if low is None or high is None else (float(low), float(high))
    middle = median(lows) if claim.reduce in ("min", "max") and len(lows) > 2 and not bounded else None
    return RunNumber(name, (reduce(lows), reduce(highs)), examples, middle)


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


def judge_claim(claim: Claim, table: Rows, controls: Mapping[str, Rows] | None = None) -> dict[str, Any]:
    """Returns the verdict on a claim, from its study's rows of all runs of one condition, as a row of columns.

    ``n_runs``, ``value``, its interval, over what that is taken and ``p`` (two-sided, against the nearest bound of the
    rule); ``median`` of a largest or smallest number; ``at_least`` and ``at_most``, what the numbers of all runs lie
    between, where of some no more is known; each run's own number; that of each control; ``verdict`` and ``reason``.

    Args:
        controls: tables of the same study on models that should not pass, by the name of the control.
    """
    try:
        claimed = claim_numbers(claim, table)
    except UnmeasuredError as unmeasured:
        if isinstance(unmeasured, NoRowError) and claim.absent:
            return {"n_runs": 0, "verdict": "not run", "reason": claim.absent}
        return {"n_runs": 0, "verdict": "error", "reason": str(unmeasured)}
    row = verdict_of_numbers(claim, claimed)
    all_runs = len([name for name in rows_by_run(rows_of_single_runs(table)) if name])
    if claim.absent and not claimed.pooled and len(claimed.numbers) < all_runs:
        remark = f"{len(claimed.numbers)} of {all_runs} seeds have such a row; of the others, {claim.absent}"
        row["reason"] = join_remarks(row["reason"], remark)
    passing = []
    for name, rows in (controls or {}).items():
        try:
            row[name] = mean_over_runs(claim, claim_numbers(claim, rows))
        except UnmeasuredError:  # an untrained model may have no such row
            continue
        if row[name] is not None and claim.holds.contains(row[name]):
            passing.append(CONTROLS[name])
    if passing and not claim.uncontrolled:
        row["reason"] = join_remarks(f"{' and '.join(passing)} passes too", row["reason"])
        row["verdict"] = "not testable" if row["verdict"] == "held" else row["verdict"]
    return row


def join_remarks(*parts: str) -> str:
    """Returns remarks as one line, without those that are empty."""
    return "; ".join(filter(None, parts))


def verdict_of_numbers(claim: Claim, claimed: ClaimNumbers) -> dict[str, Any]:
    """Returns the verdict of the rule on a claim's numbers."""
    numbers, n_runs, bounded = claimed.numbers, claimed.n_runs, claimed.bounds_without_value
    medians = [each.median for each in numbers if each.median is not None]
    row = {
        "n_runs": n_runs,
        "value": mean_over_runs(claim, claimed),
        "median": confidence_intervals.mean(medians) if medians else None,
        "runs": [
            {"run": each.run, "value": None if math.isnan(each.value) else each.value} for each in numbers
        ],
        "verdict": "undecided",
    }
    if bounded:
        row["at_least"], row["at_most"] = interval_hull([each.bounds for each in numbers])
    lacking = [each for each in numbers if math.isnan(each.value) and not each.has_only_bounds]
    if lacking:
        share = "" if len(numbers) == 1 else f" on {len(lacking)} of {len(numbers)} runs"
        return row | {"reason": f"there is no such number{share}: its row is empty, or it is a share of 0"}
    ends = f"known to lie {range_text(*interval_hull(bounded))}" if bounded else ""
    is_about_runs = claim.over != "examples" and n_runs > 0
    if is_about_runs and n_runs < MIN_RUNS:
        runs = "one training run" if n_runs == 1 else f"{n_runs} training runs"
        few = f"{runs}, of three at least{where_numbers_lie(claim.holds, claimed)}"
        too_soon = f"a run ends too soon: the number is {ends}" if bounded and n_runs == 1 else ""
        return row | {"reason": join_remarks(few, too_soon)}
    found = interval_over_runs(claim, claimed) if is_about_runs else interval_over_examples(claim, claimed)
    if "interval" not in found:
        return row | found
    verdict = interval_verdict(claim.holds, (found["value_ci_low"], found["value_ci_high"]))
    across = "the interval reaches across the rule's bound" if verdict == "undecided" else ""
    too_soon = f"{len(bounded)} of {n_runs} runs end too soon: their numbers are {ends}" if bounded else ""
    return row | found | {"verdict": verdict, "reason": join_remarks(found.get("reason") or across, too_soon)}


def interval_hull(several: Sequence[Interval]) -> Interval:
    """Returns the smallest interval that holds all of these."""
    lows, highs = zip(*several, strict=True)
    return min(lows), max(highs)


def where_numbers_lie(bounds: Bounds, claimed: ClaimNumbers) -> str:
    """Returns a phrase that says where the numbers of too few runs lie."""
    verdicts = [interval_verdict(bounds, each.bounds, not each.has_only_bounds) for each in claimed.numbers]
    if len(verdicts) > 1:
        return f"; {verdicts.count('held')} of them within the rule"
    return {"held": "; this one lies within the rule", "failed": "; this one does not"}.get(verdicts[0], "")


def interval_columns(
    interval: Interval, basis: str, p: float | None = None, remark: str = ""
) -> dict[str, Any]:
    """Returns the columns of an interval: over what it is taken, its p-value, and a remark."""
    low, high = interval
    return {"value_ci_low": low, "value_ci_high": high, "interval": basis, "p": p, "reason": remark}


def interval_over_examples(claim: Claim, claimed: ClaimNumbers) -> dict[str, Any]:
    """Returns the table's own interval over examples, of several runs the mean of theirs."""
    several = [each.over_examples for each in claimed.numbers if each.over_examples is not None]
    value = mean_over_runs(claim, claimed)
    if value is None or len(several) < len(claimed.numbers):
        return {"reason": "the study has no interval of this number"}
    low, high = mean_interval(several)
    error = (high - low) / 2 / confidence_intervals.normal_quantile(1 - ALPHA / 2)
    p = two_sided_p_value(claim.holds, value, error, None) if error else None
    return interval_columns((low, high), "over examples", p)


def interval_over_runs(claim: Claim, claimed: ClaimNumbers) -> dict[str, Any]:
    """Returns the interval over runs: Student's t unless the claim or what is known of its numbers asks for another."""
    values, over = [each.value for each in claimed.numbers], f"over {claimed.n_runs} runs"
    if claimed.pooled:
        found = claimed.numbers[0].over_examples
        lacking = {"reason": "no interval: the study has none"}
        return interval_columns(found, f"the study's, {over}") if found else lacking
    if claimed.bounds_without_value:
        return interval_of_bounds(claim, claimed)
    if claim.over == "share of runs":
        p = share_p_value(claim.holds, values)
        return interval_columns(confidence_intervals.binomial_interval(values), f"exact binomial, {over}", p)
    if claim.log and min(values) <= 0:
        return {"reason": "no interval: a number that is not above 0 has no logarithm"}
    forth, back = SCALES[claim.log]
    scaled = [forth(value) for value in values]
    low, high = confidence_intervals.t_interval(scaled) or (math.nan, math.nan)
    found, basis = (back(low), back(high)), f"t, {over}{', of the logarithm' * claim.log}"
    error = confidence_intervals.standard_error(scaled)
    # A t of no spread would have a p-value of 0, which a few runs that agree cannot show.
    if not error or len(set(values)) == 1:
        alike = f"all {claimed.n_runs} runs give the same number: no spread, and no p-value"
        return interval_columns(found, basis, remark=alike)
    ends = {name: forth(end) for name, end in claim.holds if end is not None}
    p = two_sided_p_value(Bounds(**ends), confidence_intervals.mean(scaled), error, claimed.n_runs - 1)
    return interval_columns(found, basis, p)


def interval_of_bounds(claim: Claim, claimed: ClaimNumbers) -> dict[str, Any]:
    """Returns the widest t interval of numbers of which some are known by bounds; of open ones that of the median."""
    bounds, n_runs = [each.bounds for each in claimed.numbers], claimed.n_runs
    lowest, unknown = min(low for low, _ in bounds), len(claimed.bounds_without_value)
    # A bound of 0 has no logarithm: then the interval is of the numbers themselves.
    forth, back = SCALES[claim.log and lowest > 0]
    found = confidence_intervals.bounded_t_interval([(forth(low), forth(high)) for low, high in bounds])
    if found is None and n_runs >= 6:  # between the least and the largest of six lies their median with 97%
        return interval_columns(interval_hull(bounds), f"of the median, order statistics, over {n_runs} runs")
    if found is None:
        lie = where_numbers_lie(claim.holds, claimed)
        return {"reason": f"no interval: {unknown} of {n_runs} runs end too soon to have the number{lie}"}
    low, high = map(back, found)
    basis = f"t, over {n_runs} runs, of {unknown} of which bounds alone are known"
    return interval_columns((max(low, 0.0) if lowest >= 0 else low, high), basis)


def mean_over_runs(claim: Claim, claimed: ClaimNumbers) -> float | None:
    """Returns the mean over runs, the geometric one where the claim is on a log scale; ``None`` where there is none."""
    values, (forth, back) = [each.value for each in claimed.numbers], SCALES[claim.log]
    if any(math.isnan(value) for value in values) or (claim.log and min(values) <= 0):
        return None
    return back(confidence_intervals.mean([forth(value) for value in values]))


def interval_verdict(bounds: Bounds, interval: Interval, closed: bool = True) -> Verdict:
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


def two_sided_p_value(bounds: Bounds, value: float, error: float, df: int | None) -> float:
    """Returns twice the smaller of two one-sided p-values: that the number breaks the rule, and that it keeps it.

    Below 0.05 exactly where the 95% interval lies on one side of the rule.
    """

    def beyond(bound: float, sign: int) -> float:
        return confidence_intervals.one_sided_p_value(sign * value, error, df, sign * bound)

    # Each bound with the sign of its inside: small where the number is well within, and where it is well without.
    ends = [(end, sign) for end, sign in ((bounds.above, -1), (bounds.below, 1)) if end is not None]
    within = max(beyond(end, sign) for end, sign in ends)
    without = min(beyond(end, -sign) for end, sign in ends)
    return min(1.0, 2 * min(within, without))


def range_text(low: float, high: float) -> str:
    """Returns a phrase for a range, such as "between 1 and 2"."""
    if math.isinf(high):
        return "anywhere" if low <= 0 else f"above {number(low, 3)}"
    return f"below {number(high, 3)}" if low <= 0 else f"between {number(low, 3)} and {number(high, 3)}"
