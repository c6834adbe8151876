"""Chooses the rows of a study's table that a claim is about, and groups them by training run and seed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from interp_tasks.measurement.run_logs import family
from interp_tasks.published import Claim

if TYPE_CHECKING:
    import pandas


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


def count_of(row: Row) -> int:
    """Returns how many training runs a row is of; one where it does not say."""
    return 1 if row["n_runs"] is None else int(row["n_runs"])


def single_runs(rows: Rows) -> Rows:
    """Returns the rows of single runs, or all where there are none; rows over several runs are made of them."""
    # Of several seeds one alone may have the number: the row that pools them is then over one run.
    families = {family(run_of(row)) for row in rows}
    single = [row for row in rows if count_of(row) <= 1 and run_of(row) not in families]
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
        return {"all": joined(groups.values())}
    return {f"seed {seed}": joined(parts.values()) for seed, parts in complete.items()}


def joined(groups: Iterable[Rows]) -> Rows:
    return [row for rows in groups for row in rows]


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
