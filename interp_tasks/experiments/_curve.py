"""The curve of a training run: plateau beside theory, its drop, what falls in it, exact answers beside errors.

By ``variant``: ``plateau`` and ``final``, the levels of every logged metric, with the plateau by theory as
``baseline``, and ``loss, train minus fresh``: the loss on the batch of the last update, after it, minus that on the
validation sample, averaged over the same steps; ``drop``, what :func:`~interp_tasks.experiments.drops` says of the
task's own metric, and the share of the fall of the loss that is due to each metric it is made of; ``stored step``,
metrics and exact accuracies of every checkpoint on the same examples, with intervals by bootstrap over them; ``drop,
stored steps``, the sharpness of both, read between stored steps, so that they are comparable, but only as sharp as
these lie close.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import final_level, plateau_steps
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import read, without_intervals
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Curve, Run, measures, plateau_levels, read_runs
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, subjects
from interp_tasks.measurement.table import Row, numbers, tidy, value_text
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from typing_extensions import Unpack

CAPTION = "Dotted: the plateau by theory. Bold: from onset to end of the drop."
#: Resamples of examples behind an interval.
RESAMPLES = 1000
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
        options: samples, seed, split, device, progress of what is measured at stored steps: see :class:`Options`.

    Raises:
        UserError, TaskError: in one line.
    """
    examples = Examples.of(options)
    logged_runs = read_runs(runs)
    curves = {
        run.name: {name: run.curve(name) for name in run.logged() if run.points(name)[1]}
        for run in logged_runs
    }
    rows: list[dict[str, Any]] = []
    for run in logged_runs:
        drop_curve = run.curve(run.drop_metric)
        rows += levels(run, drop_curve, curves[run.name])
        rows += fall(run, drop_curve)
        if stored:
            found = f"{run.name}@all"
            measured = [
                row
                for subject in subjects(
                    found, examples, options.get("device", "cpu"), options.get("progress")
                )
                for row in at_checkpoint(run.name, subject)
            ]
            rows += [*measured, *stored_sharpness(run, drop_curve, measured)]
    import pandas

    frame = tidy(pandas.DataFrame(rows).assign(experiment="curve", intervention="none"))
    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "stored": stored,
        **examples.describe(),
        "device": options.get("device", "cpu"),
    }
    notes = (
        "Levels are medians of logged values: of the plateau those from a tenth to a half of the crossing, in the end "
        "the last tenth. Sharpness: the slope at the crossing over ln(step), of a drop from 1 to 0.",
        *(
            ["Stored steps: 95% intervals, bootstrap over examples, the same ones at every step."]
            if stored
            else []
        ),
    )
    own_metrics = {run.name: run.drop_metric for run in logged_runs}
    return Result("curve", frame, config, notes, data={"curves": curves, "own": own_metrics})


def levels(run: Run, drop_curve: Curve, curves: Mapping[str, Curve]) -> Iterator[Row]:
    """Yields the plateau and final level of every metric, with the theoretical level as baseline where known."""
    theory = plateau_levels(run)
    for variant in ("plateau", "final"):
        for name, each in curves.items():
            value = level(each.steps, each.values, drop_curve, variant)
            baseline = theory.get(name.partition(" (")[0], math.nan)
            yield {
                **run.labels(),
                "variant": variant,
                "metric": name,
                "value": value,
                "baseline": baseline,
                "effect": value - baseline,
            }
        train, fresh = (losses(run, split) for split in ("train", "validation"))
        shared = sorted(train.keys() & fresh.keys())
        if not shared:
            continue
        inside = [step for step in shared if within(step, shared, drop_curve, variant)]
        gaps = [train[step] - fresh[step] for step in inside]
        yield {
            **run.labels(),
            "variant": variant,
            "metric": "loss, train minus fresh",
            "value": sum(gaps) / len(gaps) if gaps else math.nan,
            "baseline": sum(fresh[step] for step in inside) / len(inside) if inside else math.nan,
        }


def level(steps: Sequence[int], values: Sequence[float], drop_curve: Curve, variant: str) -> float:
    """Returns the median over the plateau (NaN without a drop), or over the end."""
    import numpy as np

    if variant == "final":
        return final_level(values)
    if drop_curve.drop is None:
        return math.nan
    plateau = set(plateau_steps(drop_curve.steps, drop_curve.drop))
    inside = [value for step, value in zip(steps, values, strict=True) if step in plateau]
    return float(np.median(inside)) if inside else math.nan


