"""When and how abruptly runs drop, whether they do at all, and what that depends on.

The ``variant`` is the metric whose curve it is, the ``metric`` what is said of it: ``drop`` (1 or 0; of several runs
the share), ``onset``, ``crossing``, ``end``, ``length`` (steps), ``sharpness`` (see
:class:`~interp_tasks.checkpoints.Drop`), ``plateau``, ``final``. A run without a drop has no values but ``drop`` and
``final``. Where the task knows the plateau by theory, that is the ``baseline`` of the levels, and ``plateau until``
is the first step lastingly below nine tenths of it, the last step of a run that never is: ``plateau left`` is 0 of
that (else 1; of several runs the share), and its step a lower bound. Rows of several runs have the median, ``ONSET,
smallest`` and ``ONSET, largest``, and from three runs on intervals: Student's t over runs; of a share the exact
binomial one; of a rank correlation Fisher's z.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import first_index_lastingly_below
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.intervals import rank_correlation_interval
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import (
    Curve,
    Run,
    declared,
    measures,
    pooled_over_seeds,
    read_runs,
    setting,
    title_and_prefix,
)
from interp_tasks.measurement.table import Row, numbers, tidy
from interp_tasks.pages import Column, Figure, number, with_interval

if TYPE_CHECKING:
    import pandas

#: Curves without a drop of which the reason is told.
MOST_REASONS = 3
RULE = (
    "Onset, crossing, end: the last step before 10%, the first after 50% and after 90% of the way from plateau to "
    "final level. Sharpness: the slope at the crossing over ln(step), of a drop from 1 to 0."
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


@experiment("runs", says={"metric": None})
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

    Raises:
        UserError: in one line.
    """
    keys = [against] if isinstance(against, str) else list(against)
    for key in keys:
        section, _, name = key.partition(".")
        if section not in ("task", "model", "train") or not name:
            raise UserError(f"--against {key!r}: a setting such as model.d_model or train.learning_rate")
    logged_runs = read_runs(runs)
    curves = {
        (run.name, name): run.curve(name)
        for run in logged_runs
        for name in ((metric,) if metric is not None else run.own_metrics())
    }
    rows = [row for run in logged_runs for row in rows_of(run, curves)]
    rows += pooled_over_seeds(logged_runs, rows, lambda metric: metric in ("drop", LEFT), baselines=True)
    for key in keys:
        rows += correlations(logged_runs, rows, key)
    import pandas

    config = {"runs": [run.name for run in logged_runs], "metric": metric, "against": keys}
    notes = [*reasons(curves), RULE, *([RANK_CORRELATION] if keys else [])]
    if any(row["metric"] == LEFT for row in rows):
        notes.append("Plateau until: the first step lastingly below nine tenths of the plateau by theory.")
    if any("*" in row["run"] for row in rows):
        notes.append("Of several seeds: median, and smallest to largest; of steps, over those that drop.")
    return Result("drops", tidy(pandas.DataFrame(rows)), config, tuple(notes), data={"curves": curves})


def reasons(curves: Mapping[tuple[str, str], Curve]) -> Iterator[str]:
    """Yields why curves have no drop, of the first few that have none."""
    without = [(names, curve.why_none) for names, curve in curves.items() if curve.drop is None]
    yield from (f"No drop in {metric} of {run}: {why}." for (run, metric), why in without[:MOST_REASONS])
    if len(without) > MOST_REASONS:
        yield f"{len(without) - MOST_REASONS} more have no drop; asked for alone, each says why."


def rows_of(run: Run, curves: Mapping[tuple[str, str], Curve]) -> Iterator[Row]:
    """Yields what is said of the curves of one run."""
    theory = declared(run, "plateau_levels")
    for (name, metric), curve in curves.items():
        if name != run.name:
            continue
        level = theory.get(metric.partition(" (")[0], math.nan)
        quantities = measures(curve)
        if level > 0:
            step, has_left = plateau_until(curve.steps, curve.values, level)
            quantities |= {UNTIL: float(step), LEFT: float(has_left)}
        for quantity, value in quantities.items():
            row = {"experiment": "drops", **run.labels(), "variant": metric, "intervention": "none"}
            yield (
                row
                | {"metric": quantity}
                | numbers(value, baseline=level if quantity in LEVELS[1:] else None)
            )


def plateau_until(steps: Any, values: Any, level: float) -> tuple[int, bool]:
    """Returns the first step after which a metric stays below 0.9 of a level, the last step if it never does; and
    whether it does.

    Unlike an onset it is there without a drop: early where there is no plateau, and late where it lasts.
    """
    index = first_index_lastingly_below(values, 0.9 * level)
    return steps[-1 if index is None else index], index is not None


