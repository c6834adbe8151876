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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import first_lasting
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.intervals import interval_over_runs, rank_correlation_interval, share_interval
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import (
    Curve,
    Run,
    family,
    measures,
    plateau_levels,
    read_runs,
    setting,
    shared_folder,
)
from interp_tasks.measurement.table import Row, numbers, tidy
from interp_tasks.pages import Column, Figure, number, with_interval
from interp_tasks.texts import did_you_mean

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
PLATEAU_LEFT = "plateau left"
#: What is 1 or 0 of a run, and a share of several.
SHARES = ("drop", PLATEAU_LEFT)
STEPS = ("onset", "crossing", "end")
LEVELS = ("sharpness", "plateau", "final")
UNTIL = "plateau until"
LEFT = "plateau left"
CORRELATION = "rank correlation of "
AGAINST = "against "
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
    check_against(keys)
    logged_runs = read_runs(runs)
    curves = {
        (run.name, name): run.curve(name)
        for run in logged_runs
        for name in ((metric,) if metric is not None else run.own_metrics())
    }
    rows = [row for run in logged_runs for row in rows_of(run, curves)]
    left = [row["value"] for row in rows if row["metric"] == PLATEAU_LEFT]
    rows += [row for name, group in families(logged_runs).items() for row in pooled(name, group, rows)]
    for key in keys:
        rows += correlations(logged_runs, rows, key)
    import pandas

    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "metric": metric,
        "against": keys,
    }
    return Result(
        "drops",
        tidy(pandas.DataFrame(rows)),
        config,
        notes(logged_runs, keys, curves, left),
        data={"curves": curves},
    )


def check_against(keys: Sequence[str]) -> None:
    for key in keys:
        section, dot, name = key.partition(".")
        if section not in ("task", "model", "train") or not dot or not name:
            raise UserError(f"--against {key!r}: a setting such as model.d_model or train.learning_rate")


def notes(
    logged_runs: Sequence[Run],
    against: Sequence[str],
    curves: Mapping[tuple[str, str], Curve],
    left: Sequence[float],
) -> tuple[str, ...]:
    """Returns the sentences below the table; ``left``: of each curve with a plateau by theory, whether it left it."""
    without = [(*names, curve.why_none) for names, curve in curves.items() if curve.drop is None]
    shown = without[:MOST_REASONS]
    # The folder that they share is said with the first alone.
    folder = shared_folder([run for run, *_ in shown])
    names = [run.removeprefix(f"{folder}/") if at else run for at, (run, *_) in enumerate(shown)]
    sentences = [
        f"No drop in {metric} of {run}: {why}." for run, (_, metric, why) in zip(names, shown, strict=True)
    ]
    if (more := len(without) - MOST_REASONS) > 0:
        sentences.append(
            f"{more} more {'has' if more == 1 else 'have'} no drop; asked for alone, each says why."
        )
    sentences.append(RULE)
    if left:
        sentences.append(
            "Plateau until: the first step lastingly below nine tenths of the plateau by theory, drop or none."
        )
    if 0.0 in left:
        sentences.append(
            f"{left.count(0.0)} of {len(left)} never left it: in files they have their last step, a lower bound (≥)."
        )
    if families(logged_runs):
        sentences.append("Of several seeds: median, and smallest to largest; of steps, over those that drop.")
    return (*sentences, RANK_CORRELATION) if against else tuple(sentences)


def rows_of(run: Run, curves: Mapping[tuple[str, str], Curve]) -> Iterator[Row]:
    theory = plateau_levels(run)
    for (name, metric), curve in curves.items():
        if name != run.name:
            continue
        level = theory.get(metric.partition(" (")[0], math.nan)
        until = {}
        if level > 0:
            step, has_left = plateau_until(curve.steps, curve.values, level)
            until = {"plateau until": float(step), PLATEAU_LEFT: float(has_left)}
        for quantity, value in (measures(curve) | until).items():
            row = {"experiment": "drops", **run.labels(), "variant": metric, "intervention": "none"}
            row |= {"metric": quantity, "value": value}
            if quantity in ("plateau", "final"):
                row |= {"baseline": level, "effect": value - level}
            yield row


