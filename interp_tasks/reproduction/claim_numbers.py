"""Computes a claim's number on every training run from the rows of a study's table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import Interval
from interp_tasks.published import Claim
from interp_tasks.reproduction.claim_rows import (
    NoRow,
    Row,
    Rows,
    Seeds,
    Unmeasured,
    by_run,
    count_of,
    number,
    rows_by_seed,
    rows_where,
    run_divisors,
    seed_of,
    single_runs,
)

#: Metrics of `modular generalisation` that a run may end too soon to have.
RATIO, AT_LEAST, AT_MOST = "ratio of steps", "ratio of steps, at least", "ratio of steps, at most"
SPREAD, THEN = "last step / first step", "validation when train is at "
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


def claim_numbers(claim: Claim, table: Rows, seeds: Seeds | None = None) -> ClaimNumbers:
    """Returns a claim's number on every run, or on every seed where the claim is about several conditions.

    Args:
        table: the rows of the study's table.

    Raises:
        Unmeasured: where the table does not have it.
    """
    seeds = seeds or {}
    rows = single_runs(rows_where(table, claim.where))
    if claim.reduce == "count":
        named = {key: value for key, value in claim.where.items() if key == "run"}
        runs = filter(None, by_run(rows_where(table, named)))
        found = by_run(rows)
        return ClaimNumbers(tuple(Number(name, float(len(found.get(name, ())))) for name in runs))
    if not rows:
        raise NoRow(f"no row has {claim.where}")
    if any(count_of(row) > 1 for row in rows):
        return pooled_number(claim, rows, table)
    groups = by_run(rows)
    if claim.reduce == MAX_OVER_MIN:
        groups = {name: run_rows for name, run_rows in groups.items() if len(run_rows) > 1}
        if not groups:
            raise NoRow(f"no run has two rows of {claim.where}")
    conditions = {seed_of(name, seeds).condition for name in groups}
    if len(conditions) > 1:
        if claim.reduce == "one":
            raise Unmeasured(f"{len(rows)} rows have {claim.where}, of {len(conditions)} conditions")
        groups = rows_by_seed(groups, seeds, len(conditions))
    others: Mapping[str, Row | None] = dict.fromkeys(groups)
    against: tuple[float, ...] = ()
    if isinstance(claim.per, dict):
        if claim.reduce != "one":
            raise Unmeasured("a ratio to another row is of one row")
        others, against = run_divisors(claim, groups, table, seeds)
    if against:
        # Divided later, as means: as if there were no divisor.
        plain = claim.model_copy(update={"per": None})
        numbers = tuple(run_number(plain, run_rows, table, None, name) for name, run_rows in groups.items())
        return ClaimNumbers(numbers, against)
    numbers = tuple(
        run_number(claim, run_rows, table, others[name], name) for name, run_rows in groups.items()
    )
    # A row of a method, which no model was trained for, says that it is of no run.
    return ClaimNumbers(numbers, trained=any(count_of(row) for row in rows))


def pooled_number(claim: Claim, rows: Rows, table: Rows) -> ClaimNumbers:
    """Returns the number of rows that are of several runs already."""
    if len(rows) > 1 and claim.reduce == "one":
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    other = None
    if isinstance(claim.per, dict):
        others = rows_where(table, claim.divisor()[1])
        if len(others) != 1:
            raise Unmeasured(f"{len(others)} rows have {claim.divisor()[1]}")
        (other,) = others
    number = run_number(claim, rows, table, other, str(rows[0]["run"]))
    return ClaimNumbers((number,), pooled=min(map(count_of, rows)))


def run_number(claim: Claim, rows: Rows, table: Rows, other: Row | None, name: str = "") -> Number:
    """Returns the number that the claim reduces the rows of one run to."""
    if claim.reduce == "one" and len(rows) != 1:
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    cells = [row_number(claim, row, table, other) for row in rows]
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


def row_number(claim: Claim, row: Row, table: Rows, other: Row | None) -> Number:
    """Returns the number of a single row, divided as the claim says."""
    value, bounds = value_or_bounds(row, claim.column, table)
    if bounds is not None and kind_of(row) == RATIO:
        return Number("", math.nan, bounds)
    interval = examples_interval(row, claim.column)
    if claim.per is None:
        return Number("", value, bounds, interval)
    if claim.per == "variance":
        divisor = variance_of(row)
        scaled = None if interval is None else tuple(sorted(end / divisor for end in interval))
        return Number("", value / divisor, None, None if scaled is None else (scaled[0], scaled[1]))
    column, divided_by = "baseline", row
    if isinstance(claim.per, dict):
        assert other is not None
        column, divided_by = claim.divisor()[0], other
    divisor, known = value_or_bounds(divided_by, column, table)
    divisor_interval = examples_interval(divided_by, column)
    if divisor == 0:
        return Number("", math.nan)
    if bounds is not None or known is not None:
        return Number("", math.nan, quotient_of_bounds(bounds or (value, value), known or (divisor, divisor)))
    over_examples = None
    if interval is not None and divisor_interval is not None and not math.isnan(value):
        over_examples = intervals.quotient(
            intervals.bonferroni_interval(interval, value, 2),
            intervals.bonferroni_interval(divisor_interval, divisor, 2),
        )
    return Number("", value / divisor, None, over_examples)


def variance_of(row: Row) -> float:
    """Returns the variance of an entry of the task, which stands in a record's rows."""
    variance = number(row, "variance")
    if math.isnan(variance):
        raise Unmeasured("the run's task says no variance of an entry")
    return variance


