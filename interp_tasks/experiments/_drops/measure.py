"""When and how abruptly runs drop, whether they do at all, and what that depends on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from interp_tasks.measurement.table import tidy
from interp_tasks.texts import did_you_mean

if TYPE_CHECKING:
    import plotly.graph_objects

#: Curves without a drop of which the reason is told.
MOST_REASONS = 3
PLATEAU_LEFT = "plateau left"
#: What is 1 or 0 of a run, and a share of several.
SHARES = ("drop", PLATEAU_LEFT)


@dataclass(frozen=True, repr=False)
class DropsResult(Result):
    """A :class:`Result` with the curves behind it, by run and metric."""

    curves: Mapping[tuple[str, str], Curve] = field(default_factory=dict)

    def plot(self) -> plotly.graph_objects.Figure:
        """Returns every curve; its drop, from onset to end, is drawn bold."""
        from interp_tasks.measurement.curve_figures import curves_figure

        return self.titled(curves_figure(self.curves), self.heading())

    def heading(self) -> str:
        return "Logged metric of every run"

    def caption(self) -> str:
        return "Bold: from onset to end of the drop. A curve without a bold part has none."


@experiment("runs", says={"metric": None})
def drops(
    runs: str | Sequence[str],
    metric: Annotated[
        str | None,
        typer.Option("--metric", metavar="NAME", help="Logged validation metric.", show_default="the task's"),
    ] = None,
    against: Annotated[
        str | Sequence[str],
        typer.Option(
            "--against",
            metavar="KEY",
            help="Rank correlations with a setting, as in model.d_model. Repeatable.",
        ),
        list[str],
    ] = (),
) -> DropsResult:
    """Say whether each run drops, when, how sharply, from what level to what level.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; of ``RUN/seed-0``, ``RUN/seed-1``, ... a row more says the
            median.
        metric: a logged validation metric; default: the one whose drop the task declares, and that of every part of a
            mixture.
        against: settings, such as ``model.d_model``: the rank correlation of everything with each of them, over the
            runs that differ in nothing else but their seed.

    Returns:
        A :class:`DropsResult`. The ``variant`` is the metric whose curve it is, the ``metric`` what is said of it:
        ``drop`` (1 or 0; of several runs the share), ``onset``, ``crossing``, ``end``, ``length`` (steps),
        ``sharpness`` (see :class:`~interp_tasks.checkpoints.Drop`), ``plateau``, ``final``. A run without a drop has
        no values but ``drop`` and ``final``. Where the task knows the plateau by theory, that is the ``baseline`` of
        the levels, and ``plateau until`` is the first step lastingly below nine tenths of it, the last step of a run
        that never is: ``plateau left`` is 0 of that (else 1; of several runs the share), and its step a lower bound.
        Rows of several runs have the median, ``ONSET, smallest`` and ``ONSET, largest``, and from three runs on
        intervals: Student's t over runs; of a share the exact binomial one; of a rank correlation Fisher's z.

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
    return DropsResult(
        "drops", tidy(pandas.DataFrame(rows)), config, notes(logged_runs, keys, curves, left), curves=curves
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
    several = bool(families(logged_runs))
    without = [(*names, curve.why_none) for names, curve in curves.items() if curve.drop is None]
    told = without[:MOST_REASONS]
    # The folder that they share is said with the first alone.
    folder = shared_folder([run for run, *_ in told])
    names = [run.removeprefix(f"{folder}/") if at else run for at, (run, *_) in enumerate(told)]
    more = len(without) - MOST_REASONS
    return (
        *(f"No drop in {metric} of {run}: {why}." for run, (_, metric, why) in zip(names, told, strict=True)),
        *(
            [f"{more} more {'has' if more == 1 else 'have'} no drop; asked for alone, each says why."]
            if more > 0
            else []
        ),
        "Onset, crossing, end: the last step before 10%, the first after 50% and after 90% of the way from plateau to "
        "final level. Sharpness: the slope at the crossing over ln(step), of a drop from 1 to 0.",
        *(
            [
                "Plateau until: the first step lastingly below nine tenths of the plateau by theory, drop or none."
            ]
            if left
            else []
        ),
        *(
            [
                f"{left.count(0.0)} of {len(left)} never left it: in files they have their last step, a lower bound "
                "(≥)."
            ]
            if 0.0 in left
            else []
        ),
        *(
            ["Of several seeds: median, and smallest to largest; of steps, over those that drop."]
            if several
            else []
        ),
        *(
            [
                "Rank correlation: Spearman's, over the runs that have the number; a 95% interval (Fisher's z) "
                "needs four, and an order that is not perfect."
            ]
            if against
            else []
        ),
    )


def rows_of(run: Run, curves: Mapping[tuple[str, str], Curve]) -> Iterator[dict[str, Any]]:
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


def pooled(name: str, group: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields rows that pool several seeds: medians (of what is 0 or 1 the mean) and the range."""
    import numpy as np

    group_rows = [row for row in rows if row["run"] in group]
    for variant, quantity in dict.fromkeys((row["variant"], row["metric"]) for row in group_rows):
        same = [row for row in group_rows if (row["variant"], row["metric"]) == (variant, quantity)]
        values = np.array([row["value"] for row in same])
        values = values[~np.isnan(values)]
        middle = np.mean if quantity in SHARES else np.median
        shared = {**same[0], "run": name, "ref": name, "seed": None, "n_runs": len(values)}
        low, high = (share_interval if quantity in SHARES else interval_over_runs)(values.tolist())
        level = same[0].get("baseline", math.nan)
        value = float(middle(values)) if len(values) else math.nan
        yield {
            **shared,
            "value": value,
            "value_ci_low": low,
            "value_ci_high": high,
            **({"effect": value - level} if "baseline" in same[0] else {}),
        }
        if quantity in SHARES or not len(values):
            continue
        for word, extreme in (("smallest", values.min()), ("largest", values.max())):
            yield {**shared, "metric": f"{quantity}, {word}", "value": float(extreme), "effect": math.nan}


def correlations(
    logged_runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], key: str
) -> Iterator[dict[str, Any]]:
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
    for group in chosen:
        group_rows = [row for row in rows if row["run"] in group]
        for variant, quantity in dict.fromkeys((row["variant"], row["metric"]) for row in group_rows):
            pairs = np.array(
                [
                    (group[row["run"]], row["value"])
                    for row in group_rows
                    if (row["variant"], row["metric"]) == (variant, quantity)
                ]
            )
            pairs = pairs[~np.isnan(pairs[:, 1])]
            [correlation] = spearman(pairs[None, :, 0], pairs[None, :, 1])
            low, high = rank_correlation_interval(correlation, len(pairs))
            yield {
                "experiment": "drops",
                "run": f"against {key}",
                "ref": f"against {key}",
                "step": group_rows[0]["step"],
                "split": "validation",
                "n": group_rows[0]["n"],
                "n_runs": len(pairs),
                "variant": variant,
                "intervention": "none",
                "metric": f"rank correlation of {quantity}",
                "value": float(correlation),
                "value_ci_low": low,
                "value_ci_high": high,
            }


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
