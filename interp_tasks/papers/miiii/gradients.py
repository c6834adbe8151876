"""Finds which weights stop moving first: gradient norms of each tensor over training, before and after the filter.

The ``variant`` is a tensor, ``intervention`` the stage: ``raw``, or ``filtered`` as the optimiser saw it where a
filter was on. ``largest norm`` with its step; ``final norm / largest``, of the last tenth; ``step below half``: the
first logged step from which the norm stays below half of its largest, empty if it ends above; its rank among the
tensors, 1 the earliest. Of ``attention`` against ``other tensors`` their medians, the others' as ``baseline``; a
tensor that ends above half counts as later than all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, heat
from interp_tasks.checkpoints.drop import final_level
from interp_tasks.checkpoints.run_files import iterate_metrics
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, read_runs
from interp_tasks.measurement.table import Row, numbers, side_by_side, tidy
from interp_tasks.pages import Column, Figure

if TYPE_CHECKING:
    import pandas

#: Before and after the filter, as the trainer logs them; without a filter there is only the first.
STAGES = ("raw", "filtered")
#: The key of a line of the log.
LOGGED = "gradient_norm"
#: What is said of a tensor, in order.
LARGEST, AT, FINAL, HALF, RANK = (
    "largest norm",
    "step of the largest norm",
    "final norm / largest",
    "step below half",
    "rank of the step below half",
)
#: What people see of each: metric, title of its column, digits.
SHOWN = (
    (LARGEST, "largest", ".3g"),
    (AT, "at step", ".0f"),
    (FINAL, "final\n/ largest", ".2g"),
    (HALF, "below half\nfrom step", ".0f"),
    (RANK, "rank", ".3g"),
)
#: Variants of several tensors.
ATTENTION, OTHERS = "attention", "other tensors"
START = typer.Option("--start", help="Leave out what was logged before this step.")


@dataclass(frozen=True)
class Norms:
    """Gradient norms of one run at one stage: ``norms`` name -> a number per step; ``steps`` ascending."""

    steps: tuple[int, ...]
    norms: Mapping[str, tuple[float, ...]]


@experiment("modular", says={"start": 0})
def gradients(runs: str | Sequence[str], start: Annotated[int, START] = 0) -> Result:
    """Say when the gradient of each weight becomes small, before and after the filter; attention beside the rest.

    Of runs trained with train.gradient_norms_every above 0.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``, trained with ``train.gradient_norms_every`` above 0.
        start: only what was logged from this step on: the first steps can be larger than all that follows (the
            published figure begins at 1,000 of 65,536).

    Raises:
        UserError: in one line; also for a run that logged no gradient norms.
    """
    check_start(start)
    logged_runs = read_runs(runs)
    logged = {run.name: read_norms(run, start) for run in logged_runs}
    rows = [
        row
        for run in logged_runs
        for stage, norms in logged[run.name].items()
        for row in rows_of(run, stage, norms)
    ]
    import pandas

    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "start": start,
    }
    return Result("gradients", tidy(pandas.DataFrame(rows)), config, notes(logged), data={"logged": logged})


def check_start(start: int) -> None:
    if start < 0:
        raise UserError(f"--start {start}: a step from 0")


def notes(logged: Mapping[str, Mapping[str, Norms]]) -> tuple[str, ...]:
    unfiltered = [run for run, stages in logged.items() if len(stages) == 1]
    return (
        "step below half: from there on every logged norm is below half of the tensor's largest; – if the last one is "
        "not. rank: 1 is the earliest; ties share their mean rank.",
        "raw: the gradient of the loss. filtered: after Grokfast and before clipping, which the optimiser sees.",
        *(["No filter, so no filtered norms: " + ", ".join(unfiltered) + "."] if unfiltered else []),
    )


def read_norms(run: Run, start: int) -> dict[str, Norms]:
    """Returns the norms that a run logged, by stage.

    Raises:
        UserError: if it logged none from this step on, or they are mangled.
    """
    every = [line for line in iterate_metrics(run.path) if LOGGED in line]
    lines = [line for line in every if line["step"] >= start]
    if not lines:
        logged = [line["step"] for line in every]
        if logged:
            raise UserError(
                f"{run.name} logged no gradient norms from step {start} on: its last are of {logged[-1]}"
            )
        raise UserError(
            f"{run.name} logged no gradient norms: train with --set train.gradient_norms_every=100"
        )
    by_run: dict[str, Norms] = {}
    for stage in STAGES:
        tables = [line[LOGGED].get(stage) if isinstance(line[LOGGED], dict) else {} for line in lines]
        if stage != STAGES[0] and not any(tables):
            continue
        names = list(tables[0] or {})
        if not names or any(not isinstance(table, dict) or list(table) != names for table in tables):
            raise UserError(
                f"the log of {run.name} is mangled: {LOGGED} has not the same tensors in every line"
            )
        steps = tuple(line["step"] for line in lines)
        by_run[stage] = Norms(steps, {name: tuple(number(table[name]) for table in tables) for name in names})
    return by_run


def number(value: Any) -> float:
    """Returns a logged norm; one that is not finite (a diverged step) counts as infinite, not as small."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.inf


