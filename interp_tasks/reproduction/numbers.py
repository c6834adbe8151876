"""Computes a claim's number on every training run: chooses the rows of a study's table, divides and reduces them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, NamedTuple

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import Interval
from interp_tasks.measurement.run_logs import family
from interp_tasks.published import Claim

#: A row of a study's table, and several, as ``table_of`` gives them.
Row = dict[str, Any]
Rows = list[Row]

#: The reduction that says by how much the rows of one run differ.
MAX_OVER_MIN = "max / min"
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "one": max,
    "min": min,
    "max": max,
    "mean": intervals.mean,
    MAX_OVER_MIN: lambda values: max(values) / min(values),
}


class Unmeasured(Exception):
    """A claim's number is not in the table; the message says what is there instead."""


class NoRow(Unmeasured):
    """The table has no row that a claim could be about."""


class Number(NamedTuple):
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
    def is_bounded(self) -> bool:
        """Returns whether bounds are all that is known."""
        return self.bounds[0] < self.bounds[1]


@dataclass(frozen=True)
class ClaimNumbers:
    """A claim's number on every run.

    Attributes:
        n_runs: training runs behind them, none of a claim about a method.
        pooled: whether they are of a row that pools several runs; its interval is the table's.
    """

    numbers: tuple[Number, ...]
    n_runs: int
    pooled: bool = False

    @property
    def bounded(self) -> list[Interval]:
        """Returns the bounds of the numbers of which no more is known."""
        return [each.bounds for each in self.numbers if each.is_bounded]


def claim_numbers(claim: Claim, table: Rows) -> ClaimNumbers:
    """Returns a claim's number on every run, or on every seed where the claim is about several conditions.

    Raises:
        Unmeasured: where the table does not have it.
    """
    rows = single_runs(rows_where(table, claim.where))
    if not rows:
        raise NoRow(f"no row has {claim.where}")
    counts = [1 if row["n_runs"] is None else int(row["n_runs"]) for row in rows]
    groups, pooled = by_run(rows), max(counts) > 1
    if pooled:
        groups = {rows[0]["run"]: rows}
    elif claim.reduce == MAX_OVER_MIN:
        groups = {name: several for name, several in groups.items() if len(several) > 1}
        if not groups:
            raise NoRow(f"no run has two rows of {claim.where}")
    if not pooled and len({row["condition"] for several in groups.values() for row in several}) > 1:
        groups = by_seed(claim, groups)
    most = max(map(len, groups.values()))
    if claim.reduce == "one" and most > 1:
        raise Unmeasured(f"{most} rows have {claim.where}")
    if isinstance(claim.per, dict):
        bounds = paired(claim, groups, table)
    else:
        bounds = {name: [share_of(claim, row) for row in several] for name, several in groups.items()}
    numbers = tuple(reduced(claim, name, ends, groups.get(name, [])) for name, ends in bounds.items())
    # A row of a method, which no model was trained for, says that it is of no run.
    return ClaimNumbers(numbers, min(counts) if pooled else len(numbers) if any(counts) else 0, pooled)


# ---- rows


def rows_where(rows: Rows, where: Mapping[str, Any]) -> Rows:
    """Returns the rows that have these values; without `draw` among them, rows that are of no single draw."""
    for column in where:
        if rows and column not in rows[0]:
            raise Unmeasured(f"the table has no column {column!r}")
    return [
        row
        for row in rows
        if (row["draw"] is not None) is ("draw" in where)
        and all(has_value(row[column], column, wanted) for column, wanted in where.items())
    ]


def has_value(value: Any, column: str, wanted: Any) -> bool:
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


def by_run(rows: Rows) -> dict[str, Rows]:
    """Returns the rows of each run by its name."""
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row["run"] or "", []).append(row)
    return groups


def single_runs(rows: Rows) -> Rows:
    """Returns the rows of single runs, or all where there are none; rows over several runs are made of them."""
    # Of several seeds one alone may have the number: the row that pools them is then over one run.
    families = {family(row["run"] or "") for row in rows}
    return [row for row in rows if (row["n_runs"] or 0) <= 1 and row["run"] not in families] or rows