def correlations(logged_runs: Sequence[Run], rows: Sequence[Row], key: str) -> Iterator[Row]:
    """Yields the rank correlation of every quantity with a setting, per set of runs that differ in it alone.

    Raises:
        UserError: if no three runs do, or the setting is no number.
    """
    import numpy as np

    from circuits.statistics import spearman

    groups: dict[str, dict[str, float]] = {}
    for run in logged_runs:
        value = setting(run.config, key)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            groups.setdefault(repr(without(run.config, key)), {})[run.name] = float(value)
    chosen = [group for group in groups.values() if len(set(group.values())) >= 3]
    if not chosen:
        raise UserError(
            f"--against {key}: no three of the runs have different numbers there and differ in nothing else but the "
            "seed"
        )
    about = {"experiment": "drops", "run": AGAINST + key, "ref": AGAINST + key, "split": "validation"}
    for group in chosen:
        same: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row["run"] in group:
                same.setdefault((row["variant"], row["metric"]), []).append(row)
        for (variant, quantity), of_runs in same.items():
            pairs = np.array([(group[row["run"]], row["value"]) for row in of_runs])
            pairs = pairs[~np.isnan(pairs[:, 1])]
            [correlation] = spearman(pairs[None, :, 0], pairs[None, :, 1])
            interval = rank_correlation_interval(correlation, len(pairs))
            shared = {**about, "step": of_runs[0]["step"], "n": of_runs[0]["n"], "intervention": "none"}
            row = {**shared, "n_runs": len(pairs), "variant": variant, "metric": CORRELATION + quantity}
            yield row | numbers(correlation, interval)


def without(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
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


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row of texts per run and metric, and below them the rows about several runs, in one block."""
    import pandas

    # What all names begin with is said once, above the table.
    title, prefix = title_and_prefix([run for run in frame["run"].unique() if not run.startswith(AGAINST)])
    rows: list[dict[str, Any]] = []
    for (run, _), part in frame.groupby(["run", "variant"], sort=False):
        by_metric = {row["metric"]: row for row in part.to_dict("records")}
        texts = {name: text_of(by_metric, name, str(run)) for name in ("drop", *STEPS, *LEVELS, UNTIL)}
        first: dict[Any, Any] = next(iter(by_metric.values()))
        rows.append({**first, **texts, "ref": title, "run": str(run).removeprefix(prefix)})
    ends = {name: dict.fromkeys([frame[name].min(), frame[name].max()]) for name in ("step", "seed")}
    spans = {name: " to ".join(map(str, both)) for name, both in ends.items()}
    return pandas.DataFrame(rows).assign(**(spans if frame["seed"].notna().any() else spans | {"seed": "–"}))


def text_of(by_metric: Mapping[str, Mapping[Any, Any]], name: str, run: str) -> str:
    """Returns what people read of a quantity: of several seeds with the range, of a correlation with its interval."""
    correlated = run.startswith(AGAINST)
    row = by_metric.get(CORRELATION + name if correlated else name)
    value = math.nan if row is None else row["value"]
    if row is None or value != value:
        return "" if name == "drop" else "–"
    if correlated:
        return with_interval(number(value), row["value_ci_low"], row["value_ci_high"])
    if name == "drop":
        return f"{value:.0%} of runs" if "*" in run else "yes" if value else "no"
    if name == UNTIL and by_metric[LEFT]["value"] == 0:
        return "never left"
    ends = [by_metric[end]["value"] for end in (f"{name}, smallest", f"{name}, largest") if end in by_metric]
    if name in LEVELS:
        return with_interval(number(value), *ends) if ends else number(value)
    # A step may lie between two; just before the first one is 0, not "-0".
    first, *others = (f"{step:.0f}".removeprefix("-") for step in (value, *ends))
    return first + (f" [{', '.join(others)}]" if others else "")


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns of the table; that of the metric only where there are several."""
    metric = [Column("metric", "variant")] if rows["variant"].nunique() > 1 else []
    # Of a task whose plateau is not known by theory there is none.
    until = [UNTIL] if (rows[UNTIL] != "–").any() else []
    return [
        Column("run", "run"),
        *metric,
        *(Column(name, name) for name in ("drop", *STEPS, *LEVELS, *until)),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns every curve; its drop, from onset to end, is drawn bold."""
    from circuits.figures.layout import draw
    from interp_tasks.measurement.figure import curves_panel

    curves: Mapping[tuple[str, str], Curve] = result.data["curves"]
    title, prefix = title_and_prefix([*dict.fromkeys(run for run, _ in curves)])
    # Parts of a mixture have metrics such as "loss (n=3)": the axis is that of the loss.
    metrics = list(dict.fromkeys(metric.partition(" (")[0] for _, metric in curves))
    named = {
        run.removeprefix(prefix)
        + (metric.removeprefix(metrics[0]) if len(metrics) == 1 else f", {metric}"): one
        for (run, metric), one in curves.items()
    }
    panel = curves_panel(named, " or ".join(metrics[:3]), title=title if prefix else "")
    caption = "Bold: from onset to end of the drop. A curve without a bold part has none."
    return [Figure(draw([panel]), "Logged metric of every run", caption)]
