"""Computes a claim's number on every training run: chooses the rows of a study's table, groups and reduces them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from statistics import median
from typing import Any

from interp_tasks.measurement import intervals
from interp_tasks.measurement.intervals import Interval
from interp_tasks.measurement.run_logs import family
from interp_tasks.published import Claim

#: Metrics of `modular generalisation` that a run may end too soon to have.
SPREAD, THEN = "last step / first step", "validation when train is at "
#: The reduction that says by how much the rows of one run differ.
MAX_OVER_MIN = "max / min"
#: Reductions that make bounds of a number of the bounds of several.
MONOTONE = ("one", "min", "max")
REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "one": max,
    "min": min,
    "max": max,
    "mean": intervals.mean,
    MAX_OVER_MIN: lambda values: max(values) / min(values),
}
NOTHING = (math.nan, math.nan)

#: A row of a study's table, and several.
Row = Mapping[str, Any]
Rows = list[Row]


@dataclass(frozen=True)
class Seed:
    """The identity of a training run: its condition (all settings but the seed), and the seed."""

    condition: str
    seed: int | None


#: Name of a run in a table's column -> its identity. Runs that are not in it are told apart by their names.
Seeds = Mapping[str, Seed]


class Unmeasured(Exception):
    """A claim's number is not in the table; the message says what is there instead."""


class NoRow(Unmeasured):
    """The table has no row that a claim could be about."""


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
    def is_bounded(self) -> bool:
        """Returns whether bounds are all that is known."""
        return self.bounds[0] < self.bounds[1]


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
        if not self.trained or self.pooled:
            return self.pooled
        return min(len(self.numbers), len(self.against) or len(self.numbers))

    @property
    def bounded(self) -> list[Interval]:
        """Returns the bounds of the numbers of which no more is known."""
        return [each.bounds for each in self.numbers if each.is_bounded]


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
        return ClaimNumbers((reduced(claim, rows, None, run_of(rows[0])),), pooled=min(counts))
    groups = by_run(rows)
    if claim.reduce == MAX_OVER_MIN:
        groups = {name: run_rows for name, run_rows in groups.items() if len(run_rows) > 1}
        if not groups:
            raise NoRow(f"no run has two rows of {claim.where}")
    conditions = {seed_of(name, seeds).condition for name in groups}
    if len(conditions) > 1:
        if claim.reduce == "one":
            raise Unmeasured(f"{len(rows)} rows have {claim.where}, of {len(conditions)} conditions")
        groups = by_seed(groups, seeds, len(conditions))
    paired, against = divisors(claim, groups, table, seeds) if isinstance(claim.per, dict) else ({}, ())
    if against:
        # Divided later, as means: as if there were no divisor.
        claim = claim.model_copy(update={"per": None})
    numbers = tuple(reduced(claim, rows, paired.get(name), name) for name, rows in groups.items())
    # A row of a method, which no model was trained for, says that it is of no run.
    return ClaimNumbers(numbers, against, trained=any(counts))


# ---- rows


