"""Computes a claim's number on every training run: chooses the rows of a study's table, groups and reduces them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import Interval
from interp_tasks.measurement.run_logs import family
from interp_tasks.published import Claim

if TYPE_CHECKING:
    import pandas

#: Metrics of `modular generalisation` that a run may end too soon to have.
SPREAD, THEN = "last step / first step", "validation when train is at "


#: The reduction that says by how much the rows of one run differ.
MAX_OVER_MIN = "max / min"
#: The reductions that make bounds of a number of the bounds of several.
OF_BOUNDS: Mapping[str, Callable[[Iterable[float]], float]] = {"one": max, "min": min, "max": max}
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    **OF_BOUNDS,
    "mean": intervals.mean,
    MAX_OVER_MIN: lambda values: max(values) / min(values),
}
#: Of a number that is not there.
NOTHING = (math.nan, math.nan)


@dataclass(frozen=True)
class Seed:
    """The identity of a training run: its condition (all settings but the seed), and the seed."""

    condition: str
    seed: int | None


#: A row of a study's table, and several.
Row = Mapping[str, Any]
Rows = list[Row]
#: Name of a run in a table's column -> its identity. Runs that are not in it are told apart by their names.
Seeds = Mapping[str, Seed]


class Unmeasured(Exception):
    """A claim's number is not in the table; the message says what is there instead."""


class NoRow(Unmeasured):
    """The table has no row that a claim could be about."""


def table_rows(frame: pandas.DataFrame) -> Rows:
    """Returns the rows of an experiment's table; ``None`` stands for what a row does not have."""
    found = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in found]


def rows_where(rows: Rows, where: Mapping[str, Any]) -> Rows:
    """Returns the rows that have these values; without `draw` among them, rows that are of no single draw."""
    for column in where:
        if rows and column not in rows[0]:
            raise Unmeasured(f"the table has no column {column!r}")
    drawn = "draw" in where
    return [row for row in rows if (row.get("draw") is not None) is drawn and has_values(row, where)]


def has_values(row: Row, where: Mapping[str, Any]) -> bool:
    for column, wanted in where.items():
        several = wanted if isinstance(wanted, list) else [wanted]
        value = row[column]
        if column == "run":
            if not has_ending(str(value), map(str, several)):
                return False
            continue
        if column == "ref" and value is not None:
            value = value.rpartition("@")[2]
        if value is None or value not in several:
            return False
    return True


def has_ending(name: str, ends: Iterable[str]) -> bool:
    """Returns whether a run's name ends with one of these, which may be globs: ``sweep/seed-*``."""
    return any(fnmatchcase(name, f"*{end}") for end in ends)


def run_of(row: Row) -> str:
    return row["run"] or ""


def by_run(rows: Rows) -> dict[str, Rows]:
    """Returns the rows of each run by its name."""
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(run_of(row), []).append(row)
    return groups


def single_runs(rows: Rows) -> Rows:
    """Returns the rows of single runs, or all where there are none; rows over several runs are made of them."""
    # Of several seeds one alone may have the number: the row that pools them is then over one run.
    families = {family(run_of(row)) for row in rows}
    single = [row for row in rows if (row["n_runs"] or 0) <= 1 and run_of(row) not in families]
    return single or rows


def seed_of(name: str, seeds: Seeds) -> Seed:
    """Returns the identity of a run, read from its name where ``seeds`` does not have it."""
    if name in seeds:
        return seeds[name]
    match = re.fullmatch(r"(.*[/:])seed-(\d+)", name)
    return Seed(match[1], int(match[2])) if match else Seed(name, None)


