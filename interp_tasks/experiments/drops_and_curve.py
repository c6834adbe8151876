"""Logs of training runs: when and how abruptly they drop, and their curves beside theory.

Of :func:`drops` the ``variant`` is the metric whose curve it is, the ``metric`` what is said of it: ``drop`` (1 or 0;
of several runs the share), ``onset``, ``crossing``, ``end``, ``length`` (steps), ``sharpness`` (see
:class:`~interp_tasks.checkpoints.Drop`), ``plateau``, ``final``. A run without a drop has no values but ``drop`` and
``final``. Where the task knows the plateau by theory, that is the ``baseline`` of the levels, and ``plateau until``
is the first step lastingly below nine tenths of it, the last step of a run that never is: ``plateau left`` is 0 of
that (else 1; of several runs the share), and its step a lower bound. Rows of several runs have the median, ``ONSET,
smallest`` and ``ONSET, largest``, and from three runs on intervals: Student's t over runs; of a share the exact
binomial one; of a rank correlation Fisher's z.

Of :func:`curve`, by ``variant``: ``plateau`` and ``final``, the levels of every logged metric, with the plateau by
theory as ``baseline``; ``drop``, what :func:`drops` says of the task's own metric, and the share of the fall of the
loss that is due to each metric it is made of; ``stored step``, metrics and exact accuracies of every checkpoint on the
same examples, with intervals by bootstrap over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop_detection import final_level, first_index_lastingly_below, plateau_steps
from interp_tasks.checkpoints.run_reader import stored_steps
from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import bootstrap_rows, rank_correlation_interval
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint, subjects
from interp_tasks.measurement.logged_runs import (
    Curve,
    LoggedRun,
    curves_panel,
    declared_by_run,
    median_rows_over_seeds,
    read_runs,
    setting_in_config,
    title_and_prefix,
)
from interp_tasks.measurement.option_parsing import as_list
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, Row, experiment, number_columns, tidy_frame
from interp_tasks.pages import Column, Figure, number, with_interval

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

#: Curves without a drop of which the reason is told.
MOST_REASONS = 3
RULE = (
    "Onset, crossing, end: the last step before 10%, the first after 50% and after 90% of the way from plateau to "
    "final level, the median of the last tenth logged. Sharpness: the slope at the crossing over ln(step), of a drop "
    "from 1 to 0."
)
RANK_CORRELATION = (
    "Rank correlation: Spearman's, over the runs that have the number; a 95% interval (Fisher's z) needs four, and an "
    "order that is not perfect."
)
UNTIL, LEFT = "plateau until", "plateau left"
#: The columns of the table; those of steps first.
STEPS, LEVELS = ("onset", "crossing", "end"), ("sharpness", "plateau", "final")
CORRELATION, AGAINST = "rank correlation of ", "against "
METRIC = typer.Option("--metric", metavar="NAME", help="Logged validation metric.", show_default="the task's")
AGAINST_OPTION = typer.Option(
    "--against", metavar="KEY", help="Rank correlations with a setting, as in model.d_model. Repeatable."
)
CAPTION = "Dotted: the plateau by theory. Bold: from onset to end of the drop."
LEVELS_NOTE = (
    "Levels are medians of logged values: of the plateau those from a tenth to a half of the crossing, in the end "
    "the last tenth; baseline: the plateau by theory. Sharpness: the slope at the crossing over ln(step), of a drop "
    "from 1 to 0."
)
STORED_STEPS = "Stored steps: 95% intervals, bootstrap over examples, the same ones at every step."
STORED = typer.Option("--stored/--no-stored", help="Measure stored steps, too, which takes a model.")


@experiment(says={"metric": None})
def drops(
    runs: str | Sequence[str],
    metric: Annotated[str | None, METRIC] = None,
    against: Annotated[str | Sequence[str], AGAINST_OPTION, list[str]] = (),
) -> Result:
    """Say whether each run drops, when, how sharply, from what level to what level.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; of ``RUN/seed-0``, ``RUN/seed-1``, ... a row more says the
            median.
        metric: a logged validation metric; default: the one whose drop the task declares, and that of every part of a
            mixture.
        against: settings, such as ``model.d_model``: the rank correlation of everything with each of them, over the
            runs that differ in nothing else but their seed.
    """
    keys = as_list(against)
    for key in keys:
        section, _, name = key.partition(".")
        if section not in ("task", "model", "train") or not name:
            raise UserError(f"--against {key!r}: a setting such as model.d_model or train.learning_rate")
    logged_runs = read_runs(runs)
    curves = {
        (run.name, name): run.validation_curve(name)
        for run in logged_runs
        for name in ((metric,) if metric is not None else run.drop_metric_and_parts())
    }
    rows = [row for run in logged_runs for row in run_drop_rows(run, curves)]
    rows += median_rows_over_seeds(logged_runs, rows, lambda metric: metric in ("drop", LEFT), baselines=True)
    for key in keys:
        rows += rank_correlation_rows(logged_runs, rows, key)
    frame = tidy_frame(rows, experiment="drops", intervention="none")
    config = {"runs": [run.name for run in logged_runs], "metric": metric, "against": keys}
    without = [(names, one.why_none) for names, one in curves.items() if one.drop is None]
    notes = [f"No drop in {name} of {run}: {why}." for (run, name), why in without[:MOST_REASONS]]
    if len(without) > MOST_REASONS:
        notes.append(f"No drop in {len(without) - MOST_REASONS} more: --ckpt of each alone says why.")
    notes += [RULE, *([RANK_CORRELATION] if keys else [])]
    if frame["metric"].eq(LEFT).any():
        notes.append("Plateau until: the first step lastingly below nine tenths of the plateau by theory.")
    if frame["run"].str.contains("*", regex=False).any():
        notes.append("Of several seeds: median, and smallest to largest; of steps, over those that drop.")
    return Result("drops", frame, config, tuple(notes), data={"curves": curves})


def run_drop_rows(run: LoggedRun, curves: Mapping[tuple[str, str], Curve]) -> Iterator[Row]:
    """Yields what is said of the curves of one run."""
    theory = declared_by_run(run, "plateau_levels")
    for metric in (metric for name, metric in curves if name == run.name):
        curve, level = curves[run.name, metric], theory.get(metric.partition(" (")[0], math.nan)
        quantities = curve.drop_quantities()
        if level > 0:
            step, has_left = plateau_end_and_has_left(curve.steps, curve.values, level)
            quantities |= {UNTIL: float(step), LEFT: float(has_left)}
        for name, value in quantities.items():
            row = {**run.label_columns(), "variant": metric, "metric": name}
            yield row | number_columns(value, baseline=level if name in ("plateau", "final") else None)


def plateau_end_and_has_left(steps: Any, values: Any, level: float) -> tuple[int, bool]:
    """Returns the first step after which a metric stays below 0.9 of a level, the last step if it never does; and
    whether it does.

    Unlike an onset it is there without a drop: early where there is no plateau, and late where it lasts.
    """
    index = first_index_lastingly_below(values, 0.9 * level)
    return steps[-1 if index is None else index], index is not None


def rank_correlation_rows(logged_runs: Sequence[LoggedRun], rows: Sequence[Row], key: str) -> Iterator[Row]:
    """Yields the rank correlation of every quantity with a setting, per set of runs that differ in it alone."""
    import numpy as np
    import pandas as pd

    groups: dict[str, dict[str, float]] = {}
    for run in logged_runs:
        value = setting_in_config(run.config, key)
        if type(value) in (int, float):
            groups.setdefault(repr(without_setting_and_seed(run.config, key)), {})[run.name] = float(value)
    chosen = [group for group in groups.values() if len(set(group.values())) >= 3]
    if not chosen:
        raise UserError(
            f"--against {key}: no three of the runs have different numbers there and differ in nothing else but the "
            "seed"
        )
    for group in chosen:
        same: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row["run"] in group:
                same.setdefault((row["variant"], row["metric"]), []).append(row)
        for (variant, quantity), of_runs in same.items():
            pairs = np.array([(group[row["run"]], row["value"]) for row in of_runs])
            pairs = pairs[~np.isnan(pairs[:, 1])]
            correlation = pd.DataFrame(pairs).corr("spearman", min_periods=3).iloc[0, 1]
            about = {name: of_runs[0][name] for name in ("split", "step", "n")} | {"n_runs": len(pairs)}
            about |= {"run": AGAINST + key, "ref": AGAINST + key, "variant": variant}
            interval = rank_correlation_interval(correlation, len(pairs))
            yield {**about, "metric": CORRELATION + quantity, **number_columns(correlation, interval)}


def without_setting_and_seed(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns a config without one setting, the seed, and how it was logged, stored and computed."""
    ignored = {
        key,
        *("train.seed", "train.threads", "train.log_every", "train.eval_samples"),
        *("train.checkpoint_every", "train.checkpoint_at", "train.deterministic"),
    }
    # A setting that is newer than some of the runs was off in them.
    return {
        section: {
            name: value
            for name, value in sorted(values.items())
            if f"{section}.{name}" not in ignored and value not in (None, [], 0, False)
        }
        for section, values in sorted(config.items())
    }


