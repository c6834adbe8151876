"""Measures when each answer of a run generalises: when its accuracy reaches a level, on both splits.

The ``variant`` is an accuracy as the run logs it. Steps are interpolated between logged ones, and empty for a run that
is not there by its last, the ``step`` of the row. Of validation ``baseline`` is the step of train, ``effect`` the
delay; ``validation when train is at 95%`` is chance where a run memorises first. ``rank correlation with its loss`` is
over logged steps up to that at which the accuracy first is at its largest. Variants that begin with ``order`` are
about several accuracies of a run: ``pairs in order`` is the share of pairs of which the smaller q comes first. Rows of
several seeds have the median, the range and, from three seeds on, intervals: Student's t over runs; of ``reached`` the
exact binomial one. A run that does not get there counts as later than all others; the interval is then one of the
median, from six seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import Series, curve
from interp_tasks.checkpoints.drop_detection import final_level
from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import finite_or_nan
from interp_tasks.measurement.logged_runs import (
    LoggedRun,
    median_rows_over_seeds,
    read_runs,
    title_and_prefix,
)
from interp_tasks.measurement.option_parsing import LEVEL, check_accuracy_level
from interp_tasks.measurement.result import Result, Row, cell_writer, experiment, tidy_frame
from interp_tasks.pages import Column, Figure, number

if TYPE_CHECKING:
    import pandas

ACCURACY = "accuracy"
FINAL, PAIRS, SPREAD = "final level", "pairs in order", "last step / first step"
#: The primes below it generalise one by one, says the figure of the MIIII paper, those from it on together.
TOGETHER_FROM = 11
#: Steps are on a logarithmic axis.
STEPS = {"type": "log", "dtick": 1, "exponentformat": "none"}


@experiment(says={"level": 0.95})
def generalisation(runs: str | Sequence[str], level: Annotated[float, LEVEL] = 0.95) -> Result:
    """Say at which step each accuracy of a run reaches a level, in training and validation, in which order.

    A line per answer; of RUN/seed-0, RUN/seed-1, ... lines more with the medians. A run that does not get there is said
    to be so by its last step.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; ``RUN/seed-0``, ``RUN/seed-1``, ... are also pooled.
        level: of an accuracy.
    """

    check_accuracy_level(level)
    logged_runs = read_runs(runs)
    rows = [row for run in logged_runs for row in generalisation_step_rows(run, level)]
    several = median_rows_over_seeds(
        logged_runs,
        rows,
        lambda metric: metric.startswith("reached"),
        lambda metric: metric.startswith("step at"),
    )
    frame = tidy_frame(rows + several, experiment="generalisation", intervention="none")
    notes = (
        "Step: where the accuracy first is at the level, interpolated between logged steps; for good: after it the "
        "accuracy is never below again. Validation is a fixed sample, train the batch of the step.",
        "Delay: steps from train to validation. accuracy: the mean of those below it. Pairs in order: of two answers "
        "the smaller is at the level first; last / first: the steps of the last by those of the first.",
        "Of several seeds: the median; a run that does not get there is later than all others.",
    )
    config = {"runs": [run.name for run in logged_runs], "level": level}
    return Result(
        "generalisation", frame, config, notes if several else notes[:2], data={"runs": logged_runs}
    )


# ---- rows


def generalisation_step_rows(run: LoggedRun, level: float) -> list[Row]:
    """Returns the rows of one run: where each accuracy reaches the level, its delay, its last value; the order."""
    import numpy as np

    from interp_tasks.measurement.level_crossing_steps import first_and_lasting_steps

    at, rows = f"{100 * level:g}%", []
    firsts: dict[str, dict[str, float]] = {"train": {}, "validation": {}}
    for split, first_of in firsts.items():
        for name in accuracy_names(run, split):
            steps, values = run.finite_as_lists(name, split)
            # Step 0 has no batch that was trained on.
            if split == "train" and steps[:1] == [0]:
                steps, values = steps[1:], values[1:]
            if not steps:
                continue
            first, lasting = first_and_lasting_steps(steps, values, level)
            first_of[name] = first
            shared = {**run.label_columns(), "step": int(steps[-1]), "split": split, "variant": name}
            found = {f"step at {at} for good": finite_or_nan(lasting), FINAL: final_level(values)}
            found[f"reached {at}"] = float(math.isfinite(first))
            delay = {}
            if split == "train":
                shared["n"] = None
            else:
                found["rank correlation with its loss"] = correlate_accuracy_with_loss(run, name)
                trained = firsts["train"].get(name)
                if trained is not None:
                    delay = {"baseline": finite_or_nan(trained), "effect": finite_or_nan(first - trained)}
                    then = float(np.interp(trained, steps, values)) if math.isfinite(trained) else math.nan
                    found[f"validation when train is at {at}"] = then
            rows.append({**shared, **delay, "metric": f"step at {at}", "value": finite_or_nan(first)})
            rows += [{**shared, "metric": metric, "value": value} for metric, value in found.items()]
    if not firsts["validation"]:
        raise UserError(
            f"{run.name} logs no finite accuracy: it has {', '.join(run.logged_metrics()) or 'nothing'}; "
            "generalisation is of tasks with right and wrong answers"
        )
    return rows + list(order_rows(run, firsts["validation"], at))


def accuracy_names(run: LoggedRun, split: str) -> list[str]:
    """Returns the logged metrics ``accuracy``, ``accuracy_q``, ..., of several answers the mean first."""
    return [name for name in run.logged_metrics(split) if name == ACCURACY or name.startswith(f"{ACCURACY}_")]


def correlate_accuracy_with_loss(run: LoggedRun, name: str) -> float:
    """Returns Spearman's correlation of an accuracy with the loss of the same answer; NaN without one.

    Over logged steps up to that at which the accuracy first is at its largest: after it accuracies tie, and the loss
    goes on falling, so that the longer a run goes on, the lower would the correlation be.
    """
    import pandas

    curves = [
        pandas.Series(dict(zip(*run.finite_as_lists(each), strict=True)), dtype=float)
        for each in (name, f"loss{name.removeprefix(ACCURACY)}")
    ]
    both = pandas.concat(curves, axis=1, join="inner").sort_index()
    # ``idxmax`` gives the first of several.
    both = both.loc[: both[0].idxmax()] if len(both) else both
    return float(both.corr("spearman", min_periods=3).iloc[0, 1])


def order_rows(run: LoggedRun, firsts: Mapping[str, float], level: str) -> Iterator[Row]:
    """Yields rows on the order in which the answers of a run generalise, from the step at which each does."""
    by_prime = {
        int(answer_suffix(name)): step for name, step in firsts.items() if answer_suffix(name).isdecimal()
    }
    primes = sorted(by_prime)
    sides = {
        "order of all answers": primes,
        f"order of answers below {TOGETHER_FROM}": [q for q in primes if q < TOGETHER_FROM],
        f"order of answers from {TOGETHER_FROM} on": [q for q in primes if q >= TOGETHER_FROM],
    }
    for variant, moduli in sides.items():
        steps = [by_prime[q] for q in moduli]
        if len(steps) < 2:
            continue
        # Of answers none of which got there nothing is known; nor is there a share of step 0.
        known = 0 < min(steps) < math.inf
        found = {
            PAIRS: share_in_order(steps),
            SPREAD: finite_or_nan(max(steps) / min(steps)) if known else math.nan,
            f"reached {level}": sum(map(math.isfinite, steps)) / len(steps),
        }
        for metric, value in found.items():
            yield {**run.label_columns(), "variant": variant, "metric": metric, "value": value}


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
    step = f"step at {level}"
    title, prefix = title_and_prefix(list(frame["run"].unique()))
    rows: list[Row] = []
    for _, part in frame.groupby(["run", "variant"], sort=False):
        cells = {(row["split"], row["metric"]): row for row in part.to_dict("records")}
        validation = {metric: row["value"] for (split, metric), row in cells.items() if split == "validation"}
        shown = {
            "train": step_text(cells, "train", step, level),
            "validation": step_text(cells, "validation", step, level),
            "good": step_text(cells, "validation", f"{step} for good", level),
            "delay": cells.get(("validation", step), {}).get("effect"),
            "then": validation.get(f"validation when train is at {level}"),
            "final": validation.get(FINAL),
            "pairs": validation.get(PAIRS),
            "spread": validation.get(SPREAD),
        }
        first: dict[Any, Any] = part.to_dict("records")[0]
        names = {
            "run": first["run"].removeprefix(prefix),
            "variant": first["variant"].removeprefix("order of ").removeprefix("answers "),
        }
        rows.append({**first, **shown, **names, "ref": title, "level": level})
    steps = " to ".join(str(step) for step in dict.fromkeys([frame["step"].min(), frame["step"].max()]))
    return pandas.DataFrame(rows).assign(step=steps)


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see; those without an entry are left out."""
    level = rows["level"].iloc[0]
    of_order = [
        Column("pairs in order", "pairs", cell_writer("pairs", ".0%")),
        Column("last / first", "spread", cell_writer("spread", number)),
    ]
    return [
        *([Column("run", "run")] if rows["run"].nunique() > 1 else []),
        Column("accuracy", "variant"),
        Column(f"train at {level}", "train"),
        Column(f"validation at {level}", "validation"),
        Column("for good", "good"),
        Column("delay", "delay", cell_writer("delay", partial(number, significant=3, sign=True))),
        Column(f"validation when train is at {level}", "then", cell_writer("then", number)),
        Column("final", "final", cell_writer("final", number)),
        *(column for column in of_order if rows[column.key].notna().any()),
    ]