def rows_by_seed(groups: Mapping[str, Rows], seeds: Seeds, conditions: int) -> dict[str, Rows]:
    """Returns the rows of each seed that was trained under every condition; all rows together where there is none.

    What a claim says of several conditions is measured again where each of them is trained again.
    """
    by_seed: dict[int | None, dict[str, Rows]] = {}
    for name, rows in groups.items():
        seed = seed_of(name, seeds)
        by_seed.setdefault(seed.seed, {})[seed.condition] = rows
    complete = {seed: parts for seed, parts in by_seed.items() if len(parts) == conditions}
    if not complete or None in complete:
        return {"all": list(chain(*groups.values()))}
    return {f"seed {seed}": list(chain(*parts.values())) for seed, parts in complete.items()}


def run_divisors(
    claim: Claim, groups: Mapping[str, Rows], rows: Rows, seeds: Seeds
) -> tuple[dict[str, Row | None], tuple[float, ...]]:
    """Returns the row that each run is divided by, its own or its seed's; or all divisors, where none can be paired."""
    column, where = claim.divisor()
    others = single_runs(rows_where(rows, where))
    if not others:
        raise Unmeasured(f"0 rows have {where}")
    of_run = by_run(others)
    if all(len(of_run.get(name, ())) == 1 for name in groups):
        return {name: of_run[name][0] for name in groups}, ()
    if "run" not in where and len(others) > 1:
        raise Unmeasured(f"{len(others)} rows have {where}")
    if len({seed_of(name, seeds).condition for name in of_run}) > 1 or len(of_run) < len(others):
        raise Unmeasured(f"{len(others)} rows have {where}")
    of_seed = {seed_of(name, seeds).seed: row for name, (row,) in of_run.items()}
    if len(of_seed) == len(of_run) and all(seed_of(name, seeds).seed in of_seed for name in groups):
        return {name: of_seed[seed_of(name, seeds).seed] for name in groups}, ()
    if len(groups) == 1 and len(others) == 1:
        return dict.fromkeys(groups, others[0]), ()
    return {}, tuple(number(row, column) for row in others)


def number(row: Row, column: str) -> float:
    """Returns a number of a row; NaN where it has none."""
    value = row.get(column)
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Number:
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
    def known(self) -> Interval | None:
        """Returns the bounds, where they are all that is known."""
        return self.bounds if self.bounds[0] < self.bounds[1] else None


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
    if not rows:
        raise NoRow(f"no row has {claim.where}")
    counts = [1 if row["n_runs"] is None else int(row["n_runs"]) for row in rows]
    if max(counts) > 1:
        # They are of several runs already.
        if isinstance(claim.per, dict):
            raise Unmeasured("a ratio to another row is of single runs")
        return ClaimNumbers((run_number(claim, rows, None, run_of(rows[0])),), pooled=min(counts))
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
        numbers = tuple(run_number(plain, run_rows, None, name) for name, run_rows in groups.items())
        return ClaimNumbers(numbers, against)
    numbers = tuple(run_number(claim, run_rows, others[name], name) for name, run_rows in groups.items())
    # A row of a method, which no model was trained for, says that it is of no run.
    return ClaimNumbers(numbers, trained=any(counts))


def run_number(claim: Claim, rows: Rows, other: Row | None, name: str = "") -> Number:
    """Returns the number that the claim reduces the rows of one run to."""
    if claim.reduce == "one" and len(rows) != 1:
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    cells = [row_number(claim, row, other) for row in rows]
    lows, highs = zip(*(cell.bounds for cell in cells), strict=True)
    if any(map(math.isnan, (*lows, *highs))) or (claim.reduce == MAX_OVER_MIN and min(lows) <= 0):
        return Number(name, NOTHING)
    reduce = REDUCTIONS[claim.reduce]
    if any(cell.known is not None for cell in cells):
        return Number(name, (reduce(lows), reduce(highs)) if claim.reduce in OF_BOUNDS else NOTHING)
    middle = median(lows) if claim.reduce in ("min", "max") and len(lows) > 2 else None
    return Number(name, (reduce(lows),) * 2, reduced_interval(claim, cells), middle)


