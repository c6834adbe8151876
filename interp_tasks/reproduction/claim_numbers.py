"""Computes a claim's number on every training run from the rows of a study's table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import Interval
from interp_tasks.published import Claim
from interp_tasks.reproduction.claim_rows import (
    NoRow,
    Seeds,
    Unmeasured,
    rows_by_seed,
    rows_where,
    run_divisors,
    seed_of,
    single_runs,
)
from interp_tasks.reproduction.runs import config_of

if TYPE_CHECKING:
    import pandas


#: The interval that goes with a column.
INTERVAL_COLUMNS: Mapping[str, tuple[str, str]] = {
    "value": ("value_ci_low", "value_ci_high"),
    "effect": ("effect_ci_low", "effect_ci_high"),
}


#: The function that makes bounds of a reduced number of the bounds of several numbers.
REDUCTIONS_OF_BOUNDS: Mapping[str, Callable[[Iterable[float]], float]] = {"one": max, "min": min, "max": max}

#: The reduction that says by how much the rows of one run differ.
MAX_OVER_MIN = "max / min"


@dataclass(frozen=True)
class Number:
    """A claim's number on one training run.

    Attributes:
        value: NaN where there is none, or where only its bounds are known.
        known: the bounds, where the run ended too soon to give more.
        over_examples: the interval over examples, where the study's table has one.
    """

    run: str
    value: float
    known: Interval | None = None
    over_examples: Interval | None = None

    @property
    def bounds(self) -> Interval:
        return self.known or (self.value, self.value)


@dataclass(frozen=True)
class ClaimNumbers:
    """A claim's number on every run.

    Attributes:
        against: the divisors, where they come from other runs that cannot be paired with these; ``numbers`` are
            then not divided yet.
        pooled: the number of runs behind a row that pools several; its interval is the table's.
        trained: whether the claim is about training runs, not about a method.
    """

    numbers: tuple[Number, ...]
    against: tuple[float, ...] = ()
    pooled: int = 0
    trained: bool = True

    @property
    def n_runs(self) -> int:
        if not self.trained:
            return 0
        if self.pooled:
            return self.pooled
        return min(len(self.numbers), len(self.against)) if self.against else len(self.numbers)


def claim_numbers(claim: Claim, frame: pandas.DataFrame, seeds: Seeds | None = None) -> ClaimNumbers:
    """Returns a claim's number on every run, or on every seed where the claim is about several conditions.

    Raises:
        Unmeasured: where the table does not have it.
    """
    seeds = seeds or {}
    rows = single_runs(rows_where(frame, claim.where))
    if claim.reduce == "count":
        names = rows_where(frame, {key: value for key, value in claim.where.items() if key == "run"})["run"]
        counts = {name: float((rows["run"] == name).sum()) for name in names.dropna().unique()}
        return ClaimNumbers(tuple(Number(str(name), count) for name, count in counts.items()))
    if rows.empty:
        raise NoRow(f"no row has {claim.where}")
    counted = rows["n_runs"].fillna(1).astype(int)
    if (counted > 1).any():
        if len(rows) > 1 and claim.reduce == "one":
            raise Unmeasured(f"{len(rows)} rows have {claim.where}")
        other = None
        if isinstance(claim.per, dict):
            other = rows_where(frame, claim.divisor()[1])
            if len(other) != 1:
                raise Unmeasured(f"{len(other)} rows have {claim.divisor()[1]}")
        number = run_number(claim, rows, frame, other, str(rows["run"].iloc[0]))
        return ClaimNumbers((number,), pooled=int(counted.min()))
    of_run = rows["run"].fillna("").astype(str)
    groups = {name: rows[of_run == name] for name in dict.fromkeys(of_run)}
    if claim.reduce == MAX_OVER_MIN:
        groups = {name: run_rows for name, run_rows in groups.items() if len(run_rows) > 1}
        if not groups:
            raise NoRow(f"no run has two rows of {claim.where}")
    conditions = {seed_of(name, seeds).condition for name in groups}
    if len(conditions) > 1:
        if claim.reduce == "one":
            raise Unmeasured(f"{len(rows)} rows have {claim.where}, of {len(conditions)} conditions")
        groups = rows_by_seed(groups, seeds, len(conditions))
    others: Mapping[str, pandas.DataFrame | None] = dict.fromkeys(groups)
    against: tuple[float, ...] = ()
    if isinstance(claim.per, dict):
        if claim.reduce != "one":
            raise Unmeasured("a ratio to another row is of one row")
        others, against = run_divisors(claim, groups, frame, seeds)
    if against:
        # Divided later, as means: as if there were no divisor.
        plain = claim.model_copy(update={"per": None})
        numbers = tuple(run_number(plain, run_rows, frame, None, name) for name, run_rows in groups.items())
        return ClaimNumbers(numbers, against)
    numbers = tuple(
        run_number(claim, run_rows, frame, others[name], name) for name, run_rows in groups.items()
    )
    return ClaimNumbers(numbers, trained=bool(counted.any()))


def run_number(
    claim: Claim,
    rows: pandas.DataFrame,
    frame: pandas.DataFrame,
    other: pandas.DataFrame | None,
    name: str = "",
) -> Number:
    """Returns the number that the claim reduces the rows of one run to."""
    if claim.reduce == "one" and len(rows) != 1:
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    cells = [row_number(claim, rows.iloc[[index]], frame, other) for index in range(len(rows))]
    values = [cell.value for cell in cells]
    join = REDUCTIONS_OF_BOUNDS.get(claim.reduce)
    if any(cell.known is not None for cell in cells):
        if join is None or any(math.isnan(end) for cell in cells for end in cell.bounds):
            return Number(name, math.nan)
        lows, highs = zip(*(cell.bounds for cell in cells), strict=True)
        known = join(lows), join(highs)
        if known[0] != known[1]:
            return Number(name, math.nan, known)
        return Number(name, known[0])
    if any(math.isnan(value) for value in values):
        return Number(name, math.nan)
    if claim.reduce == MAX_OVER_MIN and min(values) <= 0:
        return Number(name, math.nan)
    reductions = {"mean": intervals.mean, "sum": math.fsum, MAX_OVER_MIN: max_over_min}
    reduced = reductions.get(claim.reduce) or join
    assert reduced is not None
    return Number(name, reduced(values), over_examples=reduced_interval(claim, cells))


def max_over_min(values: Sequence[float]) -> float:
    return max(values) / min(values)


def reduced_interval(claim: Claim, cells: Sequence[Number]) -> Interval | None:
    """Returns the interval over examples of the number that rows are reduced to, no narrower than theirs.

    A maximum or minimum is bounded by the rows' intervals, widened until all hold together. The interval of a mean is
    the mean of theirs, as if all rows went up and down as one.
    """
    known = [cell.over_examples for cell in cells]
    if not known or any(interval is None for interval in known):
        return None
    several = [interval for interval in known if interval is not None]
    if claim.reduce in ("mean", "sum"):
        low, high = intervals.mean_interval(several)
        return (low, high) if claim.reduce == "mean" else (len(cells) * low, len(cells) * high)
    wide = [
        intervals.bonferroni_interval(interval, cell.value, len(cells))
        for cell, interval in zip(cells, several, strict=True)
    ]
    lows, highs = zip(*wide, strict=True)
    if claim.reduce == MAX_OVER_MIN:
        return intervals.quotient((max(lows), max(highs)), (min(lows), min(highs)))
    join = REDUCTIONS_OF_BOUNDS[claim.reduce]
    return join(lows), join(highs)


def row_number(
    claim: Claim, row: pandas.DataFrame, frame: pandas.DataFrame, other: pandas.DataFrame | None
) -> Number:
    """Returns the number of a single row, divided as the claim says."""
    from interp_tasks.experiments._generalisation.reaches import AT_LEAST, AT_MOST, RATIO

    entry = row.iloc[0]
    metric = str(entry["metric"]).partition(", ")[0]
    if metric == RATIO:
        # The table has the bounds beside it.
        same_curve = (frame["variant"] == entry["variant"]) & (frame["split"] == entry["split"])
        ratio_bounds = frame[same_curve & (frame["run"] == entry["run"])].set_index("metric")["value"]
        low, high = float(ratio_bounds.get(AT_LEAST, math.nan)), float(ratio_bounds.get(AT_MOST, math.nan))
        low, high = 0.0 if math.isnan(low) else low, math.inf if math.isnan(high) else high
        if low != high:
            return Number("", math.nan, (low, high))
    value, bounds = value_or_bounds(entry, claim.column)
    interval = examples_interval(entry, claim.column)
    divisor_interval: Interval | None
    if claim.per is None:
        return Number("", value, bounds, interval)
    if claim.per == "variance":
        divisor, known, divisor_interval = entry_variance(str(entry["run"])), None, None
        exact = True
    elif claim.per == "baseline":
        (divisor, known), divisor_interval, exact = (
            value_or_bounds(entry, "baseline"),
            baseline_interval(entry),
            False,
        )
    else:
        assert other is not None
        column, _ = claim.divisor()
        divisor_entry = other.iloc[0]
        (divisor, known), divisor_interval, exact = (
            value_or_bounds(divisor_entry, column),
            examples_interval(divisor_entry, column),
            False,
        )
    if divisor == 0:
        return Number("", math.nan)
    if bounds is not None or known is not None:
        return Number("", math.nan, quotient_of_bounds(bounds or (value, value), known or (divisor, divisor)))
    over_examples = None
    if interval is not None and exact:
        low, high = sorted(end / divisor for end in interval)
        over_examples = low, high
    elif interval is not None and divisor_interval is not None and not math.isnan(value):
        value_interval = intervals.bonferroni_interval(interval, value, 2)
        over_examples = intervals.quotient(
            value_interval, intervals.bonferroni_interval(divisor_interval, divisor, 2)
        )
    return Number("", value / divisor, None, over_examples)


def row_divisor(claim: Claim, row: pandas.Series, frame: pandas.DataFrame) -> float:
    """Returns the divisor of a single row's number."""
    if claim.per is None:
        return 1.0
    if claim.per == "variance":
        return entry_variance(str(row["run"]))
    if claim.per == "baseline":
        return float(row["baseline"])
    column, where = claim.divisor()
    others = rows_where(frame, where)
    if len(others) != 1:
        raise Unmeasured(f"{len(others)} rows have {where}")
    return float(others[column].iloc[0])


