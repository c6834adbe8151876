"""Chooses the rows of a study's table that a claim is about, and groups them by training run and seed."""

from __future__ import annotations

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


#: Name of a run in a table's column -> its identity. Runs that are not in it are told apart by their names.
Seeds = Mapping[str, Seed]


class Unmeasured(Exception):
    """A claim's number is not in the table; the message says what is there instead."""


class NoRow(Unmeasured):
    """The table has no row that a claim could be about."""


def rows_where(frame: pandas.DataFrame, where: Mapping[str, Any]) -> pandas.DataFrame:
    """Returns the rows that have these values; without `draw` among them, rows that are of no single draw."""
    chosen = frame["draw"].isna() if "draw" not in where else frame["draw"].notna()
    for column, wanted in where.items():
        if column not in frame:
            raise Unmeasured(f"the table has no column {column!r}")
        values = frame[column]
        if column == "ref":
            values = values.str.rpartition("@")[2]
        if column == "run":
            ends = wanted if isinstance(wanted, list) else [str(wanted)]
            chosen &= values.map(lambda name, ends=ends: has_ending(str(name), ends))
        elif isinstance(wanted, list):
            chosen &= values.isin(wanted)
        else:
            chosen &= (values == wanted).fillna(False).astype(bool)
    return frame[chosen]


def has_ending(name: str, ends: Iterable[str]) -> bool:
    """Returns whether a run's name ends with one of these, which may be globs: ``sweep/seed-*``."""
    return any(fnmatchcase(name, f"*{end}") for end in ends)


def single_runs(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the rows of single runs, or all where there are none; rows over several runs are made of them."""
    # Of several seeds one alone may have the number: the row that pools them is then over one run.
    names = rows["run"].fillna("").astype(str)
    pooled = names.isin({family(name) for name in names} - {None})
    single = (rows["n_runs"].fillna(1).astype(int) <= 1) & ~pooled
    return rows[single] if single.any() else rows


def seed_of(name: str, seeds: Seeds) -> Seed:
    """Returns the identity of a run, read from its name where ``seeds`` does not have it."""
    if name in seeds:
        return seeds[name]
    match = re.fullmatch(r"(.*[/:])seed-(\d+)", name)
    return Seed(match[1], int(match[2])) if match else Seed(name, None)


def rows_by_seed(
    groups: Mapping[str, pandas.DataFrame], seeds: Seeds, conditions: int
) -> dict[str, pandas.DataFrame]:
    """Returns the rows of each seed that was trained under every condition; all rows together where there is none.

    What a claim says of several conditions is measured again where each of them is trained again.
    """
    import pandas

    by_seed: dict[int | None, dict[str, pandas.DataFrame]] = {}
    for name, rows in groups.items():
        seed = seed_of(name, seeds)
        by_seed.setdefault(seed.seed, {})[seed.condition] = rows
    complete = {seed: list(parts.values()) for seed, parts in by_seed.items() if len(parts) == conditions}
    if not complete or None in complete:
        return {"all": pandas.concat(list(groups.values()))}
    return {f"seed {seed}": pandas.concat(parts) for seed, parts in complete.items()}


def run_divisors(
    claim: Claim, groups: Mapping[str, pandas.DataFrame], frame: pandas.DataFrame, seeds: Seeds
) -> tuple[dict[str, pandas.DataFrame | None], tuple[float, ...]]:
    """Returns the row that each run is divided by, its own or its seed's; or all divisors, where none can be paired."""
    column, where = claim.divisor()
    others = single_runs(rows_where(frame, where))
    if others.empty:
        raise Unmeasured(f"0 rows have {where}")
    names = others["run"].fillna("").astype(str)
    same_run = {name: others[names == name] for name in groups}
    if all(len(rows) == 1 for rows in same_run.values()):
        return dict(same_run), ()
    if "run" not in where and len(others) > 1:
        raise Unmeasured(f"{len(others)} rows have {where}")
    of_seed: dict[str, pandas.DataFrame] = {}
    for name in groups:
        seed = seed_of(name, seeds).seed
        of_seed[name] = others[[seed_of(each, seeds).seed == seed for each in names]]
    if len({seed_of(each, seeds).condition for each in names}) > 1 or names.duplicated().any():
        raise Unmeasured(f"{len(others)} rows have {where}")
    if all(len(rows) == 1 for rows in of_seed.values()):
        return dict(of_seed), ()
    if len(groups) == 1 and len(others) == 1:
        return dict.fromkeys(groups, others), ()
    return {}, tuple(others[column].astype(float))
