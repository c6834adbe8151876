"""From a study's table to a verdict on a claim: the number of each training run, their interval, and the rule."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from interp_tasks.pages.numbers import digits
from interp_tasks.published import Bounds, Claim
from interp_tasks.reproduction import intervals
from interp_tasks.reproduction.intervals import ALPHA, MIN_RUNS, Interval
from interp_tasks.reproduction.runs import config_of

if TYPE_CHECKING:
    import pandas

Verdict = Literal["held", "failed", "undecided", "not testable", "not run", "error"]
#: The interval that goes with a column.
INTERVALS: Mapping[str, tuple[str, str]] = {
    "value": ("ci_low", "ci_high"),
    "effect": ("effect_ci_low", "effect_ci_high"),
}

#: How bounds of several numbers make bounds of what a claim reduces them to.
JOINED: Mapping[str, Callable[[Iterable[float]], float]] = {"one": max, "min": min, "max": max}


@dataclass(frozen=True)
class Outcome:
    """The verdict on one claim for the runs of one condition.

    Attributes:
        run: the condition, by the name of its first run.
        n_runs: how many training runs the number rests on; 0 where there is none.
        value, low, high: our number with its 95% interval; over runs their mean with Student's interval.
        interval: what the interval is over, in words.
        runs: each run's own number.
        verdict: what the rule says of the interval.
        reason: why there is no verdict, or what to know about it.
        p: of the number lying on the rule's nearest bound, two-sided; ``p_holm`` corrected over a paper's headlines.
        controls: the same number of models that should not pass, by the name of the control.
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
    interval: str = ""
    runs: tuple[tuple[str, float | None], ...] = ()
    p: float | None = None
    p_holm: float | None = None
    controls: tuple[tuple[str, float | None], ...] = ()
    command: str = ""
    hours: float | None = None


class Unmeasured(Exception):
    """A claim's number is not in the table; the message says what is."""


class NoRow(Unmeasured):
    """The table has no row that a claim could be about."""


@dataclass(frozen=True)
class Seed:
    """The identity of a training run: its condition (all settings but the seed), and the seed."""

    condition: str
    seed: int | None


#: The run as a table's column names it -> what it is. Runs that are not in it are told apart by their names.
Seeds = Mapping[str, Seed]


@dataclass(frozen=True)
class Number:
    """A claim's number on one training run.

    Attributes:
        value: NaN where there is none, or where ``known`` bounds it.
        known: the bounds of a number of which a run that ended too soon leaves bounds alone.
        over_examples: its interval over examples, where the study's table has one.
    """

    run: str
    value: float
    known: Interval | None = None
    over_examples: Interval | None = None

    @property
    def bounds(self) -> Interval:
        return self.known or (self.value, self.value)


