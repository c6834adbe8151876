"""The curve of a training run: plateau beside theory, its drop, what falls in it, exact answers beside errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import final_level, plateau_steps
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import without_intervals
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Curve, Run, measures, plateau_levels, read_runs
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, subjects
from interp_tasks.measurement.table import tidy
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import plotly.graph_objects
    from typing_extensions import Unpack

#: Resamples of examples behind an interval.
RESAMPLES = 1000


@dataclass(frozen=True, repr=False)
class CurveResult(Result):
    """A :class:`Result` with the curves behind it: run -> metric -> curve."""

    curves: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)

    def plot(self, run: str | None = None) -> plotly.graph_objects.Figure:
        """Returns the curves of a run (default: the first), its drop bold, and exact accuracies at its stored steps."""
        from interp_tasks.measurement.curve_figures import run_figure

        run = next(iter(self.curves)) if run is None else run
        curves = self.curves[run]
        run_rows = self.frame[self.frame["run"] == run]
        plateau = run_rows[run_rows["variant"] == "plateau"]
        levels = dict(zip(plateau["metric"], plateau["baseline"], strict=True))
        stored = run_rows[
            (run_rows["variant"] == "stored step") & run_rows["metric"].str.startswith("accuracy")
        ]
        accuracies = {
            str(name): (part["step"].tolist(), part["value"].tolist())
            for name, part in stored.groupby("metric", sort=False)
        }
        figure = run_figure(list(curves.values()), levels, curves[self.own[run]], accuracies)
        return self.titled(figure, f"Training of {run}")

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns a figure of each run."""
        return [Figure(self.plot(run), f"Training of {run}", self.caption()) for run in self.curves]

    def caption(self) -> str:
        return "Dotted: the plateau by theory. Bold: from onset to end of the drop."


@experiment("runs", says={"stored": True})
def curve(
    runs: str | Sequence[str],
    stored: Annotated[
        bool, typer.Option("--stored/--no-stored", help="Measure stored steps, too, which takes a model.")
    ] = True,
    **options: Unpack[Options],
) -> CurveResult:
    """Put plateau, drop and final level of runs beside theory, and exact answers beside errors at stored steps.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``.
        stored: measure the metrics at stored steps, too; without it the log alone is read.
        options: samples, seed, split, device, progress of what is measured at stored steps: see :class:`Options`.

    Returns:
        A :class:`CurveResult`. By ``variant``: ``plateau`` and ``final``, the levels of every logged metric, with the
        plateau by theory as ``baseline``, and ``loss, train minus fresh``: the loss on the batch of the last update,
        after it, minus that on the validation sample, averaged over the same steps; ``drop``, what
        :func:`~interp_tasks.experiments.drops` says of the task's own metric, and the share of the fall of the loss
        that is due to each metric it is made of; ``stored step``, metrics and exact accuracies of every checkpoint on
        the same examples, with intervals by bootstrap over them; ``drop, stored steps``, the sharpness of both, read
        between stored steps, so that they are comparable, but only as sharp as these lie close.

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
    return CurveResult("curve", frame, config, notes, curves=curves, own=own_metrics)


def levels(run: Run, drop_curve: Curve, curves: Mapping[str, Curve]) -> Iterator[dict[str, Any]]:
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


def fall(run: Run, drop_curve: Curve) -> Iterator[dict[str, Any]]:
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


def at_checkpoint(run: str, subject: LoadedCheckpoint) -> Iterator[dict[str, Any]]:
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
    for name, metric in (task.metrics(output, batch) | task.accuracies(output, batch)).items():
        sums, counts = metric if isinstance(metric, tuple) else (metric, torch.ones(len(batch)))
        series, entries = (np.asarray(each.double().cpu())[None] for each in (sums, counts))
        low, high = interval(bootstrap(series, entries, subject.seed, RESAMPLES), 0.95)
        row = {
            **subject.labels,
            "run": run,
            "ref": run,
            "n": len(batch),
            "n_runs": 1,
            "variant": "stored step",
            "metric": f"{name} ({part}" if part else name,
            "value": float(ratio(series.sum(1), entries.sum(1))[0]),
            "value_ci_low": float(low[0]),
            "value_ci_high": float(high[0]),
        }
        yield row if len(batch) > 1 else without_intervals(row)


def stored_sharpness(
    run: Run, drop_curve: Curve, stored: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
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
