"""From a study's table to a verdict on a claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from interp_tasks.published import Claim
from interp_tasks.reporting.numbers import digits
from interp_tasks.reproducing.locating import config_of

if TYPE_CHECKING:
    import pandas

Verdict = Literal["held", "failed", "not testable at this scale", "not run", "error"]
#: The interval that goes with a column.
INTERVALS: Mapping[str, tuple[str, str]] = {
    "value": ("ci_low", "ci_high"),
    "effect": ("effect_ci_low", "effect_ci_high"),
}

#: How bounds of several numbers make bounds of what a claim reduces them to.
JOINED: Mapping[str, Callable[[Iterable[float]], float]] = {"one": max, "min": min, "max": max}


@dataclass(frozen=True)
class Outcome:
    """What became of one claim on one run, or on the runs of one role.

    Attributes:
        n_runs: how many training runs the number rests on; 0 where there is none.
        value, low, high: our number with its 95% interval (over examples, or runs where there are several); an
            interval of a ratio takes the divisor as given.
        verdict: what the rule says of ``value`` alone.
        reason: why there is no verdict, or what to know about it.
        command, hours: what would have to be trained, for a claim that was not run.
    """

    claim: Claim
    run: str
    n_runs: int
    verdict: Verdict
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    command: str = ""
    hours: float | None = None


class Unmeasured(Exception):
    """A claim's number is not in the table; the message says what is."""


def judge(claim: Claim, frame: pandas.DataFrame, run: str) -> Outcome:
    """The verdict on a claim from its study's table."""
    try:
        value, low, high, n_runs = measured(claim, frame)
    except Unmeasured as unmeasured:
        return Outcome(claim, run, 0, "error", reason=str(unmeasured))
    between = known_between(claim, frame)
    if between is not None:
        decided = claim.holds.hold_between(*between)
        reason = f"a run ends too soon: the number is known to lie {in_words(*between)}"
        if decided is None:
            return Outcome(claim, run, n_runs, "not testable at this scale", reason=reason)
        # What the table has in its place is a bound, which is no number of ours.
        return Outcome(claim, run, n_runs, "held" if decided else "failed", reason=reason)
    if math.isnan(value):
        return Outcome(
            claim,
            run,
            n_runs,
            "failed",
            reason="there is no such number: its row is empty, or it is a share of 0",
        )
    holds = claim.holds.hold(value)
    ends = [end for end in (low, high) if end is not None]
    crosses = any(claim.holds.hold(end) != holds for end in ends)
    reason = "the interval reaches across the rule's bound" if crosses else ""
    return Outcome(claim, run, n_runs, "held" if holds else "failed", value, low, high, reason)


def known_between(claim: Claim, frame: pandas.DataFrame) -> tuple[float, float] | None:
    """The bounds of a number of which runs that ended too soon leave bounds alone; ``None`` for any other number."""
    rows = picked(frame, claim.where)
    join = JOINED.get(claim.reduce)
    if join is None or claim.column == "baseline" or (claim.reduce == "one" and len(rows) != 1):
        return None
    bounds = [bounds_of(claim, rows.iloc[[place]], frame) for place in range(len(rows))]
    if not any(bounds):
        return None
    numbers = (rows[claim.column].astype(float) / divisors(claim, rows)).tolist()
    ends = [known or (number, number) for known, number in zip(bounds, numbers, strict=True)]
    if any(math.isnan(end) for pair in ends for end in pair):
        return None
    lows, highs = zip(*ends, strict=True)
    return join(lows), join(highs)