@dataclass(frozen=True)
class Measured:
    """A claim's number on every run.

    Attributes:
        against: where runs are divided by other runs that cannot be paired with them, those runs' numbers: the
            numbers are then not divided yet.
        pooled: for a row that is of several runs together, how many; its interval is the table's.
        trained: whether it is about training runs at all, and not about a method.
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


def judge(
    claim: Claim,
    frame: pandas.DataFrame,
    run: str,
    seeds: Seeds | None = None,
    controls: Mapping[str, pandas.DataFrame] | None = None,
) -> Outcome:
    """The verdict on a claim from its study's table, of all runs of a condition.

    Args:
        run: what the outcome calls them.
        seeds: which runs are seeds of each other.
        controls: the same table of models that should not pass.
    """
    try:
        found = measured(claim, frame, seeds or {})
    except Unmeasured as unmeasured:
        if isinstance(unmeasured, NoRow) and claim.absent:
            return Outcome(claim, run, 0, "not run", reason=claim.absent)
        return Outcome(claim, run, 0, "error", reason=str(unmeasured))
    outcome = verdict_on(claim, run, found)
    whole = alone(frame)["run"].dropna().nunique()
    if claim.absent and not found.pooled and len(found.numbers) < whole:
        said = f"{len(found.numbers)} of {whole} seeds have such a row; of the others, {claim.absent}"
        outcome = replace(outcome, reason="; ".join(filter(None, (outcome.reason, said))))
    beside = []
    for name, table in (controls or {}).items():
        try:
            number = middle(claim, measured(claim, table, seeds or {}))
        except Unmeasured:  # an untrained model may have no such row
            number = None
        beside.append((name, number))
    passes = [name for name, number in beside if number is not None and claim.holds.hold(number)]
    outcome = replace(outcome, controls=tuple(beside))
    if passes:
        who = " and ".join(CONTROLS.get(name, name) for name in passes)
        reason = "; ".join(filter(None, (f"{who} passes too", outcome.reason)))
        verdict: Verdict = "not testable" if outcome.verdict == "held" else outcome.verdict
        return replace(outcome, verdict=verdict, reason=reason)
    return outcome


CONTROLS = {"untrained": "an untrained model", "shuffled": "a model trained on shuffled labels"}


def verdict_on(claim: Claim, run: str, found: Measured) -> Outcome:
    """Returns the verdict of the rule on a claim's numbers."""
    n_runs = found.n_runs
    value = middle(claim, found)
    own = () if found.against else tuple((each.run, known_or_none(each.value)) for each in found.numbers)
    outcome = Outcome(claim, run, n_runs, "undecided", value, runs=own)
    lacking = [each.run for each in found.numbers if math.isnan(each.value) and each.known is None]
    if lacking:
        of = "" if len(found.numbers) == 1 else f" on {len(lacking)} of {len(found.numbers)} runs"
        return replace(
            outcome, reason=f"there is no such number{of}: its row is empty, or it is a share of 0"
        )
    over_examples = claim.over == "examples" or n_runs == 0
    if over_examples or n_runs < 2:
        return of_examples(claim, outcome, found, decided=over_examples)
    interval, over, error = of_runs(claim, found)
    outcome = replace(outcome, interval=over)
    if interval is not None:
        outcome = replace(outcome, low=interval[0], high=interval[1])
    if n_runs < MIN_RUNS:
        return replace(outcome, reason=few(n_runs, sides(claim.holds, found)))
    if interval is None:
        return replace(outcome, reason=f"no interval: {over}", interval="")
    if error is not None:
        values = [each.value for each in found.numbers]
        outcome = replace(outcome, p=p_value(claim, values, error))
    outcome = replace(outcome, **decision(claim.holds, interval))
    bounded = [each.known for each in found.numbers if each.known is not None]
    if bounded:
        ends = in_words(min(low for low, _ in bounded), max(high for _, high in bounded))
        said = f"{len(bounded)} of {n_runs} runs end too soon: their numbers are known to lie {ends}"
        outcome = replace(outcome, reason="; ".join(filter(None, (outcome.reason, said))))
    return outcome


def known_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def few(n_runs: int, where: str) -> str:
    runs = "one training run" if n_runs == 1 else f"{n_runs} training runs"
    return f"{runs}, of three at least{where}"


def sides(bounds: Bounds, found: Measured) -> str:
    """Returns a phrase that says where the numbers of too few runs lie."""
    if found.against:
        return ""
    said = [decision(bounds, each.bounds, closed=each.known is None)["verdict"] for each in found.numbers]
    if said == ["held"]:
        return "; this one lies within the rule"
    if said == ["failed"]:
        return "; this one does not"
    return f"; {said.count('held')} of them within the rule" if len(said) > 1 else ""


def of_examples(claim: Claim, outcome: Outcome, found: Measured, decided: bool) -> Outcome:
    """The verdict from the tables' own intervals: of a method, or (no verdict) of too few training runs."""
    bounds = [each.known for each in found.numbers if each.known is not None]
    outside = few(outcome.n_runs, sides(claim.holds, found))
    if bounds:
        # A single number of which bounds are all that is known: it lies between them, whatever the examples.
        ends = mean_interval([each.bounds for each in found.numbers])
        outcome = replace(outcome, low=None, high=None)
        reason = f"a run ends too soon: the number is known to lie {in_words(*ends)}"
        if not decided:
            return replace(outcome, reason=f"{outside}; {reason}")
        verdict = decision(claim.holds, ends, closed=False)["verdict"]
        return replace(outcome, verdict=verdict, reason=reason)
    intervals_of = [each.over_examples for each in found.numbers]
    known = [each for each in intervals_of if each is not None]
    if len(known) == len(intervals_of) and known:
        low, high = mean_interval(known)
        outcome = replace(outcome, low=low, high=high, interval="over examples")
    if not decided:
        return replace(outcome, reason=outside)
    if outcome.low is None or outcome.high is None:
        return replace(outcome, reason="the study has no interval of this number")
    error = (outcome.high - outcome.low) / 2 / intervals.z_quantile(1 - ALPHA / 2)
    assert outcome.value is not None
    p = two_sided(claim.holds, outcome.value, error, None)
    return replace(outcome, p=p, **decision(claim.holds, (outcome.low, outcome.high)))