def within(step: int, steps: Sequence[int], drop_curve: Curve, variant: str) -> bool:
    if variant == "final":
        return step in steps[-max(3, len(steps) // 10) :]
    return (
        drop_curve.drop is not None and drop_curve.drop.crossing / 10 <= step <= drop_curve.drop.crossing / 2
    )


def losses(run: Run, split: str) -> dict[int, float]:
    """Returns the loss by step: the weighted metrics that make it up, or the metric of that name."""
    weights = loss_shares(run) or {"loss": 1.0}
    parts = {name: dict(zip(*run.points(name, split), strict=True)) for name in weights}
    steps = set.intersection(*(set(part) for part in parts.values()))
    # Step 0 has no batch that was trained on.
    return {
        step: sum(weight * parts[name][step] for name, weight in weights.items())
        for step in steps
        if step > 0
    }


def loss_shares(run: Run) -> Mapping[str, float]:
    import tasks

    config = dict(run.config.get("task", {}))
    name = config.pop("name", None)
    return tasks.get(name, **config).loss_shares() if name in tasks.list() else {}


def fall(run: Run, drop_curve: Curve) -> Iterator[Row]:
    """Yields the size of the drop, and the share that each weighted metric has in the fall of the loss."""
    shared = {**run.labels(), "variant": "drop"}
    for quantity, value in measures(drop_curve).items():
        if quantity not in ("plateau", "final"):
            yield {**shared, "metric": quantity, "value": value}
    weights = loss_shares(run)
    parts = {}
    for name, weight in weights.items():
        steps, values = run.points(name)
        parts[name] = weight * (
            level(steps, values, drop_curve, "plateau") - level(steps, values, drop_curve, "final")
        )
    total_fall = sum(parts.values())
    for name, part in parts.items():
        yield {
            **shared,
            "metric": f"share of the fall: {name}",
            "value": part / total_fall if total_fall else math.nan,
        }


def at_checkpoint(run: str, subject: LoadedCheckpoint) -> Iterator[Row]:
    """Returns metrics and exact accuracies of one stored step, pooled, with intervals over examples."""
    import numpy as np
    import torch

    from circuits.statistics import bootstrap, interval, ratio

    task, batch = subject.task, subject.batch
    assert task is not None  # subjects() of a run have tasks: no tokens are given
    assert batch is not None
    with torch.no_grad():
        output = torch.cat([subject.model(tokens) for tokens in batch.tokens.split(256)])
    part = str(subject.labels["ref"]).rpartition(" (")[2] if str(subject.labels["ref"]).endswith(")") else ""
    labels = {
        **subject.labels,
        "run": run,
        "ref": run,
        "n": len(batch),
        "n_runs": 1,
        "variant": "stored step",
    }
    for name, metric in (task.metrics(output, batch) | task.accuracies(output, batch)).items():
        sums, counts = (each[None] for each in read(metric))
        ends = np.stack(interval(bootstrap(sums, counts, subject.seed, RESAMPLES), 0.95))[:, 0]
        value = ratio(sums.sum(1), counts.sum(1))[0]
        row = {**labels, "metric": f"{name} ({part}" if part else name, **numbers(value, ends)}
        yield row if len(batch) > 1 else without_intervals(row)


def stored_sharpness(run: Run, drop_curve: Curve, stored: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yields how sharply each metric changes between stored steps, from the last before the drop to the last of all."""
    if drop_curve.drop is None:
        return
    inside = {row["step"] for row in stored if drop_curve.drop.onset < row["step"] < drop_curve.drop.end}
    shared = {**run.labels(), "variant": "drop, stored steps"}
    yield {**shared, "metric": "steps inside the drop", "value": float(len(inside))}
    for name in dict.fromkeys(row["metric"] for row in stored):
        points = sorted((row["step"], row["value"]) for row in stored if row["metric"] == name)
        value = between_points(points, drop_curve.drop.onset)
        yield {**shared, "metric": f"sharpness of {name}", "value": value}


def between_points(points: Sequence[tuple[int, float]], onset: int) -> float:
    """Returns the sharpness of a curve through a few points, straight between them; NaN if none is before the onset."""
    before = [index for index, (step, _) in enumerate(points) if step <= onset]
    if not before or before[-1] == len(points) - 1:
        return math.nan
    rest = points[before[-1] :]
    first, last = rest[0][1], rest[-1][1]
    if first == last:
        return math.nan

    def reached(share: float) -> float:
        target = first + share * (last - first)
        for (left, low), (right, high) in pairwise(rest):
            if (high - target) * (last - first) >= 0 and high != low:
                return left + (right - left) * (target - low) / (high - low)
        return math.nan

    return 0.4 * reached(0.5) / (reached(0.7) - reached(0.3))


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Drops the rows that the figure shows better: errors at stored steps."""
    stored = frame["variant"] == "stored step"
    rows = frame[~stored | frame["metric"].str.startswith("accuracy")]
    of_step = rows["variant"] == "stored step"
    variant = rows["variant"].mask(of_step, "step " + rows["step"].astype(str))
    return rows.assign(variant=variant).reset_index(drop=True)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    return [
        Column("of", "variant"),
        Column("what", "metric"),
        Column("value [95% CI]", "value", _value),
        Column("by theory", "baseline", lambda row: _theory(row, number(row["baseline"]))),
        Column("value / theory", "effect", lambda row: _theory(row, _ratio(row))),
    ]


def _value(row: Mapping[str, Any]) -> str:
    if row["metric"] == "drop":
        return "yes" if row["value"] else "no"
    if row["metric"] in STEPS and row["value"] == row["value"]:
        return f"{row['value']:.0f}"
    return value_text(row)


def _theory(row: Mapping[str, Any], text: str) -> str:
    known = row["variant"] in ("plateau", "final") and row["effect"] == row["effect"]
    return text if known else ""


def _ratio(row: Mapping[str, Any]) -> str:
    return number(row["value"] / row["baseline"]) if row["baseline"] else "–"


def run_curves(result: Result, run: str) -> plotly.graph_objects.Figure:
    from interp_tasks.measurement.curve_figures import run_figure

    curves, rows = result.data["curves"][run], result.frame[result.frame["run"] == run]
    plateau = rows[rows["variant"] == "plateau"]
    levels = dict(zip(plateau["metric"], plateau["baseline"], strict=True))
    stored = rows[(rows["variant"] == "stored step") & rows["metric"].str.startswith("accuracy")]
    accuracies = {
        str(name): (part["step"].tolist(), part["value"].tolist())
        for name, part in stored.groupby("metric", sort=False)
    }
    return run_figure(list(curves.values()), levels, curves[result.data["own"][run]], accuracies)


def figures(result: Result) -> list[Figure]:
    """Returns the curves of each run, its drop bold, and exact accuracies at its stored steps."""
    return [Figure(run_curves(result, run), f"Training of {run}", CAPTION) for run in result.data["curves"]]