def rows_where(rows: Rows, where: Mapping[str, Any]) -> Rows:
    """Returns the rows that have these values; without `draw` among them, rows that are of no single draw."""
    for column in where:
        if rows and column not in rows[0]:
            raise Unmeasured(f"the table has no column {column!r}")
    drawn = "draw" in where
    return [
        row
        for row in rows
        if (row.get("draw") is not None) is drawn
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


# ---- runs


def seed_of(name: str, seeds: Seeds) -> Seed:
    """Returns the identity of a run, read from its name where ``seeds`` does not have it."""
    if name in seeds:
        return seeds[name]
    match = re.fullmatch(r"(.*[/:])seed-(\d+)", name)
    return Seed(match[1], int(match[2])) if match else Seed(name, None)


def by_seed(groups: Mapping[str, Rows], seeds: Seeds, conditions: int) -> dict[str, Rows]:
    """Returns the rows of each seed that was trained under every condition; all rows together where there is none.

    What a claim says of several conditions is measured again where each of them is trained again.
    """
    parts: dict[int | None, dict[str, Rows]] = {}
    for name, rows in groups.items():
        seed = seed_of(name, seeds)
        parts.setdefault(seed.seed, {})[seed.condition] = rows
    complete = {seed: list(chain(*of.values())) for seed, of in parts.items() if len(of) == conditions}
    if not complete or None in complete:
        return {"all": list(chain(*groups.values()))}
    return {f"seed {seed}": rows for seed, rows in complete.items()}


def divisors(
    claim: Claim, groups: Mapping[str, Rows], table: Rows, seeds: Seeds
) -> tuple[dict[str, Row], tuple[float, ...]]:
    """Returns the row that each run is divided by, its own or its seed's; or all divisors, where none can be paired."""
    column, where = claim.divisor()
    of_run = by_run(single_runs(rows_where(table, where)))
    if all(len(of_run.get(name, ())) == 1 for name in groups):
        return {name: of_run[name][0] for name in groups}, ()
    several = sum(map(len, of_run.values()))
    conditions = {seed_of(name, seeds).condition for name in of_run}
    ambiguous = len(conditions) != 1 or several > len(of_run) or ("run" not in where and several > 1)
    if ambiguous or claim.reduce != "one":
        raise Unmeasured(f"{several} rows have {where}")
    of_seed = {seed_of(name, seeds).seed: row for name, (row,) in of_run.items()}
    seeds_of_groups = {name: seed_of(name, seeds).seed for name in groups}
    if len(of_seed) == len(of_run) and of_seed.keys() >= set(seeds_of_groups.values()):
        return {name: of_seed[seed] for name, seed in seeds_of_groups.items()}, ()
    if len(groups) == len(of_run) == 1:
        return {name: row for name in groups for row in of_seed.values()}, ()
    return {}, tuple(number(row, column) for (row,) in of_run.values())


# ---- numbers


def reduced(claim: Claim, rows: Rows, divisor: Row | None, name: str) -> Number:
    """Returns the number that the claim reduces the rows of one run to."""
    if claim.reduce == "one" and len(rows) != 1:
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    cells = [cell_of(claim, row, divisor) for row in rows]
    lows, highs = zip(*(cell.bounds for cell in cells), strict=True)
    bounded = any(cell.is_bounded for cell in cells)
    if any(map(math.isnan, (*lows, *highs))) or (claim.reduce == MAX_OVER_MIN and min(lows) <= 0):
        return Number(name, NOTHING)
    if bounded and claim.reduce not in MONOTONE:
        return Number(name, NOTHING)
    reduce = REDUCTIONS[claim.reduce]
    if bounded:
        return Number(name, (reduce(lows), reduce(highs)))
    middle = median(lows) if claim.reduce in ("min", "max") and len(lows) > 2 else None
    return Number(name, (reduce(lows),) * 2, cells[0].over_examples if len(cells) == 1 else None, middle)


def cell_of(claim: Claim, row: Row, other: Row | None) -> Number:
    """Returns the number of a single row, divided as the claim says."""
    cell = of_column(row, claim.column)
    if claim.per is None:
        return cell
    if claim.per == "variance":
        return ratio(cell, of_column(row, "variance"))
    if other is None:
        return ratio(cell, of_column(row, "baseline"))
    return ratio(cell, of_column(other, claim.divisor()[0]))


def of_column(row: Row, column: str) -> Number:
    """Returns a number of a row; a step that the run did not reach is later than its last."""
    value, metric = number(row, column), str(row["metric"])
    if value == value:
        low, high = number(row, f"{column}_ci_low"), number(row, f"{column}_ci_high")
        return Number("", (value, value), None if math.isnan(low) or math.isnan(high) else (low, high))
    if metric.startswith((SPREAD, THEN)) or (metric.startswith("step at") and column == "effect"):
        return Number("", (-math.inf, math.inf))
    last = number(row, "step")
    return Number("", (0.0 if last != last else last, math.inf) if metric.startswith("step at") else NOTHING)


def number(row: Row, column: str) -> float:
    """Returns a number of a row; NaN where it has none."""
    value = row.get(column)
    return math.nan if value is None else float(value)


def ratio(above: Number, below: Number) -> Number:
    """Returns a number as a share of another; infinite bounds where one that is bounded may be negative, or is NaN."""
    if not above.is_bounded and not below.is_bounded:
        value = above.value / below.value if below.value else math.nan
        return Number("", (value, value))
    (low, high), (least, most) = above.bounds, below.bounds
    if any(map(math.isnan, (low, high, least, most))) or min(low, least) < 0:
        return Number("", (-math.inf, math.inf))
    return Number("", (low / most if most < math.inf else 0.0, high / least if least else math.inf))