def drops_view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row of texts per run and metric, and below them the rows about several runs, in one block."""
    import pandas

    # What all names begin with is said once, above the table.
    title, prefix = title_and_prefix([run for run in frame["run"].unique() if not run.startswith(AGAINST)])
    rows: list[dict[str, Any]] = []
    for (run, _), part in frame.groupby(["run", "variant"], sort=False):
        by_metric = {row["metric"].removeprefix(CORRELATION): row for row in part.to_dict("records")}
        texts = {name: format_drop_quantity(by_metric, name) for name in ("drop", *STEPS, *LEVELS, UNTIL)}
        first: dict[Any, Any] = part.to_dict("records")[0]
        rows.append({**first, **texts, "ref": title, "run": str(run).removeprefix(prefix)})
    ends = {name: dict.fromkeys([frame[name].min(), frame[name].max()]) for name in ("step", "seed")}
    spans = {name: " to ".join(map(str, both)) for name, both in ends.items()}
    return pandas.DataFrame(rows).assign(**(spans if frame["seed"].notna().any() else spans | {"seed": "–"}))


def format_drop_quantity(by_metric: Mapping[str, Mapping[Any, Any]], name: str) -> str:
    """Returns what people read of a quantity: of several seeds with the range, of a correlation with its interval."""
    row = by_metric.get(name, {"metric": name, "value": math.nan})
    value = row["value"]
    if value != value:
        return "" if name == "drop" else "–"
    if row["metric"].startswith(CORRELATION):
        return with_interval(number(value), row["value_ci_low"], row["value_ci_high"])
    if name == "drop":
        return f"{value:.0%} of runs" if "*" in row["run"] else "yes" if value else "no"
    if name == UNTIL and by_metric[LEFT]["value"] == 0:
        return "never left"
    ends = [by_metric[end]["value"] for end in (f"{name}, smallest", f"{name}, largest") if end in by_metric]
    if name in LEVELS:
        return with_interval(number(value), *ends) if ends else number(value)
    # A step may lie between two; just before the first one is 0, not "-0".
    first, *others = (f"{step:.0f}".removeprefix("-") for step in (value, *ends))
    return first + (f" [{', '.join(others)}]" if others else "")


def drops_view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns of the table; those of the metric and of theory only where there is something to tell."""
    metric = [Column("metric", "variant")] if rows["variant"].nunique() > 1 else []
    until = [UNTIL] if (rows[UNTIL] != "–").any() else []
    shown = [Column(name, name) for name in ("drop", *STEPS, *LEVELS, *until)]
    return [Column("run", "run"), *metric, *shown]


