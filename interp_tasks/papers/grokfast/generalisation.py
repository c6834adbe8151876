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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, heat
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.intervals import interval_over_runs, share_interval
from interp_tasks.measurement.options import check_level
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, family, read_runs, shared_folder
from interp_tasks.measurement.table import Row, tidy
from interp_tasks.pages import Column, Figure, number, signed
from interp_tasks.papers.grokfast.reaches import (
    ACCURACY,
    FINAL,
    LEVEL,
    PAIRS,
    SPLITS,
    SPREAD,
    THEN,
    median,
    named,
    order_rows,
    reach_rows,
    reaches_of,
)

if TYPE_CHECKING:
    import pandas

#: The note where there are several seeds.
SEVERAL = "Of several seeds: the median; a run that does not get there is later than all others."
#: More answers than this, or more than one run with several answers, are a map.
MAX_LINES = 7
#: Steps are on a logarithmic axis.
STEPS = {"type": "log", "dtick": 1, "exponentformat": "none"}
LEVEL_OPTION = typer.Option("--level", help="Of an accuracy, above 0, at most 1.")


@experiment("modular", says={"level": LEVEL})
def generalisation(runs: str | Sequence[str], level: Annotated[float, LEVEL_OPTION] = LEVEL) -> Result:
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
    groups: dict[str, list[str]] = {}
    for run in logged_runs:
        groups.setdefault(family(run.name) or run.name, []).append(run.name)
    several = {name: group for name, group in groups.items() if len(group) > 1}
    rows += [row for name, group in several.items() for row in pooled(name, group, rows)]
    frame = tidy(pandas.DataFrame(rows).assign(experiment="generalisation", intervention="none"))
    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "level": level,
    }
    notes = (
        "Step: where the accuracy first is at the level, interpolated between logged steps; for good: after it the "
        "accuracy is never below again. Validation is a fixed sample, train the batch of the step.",
        "Delay: steps from train to validation.",
        *([SEVERAL] if several else []),
    )
    return Result("generalisation", frame, config, notes, data={"runs": logged_runs})


def pooled(name: str, group: Sequence[str], rows: Sequence[Row]) -> Iterator[Row]:
    """Yields rows that pool several seeds: medians, ranges and intervals."""
    import numpy as np

    from interp_tasks.measurement.crossings import finite_or_nan

    group_rows = [row for row in rows if row["run"] in group]
    for key in dict.fromkeys((row["split"], row["variant"], row["metric"]) for row in group_rows):
        same = [row for row in group_rows if (row["split"], row["variant"], row["metric"]) == key]
        values = np.array([row["value"] for row in same])
        if key[2].startswith("step at"):
            values = np.where(np.isnan(values), np.inf, values)
        values = values[~np.isnan(values)]
        shared = {**same[0], "run": name, "ref": name, "seed": None, "n_runs": len(values)}
        shared |= {"step": max(row["step"] for row in same)}
        for column in ("baseline", "effect"):
            shared.pop(column, None)
        share = key[2].startswith("reached")
        if not len(values):
            yield {**shared, "value": math.nan}
            continue
        middle = values.mean() if share else median(values)
        low, high = (share_interval if share else interval_over_runs)(values.tolist())
        yield {**shared, "value": finite_or_nan(float(middle)), "value_ci_low": low, "value_ci_high": high}
        if not share:
            for word, extreme in (("smallest", values.min()), ("largest", values.max())):
                yield {**shared, "metric": f"{key[2]}, {word}", "value": finite_or_nan(extreme)}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and variant; where a level is not reached, the last step is shown."""
    import pandas

    level = next(metric for metric in frame["metric"] if metric.startswith("step at")).split()[2]
    rows: list[Row] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        cells = {(row["split"], row["metric"]): row for row in part.to_dict("records")}
        first: dict[Any, Any] = part.to_dict("records")[0]
        train, valid = (cells.get((split, f"step at {level}")) for split in ("train", "validation"))
        shown = {
            "train": step_text(train, cells, "train", level),
            "validation": step_text(valid, cells, "validation", level),
            "good": step_text(
                cells.get(("validation", f"step at {level} for good")), cells, "validation", level
            ),
            "delay": "" if valid is None else delay_text(valid),
            "then": text(cells.get(("validation", THEN.format(level=level)))),
            "final": text(cells.get(("validation", FINAL))),
        }
        shown["order"] = order_text(cells) if ("validation", PAIRS) in cells else ""
        rows.append({**first, **shown})
    table = pandas.DataFrame(rows)
    names = list(table["run"].unique())
    folder = shared_folder(names) if len(names) > 1 else ""
    run = table["run"].str.removeprefix(f"{folder}/") if folder else table["run"]
    count = sum("*" not in name for name in names)
    title = names[0] if len(names) == 1 else f"{count} runs{' of ' + folder if folder else ''}"
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    return table.assign(ref=title, run=run, step=steps, level=level)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see; those without an entry are left out."""
    level = rows["level"].iloc[0]
    columns = [Column("run", "run")] if rows["run"].nunique() > 1 else []
    columns += [
        Column("accuracy", "variant"),
        Column(f"train at {level}", "train"),
        Column(f"validation at {level}", "validation"),
        Column("for good", "good"),
        Column("delay", "delay"),
        Column(f"validation when train is at {level}", "then"),
        Column("final", "final"),
    ]
    if (rows["order"] != "").any():
        columns.append(Column("order", "order"))
    return columns