def mean_interval(several: Sequence[Interval]) -> Interval:
    """Returns the interval of a mean of numbers that may be as dependent as can be: the mean of their ends."""
    lows, highs = zip(*several, strict=True)
    return sum(lows) / len(lows), sum(highs) / len(highs)


def of_runs(claim: Claim, found: Measured) -> tuple[Interval | None, str, float | None]:
    """The interval over runs, what it is (or why there is none), and the standard error of a mean."""
    n_runs = found.n_runs
    numbers = [each.value for each in found.numbers]
    if found.pooled:
        interval = found.numbers[0].over_examples
        over = f"the study's, over {n_runs} runs"
        return interval, over if interval is not None else "the study has none of this number", None
    if found.against:
        counts = f"{len(numbers)} and {len(found.against)} runs"
        if any(each.known is not None for each in found.numbers):
            return None, "a run ends too soon, and cannot be paired with those it is divided by", None
        interval = intervals.ratio_of_means(numbers, found.against)
        if interval is None:
            return None, f"the divisor over {len(found.against)} runs cannot be told from 0", None
        return interval, f"Fieller, over {counts}", None
    bounds = [each.bounds for each in found.numbers]
    if all(each.known is None for each in found.numbers):
        scaled = logs(claim, numbers)
        if scaled is None:
            return None, "a number that is not above 0 has no logarithm", None
        interval = intervals.over_runs(scaled)
        assert interval is not None
        over = f"t, over {n_runs} runs" + (", of the logarithm" if claim.log else "")
        error = intervals.standard_error(scaled)
        return (exps(claim, interval), over, error)
    unknown = sum(each.known is not None for each in found.numbers)
    closed = [logs(claim, pair) for pair in bounds]
    if all(pair is not None for pair in closed):
        interval = intervals.over_bounded_runs([(pair[0], pair[1]) for pair in closed if pair is not None])
        if interval is not None:
            over = f"t, over {n_runs} runs, of {unknown} of which bounds alone are known"
            return exps(claim, interval), over, None
    interval = intervals.median_over_runs(bounds)
    if interval is None:
        lacking = f"{unknown} of {n_runs} runs end too soon to have the number"
        return None, f"{lacking}, and an interval of the median takes six{sides(claim.holds, found)}", None
    return interval, f"of the median, over {n_runs} runs", None


def logs(claim: Claim, values: Iterable[float]) -> list[float] | None:
    """The numbers as the interval is made of them; ``None`` where they have no logarithm."""
    values = list(values)
    if not claim.log:
        return values
    if not all(value > 0 for value in values):
        return None
    return [math.log(value) for value in values]


def exps(claim: Claim, interval: Interval) -> Interval:
    return (math.exp(interval[0]), math.exp(interval[1])) if claim.log else interval


def middle(claim: Claim, found: Measured) -> float | None:
    """The number that is shown: the mean over runs, of logarithms the geometric one; ``None`` where there is none."""
    numbers = [each.value for each in found.numbers]
    if any(math.isnan(number) for number in numbers):
        return None
    if found.against:
        return intervals.mean(numbers) / intervals.mean(found.against)
    scaled = logs(claim, numbers)
    if scaled is None:
        return None
    return math.exp(intervals.mean(scaled)) if claim.log else intervals.mean(scaled)