def bounds_of(claim: Claim, rows: pandas.DataFrame, frame: pandas.DataFrame) -> tuple[float, float] | None:
    """The bounds of the number of a single row.

    A step that was not reached lies beyond the run's last one, and of a ratio of steps the table has the bounds.
    """
    from interp_tasks.experiments.generalising import AT_LEAST, AT_MOST, RATIO, SPREAD, THEN

    row = rows.iloc[0]
    metric = str(row["metric"]).partition(", ")[0]
    same = (frame["variant"] == row["variant"]) & (frame["split"] == row["split"])
    if metric == RATIO:
        beside = frame[same & (frame["run"] == row["run"])].set_index("metric")["value"]
        low, high = float(beside.get(AT_LEAST, math.nan)), float(beside.get(AT_MOST, math.nan))
        low, high = 0.0 if math.isnan(low) else low, math.inf if math.isnan(high) else high
        return None if low == high else (low, high)
    divisor = float(divisors(claim, rows, frame).iloc[0])
    if not math.isnan(row[claim.column]) and not math.isnan(divisor):
        return None
    if metric.startswith((SPREAD, THEN.partition("{")[0])):
        return -math.inf, math.inf
    if not metric.startswith("step at"):
        return None
    if claim.column == "effect" or math.isnan(divisor):
        return -math.inf, math.inf
    # Of several seeds the first that ended without it.
    name, alone = str(row["run"]), frame["n_runs"].fillna(1) <= 1
    of_run = frame["run"].str.startswith(name[:-1]) & alone if name.endswith("*") else frame["run"] == name
    unreached = frame[same & of_run & (frame["metric"] == metric) & frame["value"].isna()]
    least = float(unreached["step"].min())
    return (0.0 if math.isnan(least) else least / divisor), math.inf


def in_words(low: float, high: float) -> str:
    if math.isinf(high):
        return "anywhere" if low <= 0 else f"above {digits(low, 3)}"
    return f"below {digits(high, 3)}" if low <= 0 else f"between {digits(low, 3)} and {digits(high, 3)}"


def measured(claim: Claim, frame: pandas.DataFrame) -> tuple[float, float | None, float | None, int]:
    """A claim's number, its interval, and how many training runs it rests on."""
    rows = picked(frame, claim.where)
    counted = rows["n_runs"].fillna(1).astype(int)
    # A method without a model has rows and no training run; medians over seeds are one row of several.
    n_runs = max(rows["run"][counted > 0].nunique(), int(counted.max()) if len(counted) else 0)
    if claim.reduce == "count":
        return float(len(rows)), None, None, n_runs
    if rows.empty:
        raise Unmeasured(f"no row has {claim.where}")
    column = rows[claim.column].astype(float)
    if claim.reduce != "one":
        if isinstance(claim.per, dict):
            raise Unmeasured("a ratio to another row is of one row")
        scaled = column / divisors(claim, rows)
        return float(scaled.agg(claim.reduce, skipna=False)), None, None, n_runs
    if len(rows) > 1:
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    divisor = float(divisors(claim, rows, frame).iloc[0])
    if divisor == 0:
        return math.nan, None, None, n_runs
    ends: list[float | None] = [None, None]
    if claim.column in INTERVALS:
        found = [float(rows[name].iloc[0]) / divisor for name in INTERVALS[claim.column]]
        ends = [None if math.isnan(end) else end for end in sorted(found)]
    return float(column.iloc[0]) / divisor, ends[0], ends[1], n_runs


def divisors(claim: Claim, rows: pandas.DataFrame, frame: pandas.DataFrame | None = None) -> pandas.Series:
    """What each row's number is divided by."""
    import pandas

    if claim.per == "baseline":
        return rows["baseline"].astype(float)
    if claim.per == "variance":
        return rows["run"].map(variance)
    if claim.per is None or frame is None:
        return pandas.Series(1.0, index=rows.index)
    column, where = claim.divisor()
    other = picked(frame, where)
    if len(other) != 1:
        raise Unmeasured(f"{len(other)} rows have {where}")
    return pandas.Series(float(other[column].iloc[0]), index=rows.index)


def picked(frame: pandas.DataFrame, where: Mapping[str, Any]) -> pandas.DataFrame:
    """The rows that a filter leaves."""
    chosen = frame["draw"].isna() if "draw" not in where else frame["draw"].notna()
    for column, wanted in where.items():
        if column not in frame:
            raise Unmeasured(f"the table has no column {column!r}")
        values = frame[column]
        if column == "ref":
            values = values.str.rpartition("@")[2]
        if column == "run":
            chosen &= values.str.endswith(tuple(wanted) if isinstance(wanted, list) else str(wanted))
        elif isinstance(wanted, list):
            chosen &= values.isin(wanted)
        else:
            chosen &= (values == wanted).fillna(False).astype(bool)
    return frame[chosen]


@cache
def variance(run: str) -> float:
    """Var X of the task that a run learned."""
    from tasks import get

    name, config = config_of(run)
    task = get(name, **config)
    found = getattr(task, "entry_variance", None)
    if found is None:
        raise Unmeasured(f"task {name!r} says no variance of an entry")
    return float(found)