def step_text(cells: Mapping[Any, Mapping[Any, Any]], split: str, metric: str, level: str) -> str:
    """Formats a step; for several seeds with its range, and how many reach the level."""
    row, least, most = (cells.get((split, f"{metric}{end}")) for end in ("", ", smallest", ", largest"))
    if row is None:
        return ""
    shown = f">{row['step']}" if math.isnan(row["value"]) else f"{row['value']:.0f}"
    if least is None or most is None or math.isnan(least["value"]):
        return shown
    share, runs = cells[split, f"reached {level}"]["value"], int(row["n_runs"])
    last = "?" if math.isnan(most["value"]) else f"{most['value']:.0f}"
    return f"{shown} ({least['value']:.0f} to {last}; {share * runs:.0f} of {runs})"


def figures(result: Result) -> list[Figure]:
    """Returns a panel per run and split with a line for each accuracy; runs of a single answer share theirs."""
    panels = []
    for split in ("validation", "train"):
        lines: dict[str, dict[str, Series]] = {}
        for run in result.data["runs"]:
            names = accuracy_names(run, split)
            several = [name for name in names if answer_suffix(name).isdecimal()]
            for name in several or names:
                title, line = (
                    (short_run_name(run.name), f"modulo {answer_suffix(name)}")
                    if several
                    else ("", short_run_name(run.name))
                )
                # A logarithm has no place for step 0.
                points = [pair for pair in zip(*run.finite_as_lists(name, split), strict=True) if pair[0] > 0]
                steps, values = ([pair[at] for pair in points] for at in (0, 1))
                lines.setdefault(title, {})[line] = Series(steps, values)
        axes: dict[str, Any] = {"y": ACCURACY, "x_axis": STEPS, "y_axis": {"range": [-0.02, 1.02]}}
        level = [{"y": result.config["level"]}]
        panels += [
            curve(series, f"{split} accuracy {title}".strip(), lines=level, height=260, **axes)
            for title, series in lines.items()
        ]
    caption = "Validation above, the batches trained on below. Steps on a logarithmic scale."
    return [Figure(draw_panels(panels), "Accuracy of every answer over training", caption)]


def answer_suffix(name: str) -> str:
    """Returns ``11`` for ``accuracy_11``."""
    return name.rpartition("_")[2]


def short_run_name(run: str) -> str:
    """Shortens a path to ``addition/seed-3``."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
