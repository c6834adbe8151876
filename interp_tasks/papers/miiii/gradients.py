"""Finds which weights stop moving first: gradient norms of each tensor over training, before and after the filter.

The ``variant`` is a tensor, ``intervention`` the stage: ``raw``, or ``filtered`` as the optimiser saw it where a
filter was on. ``step below half``: the first logged step from which the norm stays below half of its largest, empty
if it ends above; its rank among the tensors, 1 the earliest. Of ``attention`` against ``other tensors`` the medians of
ranks, the others' as ``baseline``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.checkpoints.run_files import iterate_metrics
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, read_runs
from interp_tasks.measurement.table import Row, numbers, tidy
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas

#: Before and after the filter, as the trainer logs them; without a filter there is only the first.
STAGES = ("raw", "filtered")
#: The key of a line of the log.
LOGGED = "gradient_norm"
#: Metrics of a tensor.
LARGEST, HALF, RANK = "largest norm", "step below half", "rank of the step below half"
ATTENTION = "attention"
START = typer.Option("--start", help="Leave out what was logged before this step.")


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
    import pandas

    if start < 0:
        raise UserError(f"--start {start}: a step from 0")
    logged_runs = read_runs(runs)
    logged = {run.name: read_norms(run, start) for run in logged_runs}
    rows = [
        row
        for run in logged_runs
        for stage, norms in logged[run.name].items()
        for row in rows_of(run, stage, norms)
    ]
    config = {"runs": [run.name for run in logged_runs], "start": start}
    return Result("gradients", tidy(pandas.DataFrame(rows)), config, notes(logged), data={"logged": logged})


def notes(logged: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    unfiltered = [run for run, stages in logged.items() if len(stages) == 1]
    return (
        "step below half: from there on every logged norm is below half of the tensor's largest; empty if the last one "
        "is not. rank: 1 is the earliest; ties share their mean rank. attention: the median of its tensors (of the "
        "others).",
        "raw: the gradient of the loss. filtered: after Grokfast and before clipping, which the optimiser sees.",
        *(["No filter, so no filtered norms: " + ", ".join(unfiltered) + "."] if unfiltered else []),
    )


def read_norms(run: Run, start: int) -> dict[str, pandas.DataFrame]:
    """Returns the norms that a run logged by stage, a row per step and a column per tensor.

    Raises:
        UserError: if it logged none from this step on, or they are mangled.
    """
    import pandas

    every = [line for line in iterate_metrics(run.path) if LOGGED in line]
    lines = [line for line in every if line["step"] >= start]
    if every and not lines:
        last = every[-1]["step"]
        raise UserError(f"{run.name} logged no gradient norms from step {start} on: its last are of {last}")
    if not lines:
        raise UserError(
            f"{run.name} logged no gradient norms: train with --set train.gradient_norms_every=100"
        )
    by_stage: dict[str, pandas.DataFrame] = {}
    for stage in STAGES:
        tables = [line[LOGGED].get(stage) if isinstance(line[LOGGED], dict) else {} for line in lines]
        if stage != STAGES[0] and not any(tables):
            continue
        names = list(tables[0] or {})
        if not names or any(not isinstance(table, dict) or list(table) != names for table in tables):
            raise UserError(
                f"the log of {run.name} is mangled: {LOGGED} has not the same tensors in every line"
            )
        values = [[number(value) for value in table.values()] for table in tables]
        by_stage[stage] = pandas.DataFrame(values, index=[line["step"] for line in lines], columns=names)
    return by_stage


def number(value: Any) -> float:
    """Returns a logged norm; one that is not finite (a diverged step) counts as infinite, not as small."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.inf


def rows_of(run: Run, stage: str, norms: pandas.DataFrame) -> Iterator[Row]:
    """Yields the rows of each tensor; one that is frozen, with a gradient of 0 throughout, has only its norm."""
    import statistics

    from scipy.stats import rankdata

    # A gradient is of the batch of its step; without a size that is the whole split.
    batch = run.config.get("train", {}).get("batch_size")
    shared = {**run.labels(), "experiment": "gradients", "intervention": stage, "split": "train", "n": batch}
    steps = {str(name): step_below_half(values) for name, values in norms.items() if values.max()}
    ranked = dict(zip(steps, rankdata(list(steps.values())).tolist(), strict=True)) if steps else {}
    for name, values in norms.items():
        about = {**shared, "variant": name}
        yield {**about, "metric": LARGEST, "value": float(values.max())}
        if name in steps:
            half = steps[str(name)]
            yield {**about, "metric": HALF, "value": half if half < math.inf else math.nan}
            yield {**about, "metric": RANK, "value": ranked[str(name)]}
    attention = [rank for name, rank in ranked.items() if ".attn." in name]
    others = [rank for name, rank in ranked.items() if ".attn." not in name]
    if attention and others:
        medians = numbers(statistics.median(attention), baseline=statistics.median(others))
        yield {**shared, "variant": ATTENTION, "metric": f"median {RANK}", **medians}


def step_below_half(values: pandas.Series) -> float:
    """Returns the first logged step from which all are below half of the largest; infinite if the last is not."""
    above = (~(values < values.max() / 2)).to_numpy().nonzero()[0]
    return float(values.index[above[-1] + 1]) if above[-1] + 1 < len(values) else math.inf


def figures(result: Result) -> list[Figure]:
    """Returns of each run and stage a map of each tensor's norm over its largest."""
    caption = "Each tensor's norm over its own largest."
    drawn = []
    for run, stages in result.data["logged"].items():
        panels = []
        for stage, norms in stages.items():
            # Of one that is 0 or infinite nothing is a share.
            largest = norms.max().where(lambda each: (each > 0) & (each < math.inf))
            axes: dict[str, Any] = {
                "across": "step",
                "down": "tensor",
                "numbers": False,
                "row": 26,
                "end": 1.0,
            }
            panels.append(heat((norms / largest).T, f"{stage}: norm / its largest", **axes))
        drawn.append(Figure(draw(panels), f"Gradient norms of {run}", caption))
    return drawn