def reduced_interval(claim: Claim, cells: Sequence[Number]) -> Interval | None:
    """Returns the interval over examples of the number that rows are reduced to, no narrower than theirs.

    A maximum or minimum is bounded by the rows' intervals, widened until all hold together. The interval of a mean is
    the mean of theirs, as if all rows went up and down as one.
    """
    several = [cell.over_examples for cell in cells if cell.over_examples is not None]
    if len(several) < len(cells):
        return None
    if claim.reduce == "mean":
        return intervals.mean_interval(several)
    pairs = zip(cells, several, strict=True)
    wide = [intervals.bonferroni_interval(ends, cell.value, len(cells)) for cell, ends in pairs]
    lows, highs = zip(*wide, strict=True)
    if claim.reduce == MAX_OVER_MIN:
        return intervals.quotient((max(lows), max(highs)), (min(lows), min(highs)))
    return OF_BOUNDS[claim.reduce](lows), OF_BOUNDS[claim.reduce](highs)


def row_number(claim: Claim, row: Row, other: Row | None) -> Number:
    """Returns the number of a single row, divided as the claim says."""
    bounds, interval = bounds_of(row, claim.column), examples_interval(row, claim.column)
    if claim.per is None:
        return Number("", bounds, interval)
    if claim.per == "variance":
        variance = number(row, "variance")
        if math.isnan(variance):
            raise Unmeasured("the run's task says no variance of an entry")
        scaled = None if interval is None else (interval[0] / variance, interval[1] / variance)
        return Number("", (bounds[0] / variance, bounds[1] / variance), scaled)
    column, divided_by = "baseline", row
    if isinstance(claim.per, dict):
        assert other is not None
        column, divided_by = claim.divisor()[0], other
    divisor, divisor_interval = bounds_of(divided_by, column), examples_interval(divided_by, column)
    if bounds[0] < bounds[1] or divisor[0] < divisor[1]:
        return Number("", ratio_of_bounds(bounds, divisor))
    value = bounds[0] / divisor[0] if divisor[0] else math.nan
    over_examples = None
    if interval is not None and divisor_interval is not None and value == value:
        over_examples = intervals.quotient(
            intervals.bonferroni_interval(interval, bounds[0], 2),
            intervals.bonferroni_interval(divisor_interval, divisor[0], 2),
        )
    return Number("", (value, value), over_examples)


def ratio_of_bounds(above: Interval, below: Interval) -> Interval:
    """Returns the bounds of a ratio of two numbers; infinite ones where a number may be negative or is NaN."""
    if any(math.isnan(end) for end in (*above, *below)) or min(above[0], below[0]) < 0:
        return -math.inf, math.inf
    low = 0.0 if math.isinf(below[1]) else above[0] / below[1]
    return low, math.inf if below[0] == 0 else above[1] / below[0]


def bounds_of(row: Row, column: str) -> Interval:
    """Returns what a number of a row lies between; a step that the run did not reach is later than its last."""
    value, metric = number(row, column), str(row["metric"])
    if not math.isnan(value):
        return value, value
    if metric.startswith((SPREAD, THEN)) or (metric.startswith("step at") and column == "effect"):
        return -math.inf, math.inf
    if not metric.startswith("step at"):
        return NOTHING
    last = number(row, "step")
    return 0.0 if math.isnan(last) else last, math.inf


def examples_interval(row: Row, column: str) -> Interval | None:
    """Returns the interval over examples that the table has for a number.

    That of a baseline, value − effect, is as wide as their two intervals together.
    """
    if column == "baseline":
        value, effect = examples_interval(row, "value"), examples_interval(row, "effect")
        middle = number(row, "baseline")
        if value is None or effect is None or math.isnan(middle):
            return None
        half = (value[1] - value[0] + effect[1] - effect[0]) / 2
        return middle - half, middle + half
    low, high = number(row, f"{column}_ci_low"), number(row, f"{column}_ci_high")
    return None if math.isnan(low) or math.isnan(high) else (low, high)