def quotient_of_bounds(above: Interval, below: Interval) -> Interval:
    """Returns the bounds of a ratio of two numbers; infinite ones where a number may be negative or is NaN."""
    if any(math.isnan(end) for end in (*above, *below)) or min(above[0], below[0]) < 0:
        return -math.inf, math.inf
    low = 0.0 if math.isinf(below[1]) else above[0] / below[1]
    return low, math.inf if below[0] == 0 else above[1] / below[0]


def kind_of(row: Row) -> str:
    """Returns the name of a row's metric without what it is qualified by."""
    return str(row["metric"]).partition(", ")[0]


def value_or_bounds(row: Row, column: str, table: Rows) -> tuple[float, Interval | None]:
    """Returns a number of a row, and its bounds where it is a step that the run did not reach."""
    value, metric = number(row, column), kind_of(row)
    if metric == RATIO:
        # The table has the bounds beside it.
        same = [
            each for each in table if all(each[name] == row[name] for name in ("run", "variant", "split"))
        ]
        bounds = {
            kind: number(each, "value") for each in same if (kind := each["metric"]) in (AT_LEAST, AT_MOST)
        }
        low, high = bounds.get(AT_LEAST, math.nan), bounds.get(AT_MOST, math.nan)
        low, high = 0.0 if math.isnan(low) else low, math.inf if math.isnan(high) else high
        return value, (low, high) if low != high else None
    if not math.isnan(value):
        return value, None
    if metric.startswith((SPREAD, THEN)):
        return value, (-math.inf, math.inf)
    if not metric.startswith("step at"):
        return value, None
    if column == "effect":
        return value, (-math.inf, math.inf)
    last = number(row, "step")
    return value, (0.0 if math.isnan(last) else last, math.inf)


def examples_interval(row: Row, column: str) -> Interval | None:
    """Returns the interval over examples that the table has for a number."""
    if column == "baseline":
        return baseline_interval(row)
    low, high = (number(row, name) for name in INTERVAL_COLUMNS[column])
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def baseline_interval(row: Row) -> Interval | None:
    """Returns an interval of the unedited model's number: value − effect, as wide as their two intervals together."""
    value, effect = examples_interval(row, "value"), examples_interval(row, "effect")
    middle = number(row, "baseline")
    if value is None or effect is None or math.isnan(middle):
        return None
    half = (value[1] - value[0] + effect[1] - effect[0]) / 2
    return middle - half, middle + half
