"""Measures when each answer of a run generalises: when its accuracy reaches a level, on both splits.

The ``variant`` is an accuracy as the run logs it, the ``split`` validation or train; the ``metric`` is ``step at
95%`` and ``step at 95% for good`` (interpolated between logged steps; empty for a run that is not there by its last
step, which is the ``step`` of the row), ``reached 95%`` (1 or 0), ``final level``, ``rank correlation with its loss``
over logged steps up to that at which it first is at its largest (later ones tie). Of validation, ``baseline`` is the
step of train, ``effect`` the delay, and ``validation when train is at 95%`` is how far it has come by then: chance
where a run memorises first, the level where it does not. Variants that begin with ``order`` are about several
accuracies ``accuracy_q`` of a run: ``pairs in order`` (the share of pairs of which the smaller q comes first), ``last
step / first step``. Rows of several seeds have the median, the range (``..., smallest``, ``..., largest``) and, from
three seeds on, intervals: Student's t over runs; of ``reached`` the exact binomial one. A run that does not get there
counts as later than all others; the interval is then one of the median, from six seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve
from interp_tasks.checkpoints.drop import final_level
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.intervals import finite_or_nan
from interp_tasks.measurement.options import check_level
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, pooled_over_seeds, read_runs, title_and_prefix
from interp_tasks.measurement.table import Row, tidy
from interp_tasks.pages import Column, Figure, number, signed

if TYPE_CHECKING:
    import pandas

ACCURACY = "accuracy"
SPLITS = ("validation", "train")
#: Metrics of the table; ``{level}`` is the level in per cent.
STEP, LASTING, REACHED = "step at {level}", "step at {level} for good", "reached {level}"
THEN = "validation when train is at {level}"
FINAL, MIRROR = "final level", "rank correlation with its loss"
PAIRS, SPREAD = "pairs in order", "last step / first step"
#: The primes below it generalise one by one, says the figure of the MIIII paper, those from it on together.
TOGETHER_FROM = 11
#: Steps are on a logarithmic axis.
STEPS = {"type": "log", "dtick": 1, "exponentformat": "none"}
LEVEL_OPTION = typer.Option("--level", help="Of an accuracy, above 0, at most 1.")


@experiment("modular", says={"level": 0.95})
def generalisation(runs: str | Sequence[str], level: Annotated[float, LEVEL_OPTION] = 0.95) -> Result:
    """Say at which step each accuracy of a run reaches a level, in training and validation, in which order.

    A line per answer; of RUN/seed-0, RUN/seed-1, ... lines more with the medians. A run that does not get there is said
    to be so by its last step.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; ``RUN/seed-0``, ``RUN/seed-1``, ... are also pooled.
        level: of an accuracy.

    Raises:
        UserError: in one line.
    """
    import pandas

    check_level(level)
    logged_runs = read_runs(runs)
    rows: list[Row] = []
    for run in logged_runs:
        reaches = reaches_of(run, level)
        rows += reach_rows(run, reaches, level)
        rows += order_rows(run, reaches, level)
    several = pooled_over_seeds(
        logged_runs,
        rows,
        lambda metric: metric.startswith("reached"),
        lambda metric: metric.startswith("step at"),
    )
    frame = tidy(pandas.DataFrame(rows + several).assign(experiment="generalisation", intervention="none"))
    notes = (
        "Step: where the accuracy first is at the level, interpolated between logged steps; for good: after it the "
        "accuracy is never below again. Validation is a fixed sample, train the batch of the step.",
        "Delay: steps from train to validation.",
        "Of several seeds: the median; a run that does not get there is later than all others.",
    )
    config = {"runs": [run.name for run in logged_runs], "level": level}
    return Result(
        "generalisation", frame, config, notes if several else notes[:2], data={"runs": logged_runs}
    )


# ---- rows


@dataclass(frozen=True)
class Reach:
    """The steps at which one accuracy of a run reaches a level on one split; infinite where it never does."""

    name: str
    split: str
    first: float
    lasting: float
    until: float
    final: float


def reaches_of(run: Run, level: float) -> list[Reach]:
    """Returns every accuracy on both splits.

    Raises:
        UserError: for a run that logs no accuracy.
    """
    from interp_tasks.measurement.crossings import reached

    reaches = []
    for split in SPLITS:
        for name in accuracies(run, split):
            steps, values = run.points(name, split)
            # Step 0 has no batch that was trained on.
            if split == "train" and steps[:1] == [0]:
                steps, values = steps[1:], values[1:]
            if steps:
                ends = reached(steps, values, level)
                reaches.append(Reach(name, split, *ends, float(steps[-1]), final_level(values)))
    if not any(reach.split == "validation" for reach in reaches):
        raise UserError(
            f"{run.name} logs no finite accuracy: it has {', '.join(run.logged()) or 'nothing'}; generalisation is of "
            "tasks with right and wrong answers"
        )
    return reaches


def accuracies(run: Run, split: str) -> list[str]:
    """Returns the logged metrics ``accuracy``, ``accuracy_q``, ..., of several answers the mean first."""
    return [name for name in run.logged(split) if name == ACCURACY or name.startswith(f"{ACCURACY}_")]


def percent(level: float) -> str:
    return f"{100 * level:g}%"


def reach_rows(run: Run, reaches: Sequence[Reach], level: float) -> Iterator[Row]:
    """Yields the rows of one run: where each accuracy reaches the level, its delay, and its last value."""
    import numpy as np

    trained = {reach.name: reach.first for reach in reaches if reach.split == "train"}
    step, lasting, there, then = (
        name.format(level=percent(level)) for name in (STEP, LASTING, REACHED, THEN)
    )
    for reach in reaches:
        shared = {**run.labels(), "step": int(reach.until), "split": reach.split, "variant": reach.name}
        values = {
            lasting: finite_or_nan(reach.lasting),
            there: float(math.isfinite(reach.first)),
            FINAL: reach.final,
        }
        delay = {}
        if reach.split == "train":
            shared["n"] = None
        else:
            if reach.name in trained:
                at = trained[reach.name]
                delay = {"baseline": finite_or_nan(at), "effect": finite_or_nan(reach.first - at)}
                points = run.points(reach.name)
                values[then] = float(np.interp(at, *points)) if math.isfinite(at) else math.nan
            values[MIRROR] = mirrored(run, reach.name)
        yield {**shared, **delay, "metric": step, "value": finite_or_nan(reach.first)}
        yield from ({**shared, "metric": metric, "value": value} for metric, value in values.items())


def mirrored(run: Run, name: str) -> float:
    """Returns Spearman's correlation of an accuracy with the loss of the same answer; NaN without one.

    Over logged steps up to that at which the accuracy first is at its largest: after it accuracies tie, and the loss
    goes on falling, so that the longer a run goes on, the lower would the correlation be.
    """
    import numpy as np

    from circuits.statistics import spearman

    loss_name = f"loss{name.removeprefix(ACCURACY)}"
    one, other = (dict(zip(*run.points(each), strict=True)) for each in (name, loss_name))
    steps = sorted(one.keys() & other.keys())
    if steps:
        # ``max`` gives the first of several.
        steps = [step for step in steps if step <= max(steps, key=lambda step: one[step])]
    if len(steps) < 3:
        return math.nan
    return float(spearman(*(np.array([[curve[step] for step in steps]]) for curve in (one, other)))[0])


def order_rows(run: Run, reaches: Sequence[Reach], level: float) -> Iterator[Row]:
    """Yields rows on the order in which the answers of a run generalise."""
    validated = {answer(reach.name): reach for reach in reaches if reach.split == "validation"}
    primes = sorted(int(q) for q in validated if q.isdecimal())
    sides = {
        "order of all answers": primes,
        f"order of answers below {TOGETHER_FROM}": [q for q in primes if q < TOGETHER_FROM],
        f"order of answers from {TOGETHER_FROM} on": [q for q in primes if q >= TOGETHER_FROM],
    }
    for variant, moduli in sides.items():
        steps = [validated[str(q)].first for q in moduli]
        if len(steps) < 2:
            continue
        row = {**run.labels(), "step": int(validated[str(primes[0])].until), "variant": variant}
        yield {**row, "metric": PAIRS, "value": share_in_order(steps)}
        # Of answers none of which got there nothing is known; nor is there a share of step 0.
        known = 0 < min(steps) < math.inf
        yield {
            **row,
            "metric": SPREAD,
            "value": finite_or_nan(max(steps) / min(steps)) if known else math.nan,
        }
        share = sum(map(math.isfinite, steps)) / len(steps)
        yield {**row, "metric": REACHED.format(level=percent(level)), "value": share}


def share_in_order(steps: Sequence[float]) -> float:
    """Returns the share of pairs in which the second step is later; ties count half, two infinite steps not at all."""
    counted = [
        0.5 if first == second else float(first < second)
        for at, first in enumerate(steps)
        for second in steps[at + 1 :]
        if not (math.isinf(first) and math.isinf(second))
    ]
    return math.fsum(counted) / len(counted) if counted else math.nan


# ---- what people see


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and variant; where a level is not reached, the last step is shown."""
    import pandas

    level = next(metric for metric in frame["metric"] if metric.startswith("step at")).split()[2]
    title, prefix = title_and_prefix(list(frame["run"].unique()))
    rows: list[Row] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        cells = {(row["split"], row["metric"]): row for row in part.to_dict("records")}
        first: dict[Any, Any] = part.to_dict("records")[0]
        shown = {
            "train": step_text(cells, "train", STEP, level),
            "validation": step_text(cells, "validation", STEP, level),
            "good": step_text(cells, "validation", LASTING, level),
            "delay": delay_text(cells.get(("validation", STEP.format(level=level)))),
            "then": text(cells.get(("validation", THEN.format(level=level)))),
            "final": text(cells.get(("validation", FINAL))),
            "order": order_text(cells),
        }
        rows.append(
            {**first, **shown, "ref": title, "run": first["run"].removeprefix(prefix), "level": level}
        )
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    return pandas.DataFrame(rows).assign(step=steps)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see; those without an entry are left out."""
    level = rows["level"].iloc[0]
    return [
        *([Column("run", "run")] if rows["run"].nunique() > 1 else []),
        Column("accuracy", "variant"),
        Column(f"train at {level}", "train"),
        Column(f"validation at {level}", "validation"),
        Column("for good", "good"),
        Column("delay", "delay"),
        Column(f"validation when train is at {level}", "then"),
        Column("final", "final"),
        *([Column("order", "order")] if (rows["order"] != "").any() else []),
    ]


def step_text(cells: Mapping[Any, Mapping[Any, Any]], split: str, metric: str, level: str) -> str:
    """Formats a step; for several seeds with its range, and how many reach the level."""
    metric = metric.format(level=level)
    row, least, most = (cells.get((split, f"{metric}{end}")) for end in ("", ", smallest", ", largest"))
    if row is None:
        return ""
    shown = f"not by {row['step']}" if math.isnan(row["value"]) else f"{row['value']:.0f}"
    if least is None or most is None or math.isnan(least["value"]):
        return shown
    share, runs = cells[split, REACHED.format(level=level)]["value"], int(row["n_runs"])
    last = "?" if math.isnan(most["value"]) else f"{most['value']:.0f}"
    return f"{shown} ({least['value']:.0f} to {last}; {share * runs:.0f} of {runs})"


def delay_text(row: Mapping[Any, Any] | None) -> str:
    if row is None or math.isnan(row["effect"]):
        return ""
    return signed(row["effect"]) if abs(row["effect"]) < 1000 else f"{row['effect']:+.0f}"


def order_text(cells: Mapping[Any, Mapping[Any, Any]]) -> str:
    if ("validation", PAIRS) not in cells:
        return ""
    pairs, spread = cells["validation", PAIRS]["value"], cells["validation", SPREAD]["value"]
    shown = "no pair to order" if math.isnan(pairs) else f"{pairs:.0%} of pairs in order"
    return shown if math.isnan(spread) else f"{shown}, last / first {number(spread)}"


def text(row: Mapping[Any, Any] | None) -> str:
    return "" if row is None else number(row["value"])


def figures(result: Result) -> list[Figure]:
    """Returns a panel per run and split with a line for each accuracy; runs of a single answer share theirs."""
    panels = []
    for split in SPLITS:
        lines: dict[str, dict[str, Series]] = {}
        for run in result.data["runs"]:
            names = accuracies(run, split)
            several = [name for name in names if answer(name).isdecimal()]
            for name in several or names:
                title, line = (
                    (short(run.name), f"modulo {answer(name)}") if several else ("", short(run.name))
                )
                # A logarithm has no place for step 0.
                points = [pair for pair in zip(*run.points(name, split), strict=True) if pair[0] > 0]
                steps, values = ([pair[at] for pair in points] for at in (0, 1))
                lines.setdefault(title, {})[line] = Series(steps, values)
        axes: dict[str, Any] = {"y": ACCURACY, "x_axis": STEPS, "y_axis": {"range": [-0.02, 1.02]}}
        level = [{"y": result.config["level"]}]
        panels += [
            curve(series, f"{split} accuracy {title}".strip(), lines=level, height=260, **axes)
            for title, series in lines.items()
        ]
    caption = "Validation above, the batches trained on below. Steps on a logarithmic scale."
    return [Figure(draw(panels), "Accuracy of every answer over training", caption)]


def answer(name: str) -> str:
    """Returns ``11`` for ``accuracy_11``."""
    return name.rpartition("_")[2]


def short(run: str) -> str:
    """Shortens a path to ``addition/seed-3``."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
