"""The curve of a training run: plateau beside theory, its drop, what falls in it, exact answers beside errors.

By ``variant``: ``plateau`` and ``final``, the levels of every logged metric, with the plateau by theory as
``baseline``; ``drop``, what :func:`~interp_tasks.experiments.drops` says of the task's own metric, and the share of the
fall of the loss that is due to each metric it is made of; ``stored step``, metrics and exact accuracies of every
checkpoint on the same examples, with intervals by bootstrap over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import final_level, plateau_steps
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import paired
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Curve, Run, declared, measures, read_runs
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, subjects
from interp_tasks.measurement.table import Row, tidy, value_text
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

CAPTION = "Dotted: the plateau by theory. Bold: from onset to end of the drop."
STEPS = ("onset", "crossing", "end", "length")
STORED = typer.Option("--stored/--no-stored", help="Measure stored steps, too, which takes a model.")


@experiment("runs", says={"stored": True})
def curve(
    runs: str | Sequence[str], stored: Annotated[bool, STORED] = True, **options: Unpack[Options]
) -> Result:
    """Put plateau, drop and final level of runs beside theory, and exact answers beside errors at stored steps.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``.
        stored: measure the metrics at stored steps, too; without it the log alone is read.
        options: samples, seed, split, device, progress of what is measured at stored steps: see :class:`Examples`.

    Raises:
        UserError, TaskError: in one line.
    """
    import pandas

    examples = Examples.of(options)
    logged_runs = read_runs(runs)
    curves: dict[str, dict[str, Curve]] = {}
    rows: list[Row] = []
    for run in logged_runs:
        own = run.curve(run.drop_metric)
        others = {name: Curve(name, *run.finite(name), None) for name in run.logged()}
        # The task's own metric comes first, and has the first colour, as in the report.
        curves[run.name] = {own.metric: own} | {
            name: one for name, one in others.items() if len(one.values) and name != own.metric
        }
        rows += levels(run, curves[run.name], own)
        rows += fall(run, own)
        for subject in subjects(f"{run.name}@all", examples) if stored else ():
            rows += at_checkpoint(run.name, subject)
    config = {"runs": [run.name for run in logged_runs], "stored": stored, **examples.describe()}
    notes = [
        "Levels are medians of logged values: of the plateau those from a tenth to a half of the crossing, in the end "
        "the last tenth. Sharpness: the slope at the crossing over ln(step), of a drop from 1 to 0."
    ]
    if stored:
        notes.append("Stored steps: 95% intervals, bootstrap over examples, the same ones at every step.")
    frame = tidy(pandas.DataFrame(rows).assign(experiment="curve", intervention="none"))
    return Result("curve", frame, config, tuple(notes), data={"curves": curves})


def levels(run: Run, curves: Mapping[str, Curve], own: Curve) -> Iterator[Row]:
    """Yields the plateau and final level of every metric, with the theoretical level as baseline where known."""
    theory = declared(run, "plateau_levels")
    for variant in ("plateau", "final"):
        for name, each in curves.items():
            value, baseline = level(each, own, variant), theory.get(name.partition(" (")[0], math.nan)
            row = {**run.labels(), "variant": variant, "metric": name, "value": value}
            yield row | {"baseline": baseline, "effect": value - baseline}


def level(one: Curve, own: Curve, variant: str) -> float:
    """Returns the median of a curve over the plateau of the task's own metric (NaN without a drop), or over the end."""
    import numpy as np

    if variant == "final":
        return final_level(one.values) if len(one.values) else math.nan
    if own.drop is None:
        return math.nan
    inside = one.values[np.isin(one.steps, plateau_steps(own.steps, own.drop))]
    return float(np.median(inside)) if len(inside) else math.nan


def fall(run: Run, own: Curve) -> Iterator[Row]:
    """Yields the size of the drop, and the share that each weighted metric has in the fall of the loss."""
    shared = {**run.labels(), "variant": "drop"}
    for quantity, value in measures(own).items():
        if quantity not in ("plateau", "final"):
            yield {**shared, "metric": quantity, "value": value}
    parts = {}
    for name, weight in declared(run, "loss_shares").items():
        one = Curve(name, *run.finite(name), None)
        parts[name] = weight * (level(one, own, "plateau") - level(one, own, "final"))
    whole = sum(parts.values())
    for name, part in parts.items():
        share = part / whole if whole else math.nan
        yield {**shared, "metric": f"share of the fall: {name}", "value": share}


def at_checkpoint(run: str, subject: LoadedCheckpoint) -> Iterator[Row]:
    """Yields metrics and exact accuracies of one stored step, pooled, with intervals over examples."""
    import torch

    task, batch = subject.task, subject.batch
    assert task is not None  # subjects() of a run have tasks: no tokens are given
    assert batch is not None
    with torch.no_grad():
        output = torch.cat([subject.model(tokens) for tokens in batch.tokens.split(256)])
    part = str(subject.labels["ref"]).removeprefix(subject.stored.label)
    labels = {**subject.labels, "run": run, "ref": run, "n_runs": 1, "variant": "stored step"}
    for row in paired(task.metrics(output, batch) | task.accuracies(output, batch), None, subject.seed):
        yield {**labels, **row, "metric": f"{row['metric']}{part}"}


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Drops the rows that the figure shows better: errors at stored steps."""
    stored = frame["variant"] == "stored step"
    rows = frame[~stored | frame["metric"].str.startswith("accuracy")]
    variant = rows["variant"].mask(rows["variant"] == "stored step", "step " + rows["step"].astype(str))
    return rows.assign(variant=variant).reset_index(drop=True)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: each level beside theory, and their ratio."""

    def value(row: Mapping[str, Any]) -> str:
        if row["metric"] == "drop":
            return "yes" if row["value"] else "no"
        is_step = row["metric"] in STEPS and row["value"] == row["value"]
        return f"{row['value']:.0f}" if is_step else value_text(row)

    def by_theory(row: Mapping[str, Any]) -> str:
        return number(row["baseline"]) if row["effect"] == row["effect"] else ""

    def ratio(row: Mapping[str, Any]) -> str:
        if row["effect"] != row["effect"]:
            return ""
        return number(row["value"] / row["baseline"]) if row["baseline"] else "–"

    return [
        Column("of", "variant"),
        Column("what", "metric"),
        Column("value [95% CI]", "value", value),
        Column("by theory", "baseline", by_theory),
        Column("value / theory", "effect", ratio),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns the curves of each run, its drop bold, and exact accuracies at its stored steps below."""
    from circuits.figures.layout import draw
    from circuits.figures.panels import curve as lines
    from circuits.figures.panels import of_rows
    from interp_tasks.measurement.figure import curves_panel

    drawn = []
    for run, curves in result.data["curves"].items():
        rows = result.frame[result.frame["run"] == run]
        plateau = rows[rows["variant"] == "plateau"]
        by_theory = dict(zip(plateau["metric"], plateau["baseline"], strict=True))
        panels = [curves_panel(curves, "validation metric", by_theory)]
        stored = rows[(rows["variant"] == "stored step") & rows["metric"].str.startswith("accuracy")]
        if len(stored):
            groups = stored.groupby("metric", sort=False)
            series = {f"{name}, stored steps": of_rows(part, "step") for name, part in groups}
            panels.append(lines(series, y="accuracy", y_axis={"rangemode": "tozero"}))
        drawn.append(Figure(draw(panels), f"Training of {run}", CAPTION))
    return drawn