def decision(bounds: Bounds, interval: Interval, closed: bool = True) -> dict[str, Any]:
    """The verdict on an interval, as changes of an outcome; an open one does not hold its ends."""
    low, high = interval
    if closed:
        held = bounds.hold(low) and bounds.hold(high)
        above, below = bounds.above, bounds.below
        failed = (above is not None and high <= above) or (below is not None and low >= below)
    else:
        known = bounds.hold_between(low, high)
        held, failed = known is True, known is False
    if held:
        return {"verdict": "held"}
    if failed:
        return {"verdict": "failed"}
    return {"verdict": "undecided", "reason": "the interval reaches across the rule's bound"}


def p_value(claim: Claim, values: Sequence[float], error: float) -> float:
    """Returns the p-value of the mean over runs, on the scale of the interval."""
    scaled = logs(claim, values)
    assert scaled is not None
    bounds = claim.holds
    if claim.log:
        ends = (None if end is None else math.log(end) for end in (bounds.above, bounds.below))
        bounds = Bounds(**dict(zip(("above", "below"), ends, strict=True)))
    return two_sided(bounds, intervals.mean(scaled), error, len(values) - 1)


def two_sided(bounds: Bounds, value: float, error: float, df: int | None) -> float:
    """Twice the smaller of two one-sided p-values: that the number does not keep the rule, and that it does.

    Below 0.05 exactly where the 95% interval lies on one side of the rule.
    """

    def beyond(bound: float, sign: int) -> float:
        return intervals.p_of_bound(sign * value, error, df, sign * bound)

    # Small where the number is well above ``above`` and well below ``below``.
    within = [beyond(bounds.above, -1)] if bounds.above is not None else []
    within += [beyond(bounds.below, 1)] if bounds.below is not None else []
    without = [beyond(bounds.above, 1)] if bounds.above is not None else []
    without += [beyond(bounds.below, -1)] if bounds.below is not None else []
    return min(1.0, 2 * min(max(within), *without))


def in_words(low: float, high: float) -> str:
    if math.isinf(high):
        return "anywhere" if low <= 0 else f"above {digits(low, 3)}"
    return f"below {digits(high, 3)}" if low <= 0 else f"between {digits(low, 3)} and {digits(high, 3)}"


def measured(claim: Claim, frame: pandas.DataFrame, seeds: Seeds | None = None) -> Measured:
    """A claim's number on every run, or on every seed where it is about several conditions.

    Raises:
        Unmeasured: where the table does not have it.
    """
    seeds = seeds or {}
    rows = alone(picked(frame, claim.where))
    if claim.reduce == "count":
        names = picked(frame, {key: value for key, value in claim.where.items() if key == "run"})["run"]
        counts = {name: float((rows["run"] == name).sum()) for name in names.dropna().unique()}
        return Measured(tuple(Number(str(name), count) for name, count in counts.items()))
    if rows.empty:
        raise NoRow(f"no row has {claim.where}")
    counted = rows["n_runs"].fillna(1).astype(int)
    if (counted > 1).any():
        if len(rows) > 1 and claim.reduce == "one":
            raise Unmeasured(f"{len(rows)} rows have {claim.where}")
        other = None
        if isinstance(claim.per, dict):
            other = picked(frame, claim.divisor()[1])
            if len(other) != 1:
                raise Unmeasured(f"{len(other)} rows have {claim.divisor()[1]}")
        number = number_of(claim, rows, frame, other, str(rows["run"].iloc[0]))
        return Measured((number,), pooled=int(counted.min()))
    of_run = rows["run"].fillna("").astype(str)
    groups = {name: rows[of_run == name] for name in dict.fromkeys(of_run)}
    conditions = {seed_of(name, seeds).condition for name in groups}
    if len(conditions) > 1:
        if claim.reduce == "one":
            raise Unmeasured(f"{len(rows)} rows have {claim.where}, of {len(conditions)} conditions")
        groups = by_seed(groups, seeds, len(conditions))
    others: Mapping[str, pandas.DataFrame | None] = dict.fromkeys(groups)
    against: tuple[float, ...] = ()
    if isinstance(claim.per, dict):
        if claim.reduce != "one":
            raise Unmeasured("a ratio to another row is of one row")
        others, against = divisors_of(claim, groups, frame, seeds)
    if against:
        # Divided later, as means: as if there were no divisor.
        plain = claim.model_copy(update={"per": None})
        numbers = tuple(number_of(plain, mine, frame, None, name) for name, mine in groups.items())
        return Measured(numbers, against)
    numbers = tuple(number_of(claim, mine, frame, others[name], name) for name, mine in groups.items())
    return Measured(numbers, trained=bool(counted.any()))


