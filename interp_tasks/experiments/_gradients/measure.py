"""Finds which weights stop moving first: gradient norms of each tensor over training, before and after the filter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.checkpoints.drop import final_level
from interp_tasks.errors import UserError
from interp_tasks.experiments._gradients.table import (
    AT,
    ATTENTION,
    FINAL,
    HALF,
    LARGEST,
    LOGGED,
    OTHERS,
    RANK,
    STAGES,
)
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, read_runs
from interp_tasks.measurement.table import tidy
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import plotly.graph_objects


@dataclass(frozen=True)
class Norms:
    """Gradient norms of one run at one stage: ``norms`` name -> a number per step; ``steps`` ascending."""

    steps: tuple[int, ...]
    norms: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, repr=False)
class GradientsResult(Result):
    """A :class:`Result` with the norms behind it: run -> stage -> norms."""

    logged: Mapping[str, Mapping[str, Norms]] = field(default_factory=dict)

    def plot(self, run: str | None = None) -> plotly.graph_objects.Figure:
        """Draws a run (default: the first): each tensor's norm by step, relative to its largest, and absolute."""
        import pandas

        from interp_tasks.experiments._gradients.figure import figure

        run = next(iter(self.logged)) if run is None else run
        tables = {
            stage: pandas.DataFrame(dict(norms.norms), index=list(norms.steps))
            for stage, norms in self.logged[run].items()
        }
        return self.titled(figure(tables), f"Gradient norms of {run}")

    def page_title(self) -> str:
        return self.experiment

    def figures(self) -> list[Figure]:
        """Returns a figure of each run."""
        return [Figure(self.plot(run), f"Gradient norms of {run}", self.caption()) for run in self.logged]

    def caption(self) -> str:
        return "Maps: each tensor's norm over its own largest. Lines: the norms themselves, on a log axis."


@experiment("modular", says={"start": 0})
def gradients(
    runs: str | Sequence[str],
    start: Annotated[int, typer.Option("--start", help="Leave out what was logged before this step.")] = 0,
) -> GradientsResult:
    """Say when the gradient of each weight becomes small, before and after the filter; attention beside the rest.

    Of runs trained with train.gradient_norms_every above 0.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``, trained with ``train.gradient_norms_every`` above 0.
        start: only what was logged from this step on: the first steps can be larger than all that follows (the
            published figure begins at 1,000 of 65,536).

    Returns:
        A :class:`GradientsResult`. The ``variant`` is a tensor, ``intervention`` the stage: ``raw``, or ``filtered``
        as the optimiser saw it where a filter was on. ``largest norm`` with its step; ``final norm / largest``, of the
        last tenth; ``step below half``: the first logged step from which the norm stays below half of its largest,
        empty if it ends above; its rank among the tensors, 1 the earliest. Of ``attention`` against ``other tensors``
        their medians, the others' as ``baseline``; a tensor that ends above half counts as later than all others.

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
    return GradientsResult("gradients", tidy(pandas.DataFrame(rows)), config, notes(logged), logged=logged)


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
    lines = [line for line in run.lines if line["step"] >= start and LOGGED in line]
    if not lines:
        logged = [line["step"] for line in run.lines if LOGGED in line]
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


def rows_of(run: Run, stage: str, norms: Norms) -> Iterator[dict[str, Any]]:
    """Yields the rows of each tensor; one that is frozen, with a gradient of 0 throughout, has only its norm."""
    # A gradient is of the batch of its step; without a size that is the whole split.
    batch = run.config.get("train", {}).get("batch_size")
    shared = {**run.labels(), "experiment": "gradients", "intervention": stage, "split": "train", "n": batch}
    steps = {
        name: step_below_half(norms.steps, values) for name, values in norms.norms.items() if max(values)
    }
    ranked = ranks(steps)
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
        attention_median, others_median = (
            median([of[name] for name in groups[group]]) for group in (ATTENTION, OTHERS)
        )
        compared = {
            "value": attention_median,
            "baseline": others_median,
            "effect": attention_median - others_median,
        }
        yield {**shared, "variant": ATTENTION, "metric": f"median {metric}", **compared}


def step_below_half(steps: Sequence[int], values: Sequence[float]) -> float:
    """Returns the first logged step from which all are below half of the largest; infinite if the last is not."""
    above = [index for index, value in enumerate(values) if not value < max(values) / 2]
    return float(steps[above[-1] + 1]) if above[-1] + 1 < len(steps) else math.inf


def ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Ranks from 1, ties with their mean rank."""
    return {
        name: 1
        + sum(other < value for other in values.values())
        + (sum(other == value for other in values.values()) - 1) / 2
        for name, value in values.items()
    }


def median(values: Sequence[float]) -> float:
    """Returns the median; NaN where half of the values or more are infinite."""
    import statistics

    middle = statistics.median(values)
    return middle if middle < math.inf else math.nan