def drops_figures(result: Result) -> list[Figure]:
    """Returns every curve; its drop, from onset to end, is drawn bold."""
    from circuits.figures.panel_grid import draw_panels

    curves: Mapping[tuple[str, str], Curve] = result.data["curves"]
    title, prefix = title_and_prefix([*dict.fromkeys(run for run, _ in curves)])
    metrics = list(dict.fromkeys(metric for _, metric in curves))
    ends = {metric: f", {metric}" if len(metrics) > 1 else "" for metric in metrics}
    named = {run.removeprefix(prefix) + ends[metric]: one for (run, metric), one in curves.items()}
    panel = curves_panel(named, metrics[0].partition(" (")[0], title=title if prefix else "")
    caption = "Bold: from onset to end of the drop. A curve without a bold part has none."
    return [Figure(draw_panels([panel]), "Logged metric of every run", caption)]


@experiment(says={"stored": True}, without=("split", "task", "task_config", "tokens", "prompts"))
def curve(
    runs: str | Sequence[str], stored: Annotated[bool, STORED] = True, **options: Unpack[Options]
) -> Result:
    """Put plateau, drop and final level of runs beside theory, and exact answers beside errors at stored steps.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``.
        stored: measure the metrics at stored steps, too; without it the log alone is read.
        options: samples, seed, device, progress of what is measured at stored steps: see :class:`Examples`.
    """

    examples, logged_runs = Examples.of(options), read_runs(runs)
    measured = {run.name for run in logged_runs if stored and stored_steps(run.path)}
    curves: dict[str, dict[str, Curve]] = {}
    rows: list[Row] = []
    for run in logged_runs:
        own = run.validation_curve(run.drop_metric)
        others = {
            name: Curve(name, *run.finite_values(name), None)
            for name in run.logged_metrics()
            if name != own.metric
        }
        # The task's own metric comes first, and has the first colour, as in the report.
        curves[run.name] = {own.metric: own} | {name: one for name, one in others.items() if len(one.values)}
        rows += plateau_and_final_rows(run, curves[run.name], own)
        rows += drop_and_loss_share_rows(run, own)
        for subject in subjects(f"{run.name}@all", examples) if run.name in measured else ():
            rows += checkpoint_metric_rows(run.name, subject)
    config = {"runs": [run.name for run in logged_runs], "stored": stored, **examples.describe()}
    frame = tidy_frame(rows, experiment="curve", intervention="none")
    notes = [LEVELS_NOTE, *([STORED_STEPS] if measured else [])]
    if stored and len(measured) < len(logged_runs):
        notes.append("Of runs that store no checkpoints the log alone is read.")
    return Result("curve", frame, config, tuple(notes), data={"curves": curves})


