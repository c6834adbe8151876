"""Finds which weights stop moving first: gradient norms of each tensor over training, before and after the filter.

The ``variant`` is a tensor, ``intervention`` the stage: ``raw``, or ``filtered`` as the optimiser saw it where a
filter was on. ``step below half``: the first logged step from which the norm stays below half of its largest, empty
if it ends above; its rank among the tensors, 1 the earliest. Of ``attention`` against ``other tensors`` the medians of
ranks, the others' as ``baseline``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import heatmap
from interp_tasks.checkpoints.run_reader import read_metrics
from interp_tasks.errors import UserError
from interp_tasks.measurement.confidence_intervals import finite_or_nan
from interp_tasks.measurement.logged_runs import LoggedRun, read_runs
from interp_tasks.measurement.result import Result, Row, experiment, number_columns, tidy_frame
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas

#: Before and after the filter, as the trainer logs them; without a filter there is only the first.
STAGES = ("raw", "filtered")
#: The key of a line of the log.
LOGGED = "gradient_norm"
RANK = "rank of the step below half"
#: Columns of the table -> their headers.
HEADERS = {"variant": "tensor", "intervention": "gradient", "largest norm": "largest norm"} | {
    "step below half": "step below half",
    RANK: "rank",
    f"median {RANK}": "median rank",
    "baseline": "others'",
}
START = typer.Option("--start", help="Leave out what was logged before this step.")


@experiment(says={"start": 0}, side_by_side=HEADERS)
def gradients(runs: str | Sequence[str], start: Annotated[int, START] = 0) -> Result:
    """Say when the gradient of each weight becomes small, before and after the filter; attention beside the rest.

    Of runs trained with train.gradient_norms_every above 0.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``, trained with ``train.gradient_norms_every`` above 0.
        start: only what was logged from this step on: the first steps can be larger than all that follows (the
            published figure begins at 1,000 of 65,536).
    """

    if start < 0:
        raise UserError(f"--start {start}: a step from 0")
    logged = [(run, read_gradient_norms(run, start)) for run in read_runs(runs)]
    rows = [
        row for run, stages in logged for each in stages.items() for row in step_below_half_rows(run, *each)
    ]
    notes = (
        "step below half: from there on every logged norm is below half of the tensor's largest; – if the last one is "
        "not. rank: 1 is the earliest; ties share their mean rank. attention: the median of its tensors, and of "
        "the others.",
        "raw: the gradient of the loss. filtered: after Grokfast and before clipping, which the optimiser sees; none "
        "without a filter.",
    )
    config = {"runs": [run.name for run, _ in logged], "start": start}
    data = {"logged": {run.name: stages for run, stages in logged}}
    return Result("gradients", tidy_frame(rows), config, notes, data=data)


def read_gradient_norms(run: LoggedRun, start: int) -> dict[str, pandas.DataFrame]:
    """Returns the norms that a run logged by stage, a row per step and a column per tensor.

    One that is not finite (a diverged step) is infinite, not small.
    """
    import pandas

    lines = [line for line in read_metrics(run.path) if LOGGED in line and line["step"] >= start]
    if not lines:
        raise UserError(
            f"{run.name} logged no gradient norms from step {start} on: train with "
            "--set train.gradient_norms_every=100"
        )
    steps, by_stage = [line["step"] for line in lines], {}
    for stage in STAGES:
        try:
            norms = pandas.DataFrame([line[LOGGED].get(stage) or {} for line in lines], index=steps)
            by_stage[stage] = norms.astype(float).fillna(math.inf)
        except (AttributeError, TypeError, ValueError):
            raise UserError(f"the log of {run.name} is mangled: {LOGGED} has no norms by tensor") from None
    return {stage: norms for stage, norms in by_stage.items() if norms.size}


def step_below_half_rows(run: LoggedRun, stage: str, norms: pandas.DataFrame) -> Iterator[Row]:
    """Yields the rows of each tensor; one that is frozen, with a gradient of 0 throughout, has only its norm."""
    import statistics

    from scipy.stats import rankdata

    # A gradient is of the batch of its step; without a size that is the whole split.
    batch = run.config.get("train", {}).get("batch_size")
    shared = {
        **run.label_columns(),
        "experiment": "gradients",
        "intervention": stage,
        "split": "train",
        "n": batch,
    }
    steps = {str(name): lasting_step_below_half(values) for name, values in norms.items() if values.max()}
    ranks = dict(zip(steps, rankdata(list(steps.values())).tolist(), strict=True)) if steps else {}
    for name, values in norms.items():
        yield {**shared, "variant": name, "metric": "largest norm", "value": float(values.max())}
    for name, step in steps.items():
        yield {**shared, "variant": name, "metric": "step below half", "value": finite_or_nan(step)}
        yield {**shared, "variant": name, "metric": RANK, "value": ranks[name]}
    attention, others = (
        [rank for name, rank in ranks.items() if (".attn." in name) is is_attention]
        for is_attention in (True, False)
    )
    if attention and others:
        medians = number_columns(statistics.median(attention), baseline=statistics.median(others))
        yield {**shared, "variant": "attention", "metric": f"median {RANK}", **medians}


def lasting_step_below_half(values: pandas.Series) -> float:
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
            axes: dict[str, Any] = {"across": "step", "down": "tensor", "row": 26, "end": 1.0}
            share, title = (norms / largest).T, f"{stage}: norm / its largest"
            panels.append(heatmap(share, title, numbers=False, **axes))
        drawn.append(Figure(draw_panels(panels), f"Gradient norms of {run}", caption))
    return drawn