def rows_of(run: Run, stage: str, norms: Norms) -> Iterator[Row]:
    """Yields the rows of each tensor; one that is frozen, with a gradient of 0 throughout, has only its norm."""
    import statistics

    from scipy.stats import rankdata

    from interp_tasks.measurement.crossings import finite_or_nan

    # A gradient is of the batch of its step; without a size that is the whole split.
    batch = run.config.get("train", {}).get("batch_size")
    shared = {**run.labels(), "experiment": "gradients", "intervention": stage, "split": "train", "n": batch}
    steps = {name: step_below_half(norms.steps, each) for name, each in norms.norms.items() if max(each)}
    ranked = dict(zip(steps, rankdata(list(steps.values())).tolist(), strict=True)) if steps else {}
    for name, values in norms.norms.items():
        largest = max(values)
        about = {**shared, "variant": name}
        yield {**about, "metric": LARGEST, "value": largest}
        if name not in steps:
            continue
        yield {**about, "metric": AT, "value": float(norms.steps[values.index(largest)])}
        # Of an infinite one nothing is a share.
        share = final_level(values) / largest if largest < math.inf else math.nan
        yield {**about, "metric": FINAL, "value": share}
        yield {**about, "metric": HALF, "value": steps[name] if steps[name] < math.inf else math.nan}
        yield {**about, "metric": RANK, "value": ranked[name]}
    groups = {ATTENTION: [name for name in steps if ".attn." in name]}
    groups[OTHERS] = [name for name in steps if name not in groups[ATTENTION]]
    if not all(groups.values()):
        return
    for metric, of in ((HALF, steps), (RANK, ranked)):
        attention, others = (
            finite_or_nan(statistics.median([of[name] for name in groups[group]]))
            for group in (ATTENTION, OTHERS)
        )
        compared = numbers(attention, baseline=others)
        yield {**shared, "variant": ATTENTION, "metric": f"median {metric}", **compared}


def step_below_half(steps: Sequence[int], values: Sequence[float]) -> float:
    """Returns the first logged step from which all are below half of the largest; infinite if the last is not."""
    above = [index for index, value in enumerate(values) if not value < max(values) / 2]
    return float(steps[above[-1] + 1]) if above[-1] + 1 < len(steps) else math.inf


def figures(result: Result) -> list[Figure]:
    """Returns of each run and stage a map of each tensor's norm over its largest, and below it the norms themselves."""
    import numpy as np
    import pandas

    caption = "Maps: each tensor's norm over its own largest. Lines: the norms themselves, on a log axis."
    drawn = []
    for run, stages in result.data["logged"].items():
        panels = []
        for stage, logged in stages.items():
            norms = pandas.DataFrame(dict(logged.norms), index=list(logged.steps))
            finite = norms.replace([np.inf, -np.inf], np.nan)
            # Of one that is 0 or infinite nothing is a share.
            largest = norms.max().where(lambda each: (each > 0) & np.isfinite(each))
            axes: dict[str, Any] = {
                "across": "step",
                "down": "tensor",
                "numbers": False,
                "row": 26,
                "end": 1.0,
            }
            title = f"{stage}: norm / its largest"
            panels.append(heat((norms / largest).T, title, unit="norm / largest", **axes))
            # A log axis has no room for 0.
            positive = finite.where(finite > 0)
            series = {str(name): Series(norms.index.tolist(), positive[name].tolist()) for name in norms}
            panels.append(curve(series, f"{stage}: norm", y="norm", log_y=True, height=320))
        drawn.append(Figure(draw(panels), f"Gradient norms of {run}", caption))
    return drawn


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per run and tensor, its numbers side by side by stage; the medians stand last."""
    import pandas

    def cells(row: Row) -> Row:
        metric = row["metric"].removeprefix("median ")
        shown = {
            f"{row['intervention']}: {metric}": row["value"],
            "n": "all" if pandas.isna(row["n"]) else row["n"],
        }
        if metric == row["metric"]:
            return shown
        others = {f"{row['intervention']}: {metric}, others": row["baseline"]}
        return {**shown, **others, "variant": "attention (others), medians"}

    return side_by_side(frame, lambda row: (row["ref"], row["variant"]), cells)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns that people see: of each tensor, norms of its gradient at every stage of the update."""
    columns = [Column("tensor", "variant")]
    for stage in STAGES:
        for metric, title, digits in SHOWN:
            key = f"{stage}: {metric}"
            if key in frame:
                title = f"{stage}\n{title}" if metric == LARGEST else title
                columns.append(Column(title, key, text(stage, metric, digits)))
    return columns


def text(stage: str, metric: str, digits: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns a writer of a number, with that of the other tensors in brackets where there is one."""

    def known(row: Mapping[str, Any], key: str) -> str:
        value = row.get(f"{stage}: {key}", math.nan)
        return "" if math.isnan(value) else format(value, digits)

    def shown(row: Mapping[str, Any]) -> str:
        value, other = known(row, metric), known(row, f"{metric}, others")
        if other:
            return f"{value or '–'} ({other})"
        # Of a tensor that ends above half there is a rank; a frozen one, or a median, has no other numbers either.
        return "–" if not value and metric == HALF and known(row, RANK) else value

    return shown