def by_seed(claim: Claim, groups: Mapping[str, Rows]) -> dict[str, Rows]:
    """Returns the rows of each seed that was trained under every condition.

    What a claim says of several conditions is measured again where each of them is trained again.
    """
    rows = [row for several in groups.values() for row in several]
    conditions = {row["condition"] for row in rows}
    if claim.reduce == "one":
        raise Unmeasured(f"{len(rows)} rows have {claim.where}, of {len(conditions)} conditions")
    seeds: dict[Any, Rows] = {}
    for row in rows:
        seeds.setdefault(row["trained_seed"], []).append(row)
    complete = {seed: of for seed, of in seeds.items() if {row["condition"] for row in of} == conditions}
    if not complete:
        raise Unmeasured(f"no seed was trained under all {len(conditions)} conditions of {claim.where}")
    return {f"seed {seed}": of for seed, of in complete.items()}


# ---- numbers


def paired(claim: Claim, groups: Mapping[str, Rows], table: Rows) -> dict[str, list[Interval]]:
    """Returns bounds of each row's number as a share of the other row's, which is of the same run or seed.

    Of runs that cannot be paired by seed it is one number, that of their means.
    """
    column, where = claim.divisor()
    others = by_run(single_runs(rows_where(table, where)))
    if not all(len(others.get(name, ())) == 1 for name in groups):
        several = sum(map(len, others.values()))
        conditions = {row["condition"] for rows in others.values() for row in rows}
        ambiguous = len(conditions) != 1 or several > len(others) or ("run" not in where and several > 1)
        if ambiguous or claim.reduce != "one":
            raise Unmeasured(f"{several} rows have {where}")
        of_seed = {rows[0]["trained_seed"]: rows for rows in others.values()}
        seeds = {name: rows[0]["trained_seed"] for name, rows in groups.items()}
        if len(of_seed) < len(others) or not of_seed.keys() >= set(seeds.values()):
            above = mean_of(bounds_of(row, claim.column) for (row,) in groups.values())
            below = mean_of(bounds_of(row, column) for (row,) in others.values())
            return {"mean" if len(groups) > 1 else next(iter(groups)): [ratio(above, below)]}
        others = {name: of_seed[seed] for name, seed in seeds.items()}
    return {
        name: [ratio(bounds_of(row, claim.column), bounds_of(others[name][0], column)) for row in rows]
        for name, rows in groups.items()
    }


def mean_of(several: Iterable[Interval]) -> Interval:
    lows, highs = zip(*several, strict=True)
    return intervals.mean(lows), intervals.mean(highs)


def share_of(claim: Claim, row: Row) -> Interval:
    """Returns bounds of the number of a row, as a share of another number of it where the claim says so."""
    own = bounds_of(row, claim.column)
    return own if claim.per is None else ratio(own, bounds_of(row, str(claim.per)))


def bounds_of(row: Row, column: str) -> Interval:
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


def ratio(above: Interval, below: Interval) -> Interval:
    """Returns bounds of a share of another number; infinite where one that is bounded may be negative, or is NaN."""
    (low, high), (least, most) = above, below
    if not low < high and not least < most:
        value = low / least if least else math.nan
        return value, value
    if any(map(math.isnan, (low, high, least, most))) or min(low, least) < 0:
        return -math.inf, math.inf
    return (low / most if most < math.inf else 0.0), (high / least if least else math.inf)


def reduced(claim: Claim, name: str, bounds: Sequence[Interval], rows: Rows) -> Number:
    """Returns the number that the claim reduces the rows of one run to."""
    lows, highs = zip(*bounds, strict=True)
    bounded, reduce = lows != highs, REDUCTIONS[claim.reduce]
    if any(map(math.isnan, (*lows, *highs))) or (claim.reduce == MAX_OVER_MIN and min(lows) <= 0):
        return Number(name, (math.nan, math.nan))
    if bounded and claim.reduce not in ("one", "min", "max"):
        return Number(name, (math.nan, math.nan))
    examples = None
    if len(rows) == 1 and claim.per is None:
        low, high = (rows[0].get(f"{claim.column}_ci_{end}") for end in ("low", "high"))
        examples = None if low is None or high is None else (float(low), float(high))
    middle = median(lows) if claim.reduce in ("min", "max") and len(lows) > 2 and not bounded else None
    return Number(name, (reduce(lows), reduce(highs)), examples, middle)