def plateau_until(steps: Sequence[int], values: Sequence[float], level: float) -> tuple[int, bool]:
    """Returns the first step after which a metric stays below 0.9 of a level, the last step if it never does; and
    whether it does.

    Unlike an onset it is there without a drop: early where there is no plateau, and late where it lasts.
    """
    index = first_lasting(values, 0.9 * level)
    return steps[-1 if index is None else index], index is not None


def families(logged_runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns names of the runs that are seeds of one, by ``RUN/seed-*``; two at least."""
    groups: dict[str, list[str]] = {}
    for run in logged_runs:
        name = family(run.name)
        if name is not None:
            groups.setdefault(name, []).append(run.name)
    return {name: group for name, group in groups.items() if len(group) > 1}


def pooled(name: str, group: Sequence[str], rows: Sequence[Row]) -> Iterator[Row]:
    """Yields rows that pool several seeds: medians (of what is 0 or 1 the mean) and the range."""
    import numpy as np

    of_curves: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["run"] in group:
            of_curves.setdefault((row["variant"], row["metric"]), []).append(row)
    for (_, quantity), same in of_curves.items():
        values = np.array([row["value"] for row in same])
        values = values[~np.isnan(values)]
        is_share = quantity in SHARES
        value = float((np.mean if is_share else np.median)(values)) if len(values) else math.nan
        interval = (share_interval if is_share else interval_over_runs)(values.tolist())
        shared = {**same[0], "run": name, "ref": name, "seed": None, "n_runs": len(values)}
        yield {**shared, **numbers(value, interval, same[0].get("baseline"))}
        if is_share or not len(values):
            continue
        for word, extreme in (("smallest", values.min()), ("largest", values.max())):
            yield {**shared, "metric": f"{quantity}, {word}", "value": float(extreme), "effect": math.nan}


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
        check_there(logged_runs, key)
        raise UserError(
            f"--against {key}: no three of the runs have different numbers there and differ in nothing else but the "
            "seed"
        )
    about = {"experiment": "drops", "run": f"against {key}", "ref": f"against {key}", "split": "validation"}
    for group in chosen:
        of_group = [row for row in rows if row["run"] in group]
        shared = {**about, "step": of_group[0]["step"], "n": of_group[0]["n"], "intervention": "none"}
        for variant, quantity in dict.fromkeys((row["variant"], row["metric"]) for row in of_group):
            same = [row for row in of_group if (row["variant"], row["metric"]) == (variant, quantity)]
            pairs = np.array([(group[row["run"]], row["value"]) for row in same])
            pairs = pairs[~np.isnan(pairs[:, 1])]
            [correlation] = spearman(pairs[None, :, 0], pairs[None, :, 1])
            interval = rank_correlation_interval(correlation, len(pairs))
            row = {**shared, "n_runs": len(pairs), "variant": variant}
            yield {**row, "metric": f"rank correlation of {quantity}", **numbers(correlation, interval)}


def check_there(logged_runs: Sequence[Run], key: str) -> None:
    """Refuses a setting that none of the runs has, with the closest of those there are."""
    known = {
        f"{section}.{name}"
        for run in logged_runs
        for section in ("task", "model", "train")
        for name in run.config.get(section, {})
    }
    if key not in known:
        hint = did_you_mean(key, sorted(known))
        raise UserError(f"--against {key}: no run has such a setting: {hint}".rstrip(": "))


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
    """Returns a row per run and metric, and below them the rows about several runs."""
    import pandas

    rows: list[dict[str, Any]] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        values = dict(zip(part["metric"], part["value"], strict=True))
        first: dict[Any, Any] = part.to_dict("records")[0]
        again = part["metric"].iloc[0].startswith(CORRELATION)
        shown = {
            name: values.get(f"{CORRELATION}{name}" if again else name) for name in (*STEPS, *LEVELS, UNTIL)
        }
        # Of several seeds smallest and largest; of a correlation its interval.
        intervals = {
            metric: (low, high)
            for metric, low, high in zip(
                part["metric"], part["value_ci_low"], part["value_ci_high"], strict=True
            )
        }
        ranges = {
            f"{name} range": intervals.get(f"{CORRELATION}{name}", (None, None))
            if again
            else (values.get(f"{name}, smallest"), values.get(f"{name}, largest"))
            for name in (*shown, "drop")
        }
        members = frame[(frame["run"].map(family) == first["run"]) & (frame["variant"] == first["variant"])]
        several = any(f"{name}, smallest" in values for name in shown)
        kind = "rank correlation" if again else "median" if several else ""
        drop = values.get(f"{CORRELATION}drop" if again else "drop")
        rows.append(
            {
                **first,
                **shown,
                **ranges,
                "drop": drop_text(drop, kind, *ranges["drop range"]),
                "kind": kind,
                "left": values.get(LEFT),
                "bounds": lower_bounds(members),
            }
        )
    shown_frame = pandas.DataFrame(rows)
    # One block for all runs: they are compared.
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    seeds = frame["seed"].dropna()
    every = (
        " to ".join(str(seed) for seed in dict.fromkeys([seeds.min(), seeds.max()])) if len(seeds) else "–"
    )
    names = [name for name in frame["run"].unique() if not str(name).startswith(AGAINST)]
    runs = sum("*" not in name for name in names)
    # What all names begin with is said once, above the table.
    folder = shared_folder(names)
    title = f"{runs} run{'s' if runs != 1 else ''}{' of ' + folder if folder else ''}"
    short = shown_frame["run"].str.removeprefix(f"{folder}/") if folder else shown_frame["run"]
    return shown_frame.assign(ref=title, step=steps, seed=every, run=short)


def lower_bounds(members: pandas.DataFrame) -> tuple[bool, bool, bool]:
    """Returns whether the median, least and largest last step of plateaus are bounds: of runs that never left, later
    steps would change them.
    """
    by_run = members.pivot_table(index="run", columns="metric", values="value")
    if not {UNTIL, LEFT} <= set(by_run.columns):
        return False, False, False
    steps, later = by_run[UNTIL], by_run[UNTIL].where(by_run[LEFT] == 1, math.inf)
    return (
        bool(steps.median() != later.median()),
        bool(steps.min() != later.min()),
        bool(steps.max() != later.max()),
    )


def drop_text(drop: float | None, kind: str, low: float | None, high: float | None) -> str:
    if drop is None or drop != drop:
        return ""
    if kind == "median":
        return f"{drop:.0%} of runs"
    return with_interval(number(drop), low, high) if kind else ("yes" if drop else "no")


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    columns = [Column("run", "run")]
    if rows["variant"].nunique() > 1:
        columns.append(Column("metric", "variant"))
    columns.append(Column("drop", "drop"))
    # Of a task whose plateau is not known by theory there is none.
    until = [UNTIL] if rows[UNTIL].notna().any() else []
    return [*columns, *(Column(name, name, _cell(name)) for name in (*STEPS, *LEVELS, *until))]


def whole(step: float) -> str:
    """Formats a step that may lie between two; just before the first step is 0, not "-0"."""
    return "0" if abs(step) <= 0.5 else f"{step:.0f}"


def _cell(name: str) -> Callable[[Mapping[str, Any]], str]:
    def text(row: Mapping[str, Any]) -> str:
        value = row[name]
        if value is None or value != value:
            return "–"
        low, high = row[f"{name} range"]
        if name == UNTIL and row["left"] == 0:
            return "never left"
        if name not in (*STEPS, UNTIL) or row["kind"] == "rank correlation":
            return with_interval(number(value), low, high)
        bounds = row["bounds"] if name == UNTIL else (False, False, False)
        middle, *ends = (
            f"{'≥' * bound}{whole(step)}"
            for bound, step in zip(bounds, (value, low, high), strict=True)
            if step is not None
        )
        return middle + (f" [{', '.join(ends)}]" if row["kind"] == "median" else "")

    return text


def figures(result: Result) -> list[Figure]:
    """Returns every curve; its drop, from onset to end, is drawn bold."""
    from interp_tasks.measurement.curve_figures import curves_figure

    caption = "Bold: from onset to end of the drop. A curve without a bold part has none."
    return [Figure(curves_figure(result.data["curves"]), "Logged metric of every run", caption)]