def plateau_and_final_rows(run: LoggedRun, curves: Mapping[str, Curve], own: Curve) -> Iterator[Row]:
    """Yields the plateau and final level of every metric, with the theoretical level as baseline where known."""
    theory = declared_by_run(run, "plateau_levels")
    for variant in ("plateau", "final"):
        for name, each in curves.items():
            row = {**run.label_columns(), "variant": variant, "metric": name}
            known = theory.get(name.partition(" (")[0], math.nan)
            yield row | number_columns(plateau_or_final_level(each, own, variant), baseline=known)


def plateau_or_final_level(one: Curve, own: Curve, variant: str) -> float:
    """Returns the median of a curve over the plateau of the task's own metric (NaN without a drop), or over the end."""
    import numpy as np

    if not len(one.values) or (variant == "plateau" and own.drop is None):
        return math.nan
    if own.drop is None or variant == "final":
        return final_level(one.values)
    inside = one.values[np.isin(one.steps, plateau_steps(own.steps, own.drop))]
    return float(np.median(inside)) if len(inside) else math.nan


def drop_and_loss_share_rows(run: LoggedRun, own: Curve) -> Iterator[Row]:
    """Yields the size of the drop, and the share that each weighted metric has in the fall of the loss."""
    said = {name: value for name, value in own.drop_quantities().items() if name not in ("plateau", "final")}
    parts = {}
    for name, weight in declared_by_run(run, "loss_shares").items():
        one = Curve(name, *run.finite_values(name), None)
        parts[name] = weight * (
            plateau_or_final_level(one, own, "plateau") - plateau_or_final_level(one, own, "final")
        )
    whole = sum(parts.values()) or math.nan
    said |= {f"share of the fall: {name}": part / whole for name, part in parts.items()}
    for name, value in said.items():
        yield {**run.label_columns(), "variant": "drop", "metric": name, "value": value}


def checkpoint_metric_rows(run: str, subject: LoadedCheckpoint) -> Iterator[Row]:
    """Yields metrics and exact accuracies of one stored step, pooled, with intervals over examples."""
    import torch

    task, batch = subject.task, subject.batch
    assert task is not None  # subjects() of a run have tasks: no tokens are given
    assert batch is not None
    with torch.no_grad():
        output = torch.cat([subject.model(tokens) for tokens in batch.tokens.split(256)])
    part = str(subject.labels["ref"]).removeprefix(subject.stored.label)
    labels = {**subject.labels, "run": run, "ref": run, "n_runs": 1, "variant": "stored step"}
    metrics = task.metrics(output, batch) | task.accuracies(output, batch)
    for row in bootstrap_rows(metrics, None, subject.seed):
        yield {**labels, **row, "metric": f"{row['metric']}{part}"}


def curve_view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Drops the rows that the figure shows better: errors at stored steps."""
    stored = frame["variant"] == "stored step"
    variant = frame["variant"].mask(stored, "step " + frame["step"].astype(str))
    shown = ~stored | frame["metric"].str.startswith("accuracy")
    return frame.assign(variant=variant)[shown].reset_index(drop=True)


def curve_figures(result: Result) -> list[Figure]:
    """Returns the curves of each run, its drop bold, and exact accuracies at its stored steps below."""
    from circuits.figures.panel_grid import draw_panels
    from circuits.figures.panel_kinds import curve as lines
    from circuits.figures.panel_kinds import rows_to_one_series

    drawn = []
    for run, curves in result.data["curves"].items():
        rows = result.frame[result.frame["run"] == run]
        plateau = rows[rows["variant"] == "plateau"]
        by_theory = dict(zip(plateau["metric"], plateau["baseline"], strict=True))
        panels = [curves_panel(curves, "validation metric", by_theory)]
        stored = rows[(rows["variant"] == "stored step") & rows["metric"].str.startswith("accuracy")]
        if len(stored):
            groups = stored.groupby("metric", sort=False)
            series = {f"{name}, stored steps": rows_to_one_series(part, "step") for name, part in groups}
            panels.append(lines(series, y="accuracy", y_axis={"rangemode": "tozero"}))
        drawn.append(Figure(draw_panels(panels), f"Training of {run}", CAPTION))
    return drawn