def quotient_of_bounds(above: Interval, below: Interval) -> Interval:
    """Returns the bounds of a ratio of two numbers; infinite ones where a number may be negative or is NaN."""
    if any(math.isnan(end) for end in (*above, *below)) or min(above[0], below[0]) < 0:
        return -math.inf, math.inf
    low = 0.0 if math.isinf(below[1]) else above[0] / below[1]
    return low, math.inf if below[0] == 0 else above[1] / below[0]


def value_or_bounds(row: pandas.Series, column: str) -> tuple[float, Interval | None]:
    """Returns a number of a row, and its bounds where it is a step that the run did not reach."""
    from interp_tasks.experiments._generalisation.reaches import SPREAD, THEN

    value = float(row[column])
    if not math.isnan(value):
        return value, None
    metric = str(row["metric"]).partition(", ")[0]
    if metric.startswith((SPREAD, THEN.partition("{")[0])):
        return value, (-math.inf, math.inf)
    if not metric.startswith("step at"):
        return value, None
    if column == "effect":
        return value, (-math.inf, math.inf)
    last = float(row["step"])
    return value, (0.0 if math.isnan(last) else last, math.inf)


def examples_interval(row: pandas.Series, column: str) -> Interval | None:
    """Returns the interval over examples that the table has for a number."""
    if column == "baseline":
        return baseline_interval(row)
    low, high = (float(row[name]) for name in INTERVAL_COLUMNS[column])
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def baseline_interval(row: pandas.Series) -> Interval | None:
    """Returns an interval of the unedited model's number: value − effect, as wide as their two intervals together."""
    value, effect = examples_interval(row, "value"), examples_interval(row, "effect")
    middle = float(row["baseline"])
    if value is None or effect is None or math.isnan(middle):
        return None
    half = (value[1] - value[0] + effect[1] - effect[0]) / 2
    return middle - half, middle + half


@cache
def entry_variance(run: str) -> float:
    """Returns Var X of the task that a run learned."""
    from tasks import get

    name, config = config_of(run)
    task = get(name, **config)
    variance = getattr(task, "entry_variance", None)
    if variance is None:
        raise Unmeasured(f"task {name!r} says no variance of an entry")
    return float(variance)