def step_text(
    row: Mapping[Any, Any] | None, cells: Mapping[Any, Mapping[Any, Any]], split: str, level: str
) -> str:
    """Formats a step; for several seeds with its range, and how many reach the level."""
    if row is None:
        return ""
    value = row["value"]
    shown = f"not by {row['step']}" if math.isnan(value) else f"{value:.0f}"
    several = cells.get((split, f"{row['metric']}, smallest"))
    if several is None:
        return shown
    low, high = several["value"], cells[split, f"{row['metric']}, largest"]["value"]
    if math.isnan(low):
        return shown
    share, runs = cells[split, f"reached {level}"]["value"], int(row["n_runs"])
    ends = f"{low:.0f} to {'?' if math.isnan(high) else format(high, '.0f')}"
    return f"{shown} ({ends}; {share * runs:.0f} of {runs})"


def delay_text(row: Mapping[Any, Any]) -> str:
    effect = row["effect"]
    if effect is None or math.isnan(effect):
        return ""
    return signed(effect) if abs(effect) < 1000 else f"{effect:+.0f}"


def order_text(cells: Mapping[Any, Mapping[Any, Any]]) -> str:
    pairs, spread = cells["validation", PAIRS]["value"], cells["validation", SPREAD]["value"]
    shown = "no pair to order" if math.isnan(pairs) else f"{pairs:.0%} of pairs in order"
    return shown if math.isnan(spread) else f"{shown}, last / first {number(spread)}"


def text(row: Mapping[Any, Any] | None) -> str:
    return "" if row is None else number(row["value"])


def figures(result: Result) -> list[Figure]:
    """Returns accuracies: runs of a single answer in one panel, each run of several in its own; all that per split."""
    level: float = result.config["level"]
    panels = []
    for split in SPLITS:
        names = [(run, named(run, ACCURACY, split)) for run in result.data["runs"]]
        single = [(run, of[0]) for run, of in names if len(of) == 1]
        if single:
            panels.append(lines_panel(single, split, level))
        for run, of in names:
            answers = [name for name in of if answer(name).isdecimal()]
            if len(answers) > MAX_LINES:
                panels.append(map_panel(run, answers, split))
            elif answers:
                panels.append(lines_panel([(run, name) for name in answers], split, level))
    caption = "Validation above, the batches trained on below. Steps on a logarithmic scale."
    return [Figure(draw(panels), "Accuracy of every answer over training", caption)]


def points(run: Run, name: str, split: str) -> tuple[list[int], list[float]]:
    """Returns logged steps and values; a logarithm has no place for step 0."""
    pairs = [pair for pair in zip(*run.points(name, split), strict=True) if pair[0] > 0]
    return [step for step, _ in pairs], [value for _, value in pairs]


def lines_panel(lines: Sequence[tuple[Run, str]], split: str, level: float) -> Panel:
    """Returns a panel with a line for each (run, accuracy)."""
    runs = {run.name for run, _ in lines}
    series = {}
    for run, name in lines:
        called = f"modulo {answer(name)}" if len(runs) == 1 and len(lines) > 1 else short(run.name)
        series[called] = Series(*points(run, name, split))
    title = f"{split} accuracy" + (f", {short(lines[0][0].name)}" if len(runs) == 1 else "")
    axes: dict[str, Any] = {"y": ACCURACY, "x_axis": STEPS, "y_axis": {"range": [-0.02, 1.02]}}
    return curve(series, title, lines=[{"y": level}], height=260, **axes)


def map_panel(run: Run, names: Sequence[str], split: str) -> Panel:
    """Returns a map with a row per answer, smallest modulus on top; colours are values, from chance to right."""
    import pandas

    columns = {answer(name): dict(zip(*points(run, name, split), strict=True)) for name in names}
    table = pandas.DataFrame(columns).sort_index().T
    title = f"{split} accuracy, {short(run.name)}"
    drawn = heat(table, title, unit=ACCURACY, across="step", down="prime", end=1.0, row=17)
    trace = {**drawn.traces[0], "x": table.columns.tolist(), "xgap": 0, "ygap": 0}
    axis = {key: value for key, value in drawn.x.items() if key != "type"} | STEPS
    return Panel([trace], drawn.title, axis, drawn.y, drawn.height, drawn.width, bar=True)


def answer(name: str) -> str:
    return name.rpartition("_")[2]


def short(run: str) -> str:
    """Shortens a path to ``addition/seed-3``."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
