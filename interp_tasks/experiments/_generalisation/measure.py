"""Measures when each answer of a run generalises: when its accuracy reaches a level, on both splits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.experiments._generalisation.reaches import (
    ACCURACY,
    LEVEL,
    SPLITS,
    order_rows,
    reaches_of,
    rows_of,
)
from interp_tasks.experiments._generalisation.seeds import groups_of, opponents, pooled, ratio_rows
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.options import check_level
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.run_logs import Run, named, read_runs
from interp_tasks.measurement.table import tidy
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


@dataclass(frozen=True, repr=False)
class GeneralisationResult(Result):
    """A :class:`Result` with the runs behind it."""

    runs: Sequence[Run] = field(default_factory=tuple)
    level: float = 0.95

    def plot(self) -> plotly.graph_objects.Figure:
        """Draws the accuracy of every answer over steps: a line each, or a map where there are many."""
        from interp_tasks.experiments._generalisation.figure import figure

        return self.titled(figure(curves_of(self.runs, ACCURACY), ACCURACY, self.level), self.heading())

    def losses(self) -> plotly.graph_objects.Figure | None:
        """Draws the losses in the same way; ``None`` where the log has no loss for each answer."""
        from interp_tasks.experiments._generalisation.figure import figure

        logged = [run for run in self.runs if any(named(run, "loss"))]
        return figure(curves_of(logged, "loss"), "loss", None) if logged else None

    def heading(self) -> str:
        return "Accuracy of every answer over training"

    def caption(self) -> str:
        return "Validation above, the batches trained on below. Steps on a logarithmic scale."

    def figures(self) -> list[Figure]:
        """Returns the accuracies, and the losses where they are logged by answer."""
        losses = self.losses()
        more = [] if losses is None else [Figure(losses, "Loss of every answer over training")]
        return super().figures() + more


@experiment("modular", says={"level": LEVEL, "against": []})
def generalisation(
    runs: str | Sequence[str],
    level: Annotated[float, typer.Option("--level", help="Of an accuracy, above 0, at most 1.")] = LEVEL,
    against: Annotated[
        str | Sequence[str],
        typer.Option(
            "--against",
            metavar="RUN",
            help="Compare steps with this run, seed by seed; also the end of the name of one given. Repeatable.",
        ),
        list[str],
    ] = (),
) -> GeneralisationResult:
    """Say at which step each accuracy of a run reaches a level, in training and validation, in which order.

    A line per answer; of RUN/seed-0, RUN/seed-1, ... lines more with the medians. A run that does not get there is said
    to be so by its last step. With --against, how many times as many steps it takes as another.

    Args:
        runs: run folders, globs of some, or ``zoo:NAME``; ``RUN/seed-0``, ``RUN/seed-1``, ... are also pooled.
        level: of an accuracy.
        against: runs to compare the steps with, seed by seed: as ``runs``, or what the names of some of ``runs`` end
            with.

    Returns:
        A :class:`GeneralisationResult`. The ``variant`` is an accuracy as the run logs it, the ``split`` validation or
        train; the ``metric`` is ``step at 95%`` and ``step at 95% for good`` (interpolated between logged steps; empty
        for a run that is not there by its last step, which is the ``step`` of the row), ``reached 95%`` (1 or 0),
        ``final level``, ``seconds at 95%`` of a run that logs its clock (updates alone), ``rank correlation with its
        loss`` over logged steps up to that at which it first is at its largest (later ones tie). Of validation,
        ``baseline`` is the step of train, ``effect`` the delay, and ``validation when train is at 95%`` is how far it
        has come by then: chance where a run memorises first, the level where it does not.
        Variants that begin with ``order`` are about several accuracies ``accuracy_q`` of a run: ``place in order`` of
        each, ``pairs in order`` (the share of pairs of which the smaller q comes first), ``last step / first step``.
        Against others: ``ratio of steps``, and what it is ``at least`` and ``at most`` where one side never gets there.
        Rows of several seeds have the median, the range (``..., smallest``, ``..., largest``) and, from three seeds
        on, intervals: Student's t over runs, of ratios on a log scale; of ``reached`` the exact binomial one. A run
        that does not get there counts as later than all others; the interval is then one of the median, from six seeds.

    Raises:
        UserError: in one line.
    """
    check_level(level)
    logged_runs = read_runs(runs)
    reaches = [reach for run in logged_runs for reach in reaches_of(run, level)]
    compared, others = opponents(
        logged_runs, reaches, [against] if isinstance(against, str) else list(against), level
    )
    rows: list[dict[str, Any]] = []
    for run in logged_runs:
        run_reaches = [reach for reach in reaches if reach.run.name == run.name]
        rows += rows_of(run, run_reaches, level)
        rows += order_rows(run, run_reaches, level)
    rows += [
        row
        for name, group in groups_of(logged_runs).items()
        if len(group) > 1
        for row in pooled(name, group, rows)
    ]
    if others:
        rows += ratio_rows(logged_runs, reaches, compared, others)
    import pandas

    frame = tidy(pandas.DataFrame(rows).assign(experiment="generalisation", intervention="none"))
    config = {
        "runs": [runs] if isinstance(runs, str) else list(runs),
        "found": [run.name for run in logged_runs],
        "level": level,
        "against": compared,
    }
    return GeneralisationResult(
        "generalisation",
        frame,
        config,
        (*notes(logged_runs, bool(others)), *unread(logged_runs)),
        runs=logged_runs,
        level=level,
    )


def curves_of(runs: Sequence[Run], kind: str) -> pandas.DataFrame:
    """Returns a row per logged value of the metrics of a kind, validation before train."""
    import pandas

    rows = [
        (run.name, name, split, step, value)
        for split in SPLITS
        for run in runs
        for name in named(run, kind)
        for step, value in zip(*run.points(name, split), strict=True)
    ]
    return pandas.DataFrame(rows, columns=["run", "metric", "split", "step", "value"])


def notes(logged_runs: Sequence[Run], compared: bool) -> tuple[str, ...]:
    """Returns the notes below the table."""
    several = any(len(group) > 1 for group in groups_of(logged_runs).values())
    return (
        "Step: where the accuracy first is at the level, interpolated between logged steps; for good: after it the "
        "accuracy is never below again. Validation is a fixed sample, train the batch of the step.",
        "Delay: steps from train to validation.",
        *(
            ["Of several seeds: the median; a run that does not get there is later than all others."]
            if several
            else []
        ),
        *(
            [
                "Ratio of steps: paired by seed. Where one of a pair does not get there, its last step bounds the "
                "ratio from one side; where neither does, nothing is known and the pair is left out."
            ]
            if compared
            else []
        ),
    )


def unread(logged_runs: Sequence[Run]) -> Iterator[str]:
    """Yields a note for each logged accuracy that is no number at some step."""
    for run in logged_runs:
        for split in SPLITS:
            for name in named(run, ACCURACY, split):
                steps = run.left_out(name, split)
                if steps:
                    yield (
                        f"{run.name}: {split} {name} is no number at {len(steps)} logged step"
                        f"{'s' if len(steps) > 1 else ''}, the first of them {steps[0]}: left out."
                    )