def alone(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Rows of single runs, where there are any: what several have in common is made of them."""
    single = rows["n_runs"].fillna(1).astype(int) <= 1
    return rows[single] if single.any() else rows


def seed_of(name: str, seeds: Seeds) -> Seed:
    """Returns the identity of a run; for one that nothing is known of, what its name says."""
    if name in seeds:
        return seeds[name]
    match = re.fullmatch(r"(.*[/:])seed-(\d+)", name)
    return Seed(match[1], int(match[2])) if match else Seed(name, None)


def by_seed(
    groups: Mapping[str, pandas.DataFrame], seeds: Seeds, conditions: int
) -> dict[str, pandas.DataFrame]:
    """The rows of each seed that every condition has a run of; all together where there is no such seed.

    What a claim says of several conditions is measured again where each of them is trained again.
    """
    import pandas

    found: dict[int | None, dict[str, pandas.DataFrame]] = {}
    for name, rows in groups.items():
        seed = seed_of(name, seeds)
        found.setdefault(seed.seed, {})[seed.condition] = rows
    whole = {seed: list(some.values()) for seed, some in found.items() if len(some) == conditions}
    if not whole or None in whole:
        return {"all": pandas.concat(list(groups.values()))}
    return {f"seed {seed}": pandas.concat(some) for seed, some in whole.items()}


def divisors_of(
    claim: Claim, groups: Mapping[str, pandas.DataFrame], frame: pandas.DataFrame, seeds: Seeds
) -> tuple[dict[str, pandas.DataFrame | None], tuple[float, ...]]:
    """The row that each run is divided by: its own, that of the same seed, or (as numbers) all of them, unpaired."""
    column, where = claim.divisor()
    others = alone(picked(frame, where))
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


def number_of(
    claim: Claim,
    rows: pandas.DataFrame,
    frame: pandas.DataFrame,
    other: pandas.DataFrame | None,
    name: str = "",
) -> Number:
    """The number of the rows of one run."""
    if claim.reduce == "one" and len(rows) != 1:
        raise Unmeasured(f"{len(rows)} rows have {claim.where}")
    cells = [cell_of(claim, rows.iloc[[place]], frame, other) for place in range(len(rows))]
    values = [cell.value for cell in cells]
    join = JOINED.get(claim.reduce)
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
    reduced = {"mean": intervals.mean, "sum": math.fsum}.get(claim.reduce) or join
    assert reduced is not None
    return Number(name, reduced(values), over_examples=joined(claim, cells))


def joined(claim: Claim, cells: Sequence[Number]) -> Interval | None:
    """The interval over examples of what cells are reduced to, which is no narrower than theirs.

    Of a maximum or a minimum: the cells' intervals, widened until all hold together, bound it. A mean's is the mean of
    theirs, as if all went up and down as one.
    """
    known = [cell.over_examples for cell in cells]
    if not known or any(interval is None for interval in known):
        return None
    several = [interval for interval in known if interval is not None]
    if claim.reduce in ("mean", "sum"):
        low, high = mean_interval(several)
        return (low, high) if claim.reduce == "mean" else (len(cells) * low, len(cells) * high)
    join = JOINED[claim.reduce]
    wide = [
        intervals.widened(interval, cell.value, len(cells))
        for cell, interval in zip(cells, several, strict=True)
    ]
    lows, highs = zip(*wide, strict=True)
    return join(lows), join(highs)


def cell_of(
    claim: Claim, row: pandas.DataFrame, frame: pandas.DataFrame, other: pandas.DataFrame | None
) -> Number:
    """The number of a single row, divided."""
    from interp_tasks.experiments.generalisation.measure import AT_LEAST, AT_MOST, RATIO

    ours = row.iloc[0]
    metric = str(ours["metric"]).partition(", ")[0]
    if metric == RATIO:
        # The table has the bounds beside it.
        same = (frame["variant"] == ours["variant"]) & (frame["split"] == ours["split"])
        beside = frame[same & (frame["run"] == ours["run"])].set_index("metric")["value"]
        low, high = float(beside.get(AT_LEAST, math.nan)), float(beside.get(AT_MOST, math.nan))
        low, high = 0.0 if math.isnan(low) else low, math.inf if math.isnan(high) else high
        if low != high:
            return Number("", math.nan, (low, high))
    value, bounds = entry(ours, claim.column)
    interval = interval_of(ours, claim.column)
    below: Interval | None
    if claim.per is None:
        return Number("", value, bounds, interval)
    if claim.per == "variance":
        divisor, known, below = variance(str(ours["run"])), None, None
        exact = True
    elif claim.per == "baseline":
        (divisor, known), below, exact = entry(ours, "baseline"), interval_of_baseline(ours), False
    else:
        assert other is not None
        column, _ = claim.divisor()
        theirs = other.iloc[0]
        (divisor, known), below, exact = entry(theirs, column), interval_of(theirs, column), False
    if divisor == 0:
        return Number("", math.nan)
    if bounds is not None or known is not None:
        return Number("", math.nan, quotient_of_bounds(bounds or (value, value), known or (divisor, divisor)))
    over_examples = None
    if interval is not None and exact:
        low, high = sorted(end / divisor for end in interval)
        over_examples = low, high
    elif interval is not None and below is not None and not math.isnan(value):
        above = intervals.widened(interval, value, 2)
        over_examples = intervals.quotient(above, intervals.widened(below, divisor, 2))
    return Number("", value / divisor, None, over_examples)


def divisor_of(claim: Claim, row: pandas.Series, frame: pandas.DataFrame) -> float:
    """Returns the divisor of a single row's number."""
    if claim.per is None:
        return 1.0
    if claim.per == "variance":
        return variance(str(row["run"]))
    if claim.per == "baseline":
        return float(row["baseline"])
    column, where = claim.divisor()
    others = picked(frame, where)
    if len(others) != 1:
        raise Unmeasured(f"{len(others)} rows have {where}")
    return float(others[column].iloc[0])


def quotient_of_bounds(above: Interval, below: Interval) -> Interval:
    """The bounds of a ratio of two numbers that are not negative; everything, where one may be, or is not a number."""
    if any(math.isnan(end) for end in (*above, *below)) or min(above[0], below[0]) < 0:
        return -math.inf, math.inf
    low = 0.0 if math.isinf(below[1]) else above[0] / below[1]
    return low, math.inf if below[0] == 0 else above[1] / below[0]


def entry(row: pandas.Series, column: str) -> tuple[float, Interval | None]:
    """A number of a row, and its bounds where it is a step that was not reached: it lies beyond the run's last one."""
    from interp_tasks.experiments.generalisation.measure import SPREAD, THEN

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


def interval_of(row: pandas.Series, column: str) -> Interval | None:
    """A number's interval in the table, over examples."""
    if column == "baseline":
        return interval_of_baseline(row)
    low, high = (float(row[name]) for name in INTERVALS[column])
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def interval_of_baseline(row: pandas.Series) -> Interval | None:
    """Returns the interval of the unedited model's number, the edited one's less the effect: as wide as both."""
    value, effect = interval_of(row, "value"), interval_of(row, "effect")
    middle = float(row["baseline"])
    if value is None or effect is None or math.isnan(middle):
        return None
    half = (value[1] - value[0] + effect[1] - effect[0]) / 2
    return middle - half, middle + half


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
            ends = wanted if isinstance(wanted, list) else [str(wanted)]
            chosen &= values.map(lambda name, ends=ends: named(str(name), ends))
        elif isinstance(wanted, list):
            chosen &= values.isin(wanted)
        else:
            chosen &= (values == wanted).fillna(False).astype(bool)
    return frame[chosen]


def named(name: str, ends: Iterable[str]) -> bool:
    """Returns whether a run's name ends with one of these, which may be globs: ``sweep/seed-*``."""
    return any(fnmatchcase(name, f"*{end}") for end in ends)


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
