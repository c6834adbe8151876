"""Published numbers on a run's task: beside ours as claims with verdicts, and as marks in figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.published import Claim, Paper, Study, TrainingRun, papers, read_paper
from interp_tasks.report.snapshots import ALL, MODES

if TYPE_CHECKING:
    import pandas

    from interp_tasks.measurement.run_logs import Run
    from interp_tasks.report.snapshots import View
    from interp_tasks.reproduction.verdicts import Outcome


@dataclass(frozen=True)
class Mark:
    """A published number in the unit of our run, with its place in a figure and its text.

    Attributes:
        of_curve: whether it belongs in the training curve, or else to the model with all heads edited.
    """

    metric: str
    step: float
    value: float
    says: str
    of_curve: bool


@dataclass(frozen=True)
class Published:
    """The numbers published on the task of a view, beside those measured."""

    outcomes: Sequence[tuple[Paper, Outcome]]
    marks: Sequence[Mark]


def published_beside(view: View) -> Published:
    """Judges the claims that a report's numbers decide: on the training curve, and on all heads edited at once."""
    from interp_tasks.reproduction.verdicts import Outcome, judge

    run = view.source.run
    if view.task is None or run is None or view.part:
        return Published((), ())
    outcomes: list[tuple[Paper, Outcome]] = []
    marks: list[Mark] = []
    for paper, study, played in studies(view.task.name, run):
        frame = study_frame(view, study)
        if frame is None:
            continue
        for claim in paper.claim:
            if claim.study != study.id or claim.where.get("ref") not in (None, *view.source.marks):
                continue
            unfit = "" if played is None else claim.scale.get(played.preset, "") or played.untestable
            if unfit:
                outcomes.append((paper, Outcome(claim, view.name, 0, "not testable", reason=unfit)))
                continue
            outcome = judge(claim, frame, view.name)
            if outcome.verdict == "error":
                continue
            outcomes.append((paper, outcome))
            marks += marks_of(claim, paper, frame, view)
    return Published(outcomes, marks)


def studies(task: str, run: Run) -> Iterator[tuple[Paper, Study, TrainingRun | None]]:
    """Yields the studies of papers on this task that the report measures too.

    What is said of curves and edits holds for any run of the task; of when it generalises, for a run with the settings
    of one of the paper's, which comes along.
    """
    from interp_tasks.reproduction.runs import is_alike

    for paper in map(read_paper, papers()):
        planned = [each for each in paper.run if each.task == task]
        roles = {each.role for each in planned}
        alike = {each.role: each for each in planned if is_alike(each, run.path)}
        tables: list[Any] = []
        for study in paper.study:
            settings = {key: value for key, value in study.settings.items() if key != "samples"}
            edits = settings.keys() <= {"heads", "mode"} and settings.get("heads") in ("all", ["all"], None)
            known = study.experiment == "curve" or (
                study.experiment == "ablation" and edits and settings.get("mode", "uniform") in MODES
            )
            # One measurement that the paper makes on several kinds of runs is one here.
            measured = (study.experiment, study.at, settings)
            if study.role in roles and known and measured not in tables:
                tables.append(measured)
                yield paper, study, None
            if (
                study.role in alike
                and study.experiment == "generalisation"
                and not (settings or study.together)
            ):
                yield paper, study, alike[study.role]


def study_frame(view: View, study: Study) -> pandas.DataFrame | None:
    """Returns the rows of this report that stand for a study's table; ``None`` where there are none."""
    import pandas

    from interp_tasks.experiments._curve.measure import fall, levels
    from interp_tasks.measurement.table import tidy

    run, curve = view.source.run, view.source.curve
    assert run is not None
    if study.experiment == "curve":
        if curve is None:
            return None
        curves = {name: run.curve(name) for name in run.logged() if run.points(name)[1]}
        return tidy(pandas.DataFrame([*levels(run, curve, curves), *fall(run, curve)]))
    if study.experiment == "generalisation":
        return generalisation_rows(run)
    effects = view.effects()
    mode = study.settings.get("mode", "uniform")
    rows = effects[(effects["variant"] == ALL) & (effects["intervention"] == mode)]
    marked = [
        rows[rows["step"] == step].assign(ref=f"{run.name}@{mark}")
        for mark, step in view.source.marks.items()
        if step in view.steps
    ]
    if not marked:
        return None
    return tidy(pandas.concat(marked, ignore_index=True).assign(run=run.name, n_runs=1))


def generalisation_rows(run: Run) -> pandas.DataFrame | None:
    """Returns the steps at which each accuracy of a run reaches the default level."""
    import pandas

    from interp_tasks.experiments._generalisation.reaches import LEVEL, order_rows, reaches_of, rows_of
    from interp_tasks.measurement.table import tidy

    reaches = reaches_of(run, LEVEL)
    rows = [*rows_of(run, reaches, LEVEL), *order_rows(run, reaches, LEVEL)]
    return tidy(pandas.DataFrame(rows)) if rows else None


def marks_of(claim: Claim, paper: Paper, frame: pandas.DataFrame, view: View) -> Iterator[Mark]:
    """Yields marks of a claim's published number; none where it is no level of a metric."""
    from interp_tasks.reproduction.claim_numbers import row_divisor
    from interp_tasks.reproduction.claim_rows import rows_where

    rows = rows_where(frame, claim.where)
    if claim.number is None or len(rows) != 1:
        return
    row: Any = rows.to_dict("records")[0]
    value = claim.number * row_divisor(claim, rows.iloc[0], frame)
    value += row["baseline"] if claim.column == "effect" else 0.0
    says = f"published: {claim.published}<br>{paper.name}, {claim.source}<br>in the unit of this run: {value:.4g}"
    if "ref" in claim.where:
        yield Mark(row["metric"], float(view.source.marks[claim.where["ref"]]), value, says, False)
        return
    curve = view.source.curve
    if curve is not None and row["variant"] in ("plateau", "final"):
        middle = curve.drop.crossing / 3 if curve.drop is not None else curve.steps[-1] / 10
        step = float(curve.steps[-1]) if row["variant"] == "final" else middle
        yield Mark(row["metric"], step, value, says, True)
