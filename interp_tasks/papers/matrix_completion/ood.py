"""Models on data unlike that of their training, beside a method that knows of no training.

A row per checkpoint, variation (the ``variant``) and metric: ``value`` is the model's, ``baseline`` the method's;
``site`` names the group. The metric ``untrained_positions`` counts positions of the input that the task of training
has not. Variations that a model cannot take have that row only, with no value, and a note.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, effect_text, value_text
from interp_tasks.pages import Column
from interp_tasks.papers.matrix_completion.comparison import (
    PAIRED,
    TRUTH,
    Comparison,
    chosen,
    declared,
    figures,
    forward,
)

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from tasks import Task

__all__ = ["figures", "ood", "view_columns", "view_rows"]

GROUPS = ("entries", "rank", "rows", "columns")
#: The metric that counts positions whose embedding training never used.
UNTRAINED = "untrained_positions"
VARY = typer.Option(
    "--vary", metavar="GROUP", help="Variations of the task; repeat.", show_default=", ".join(GROUPS)
)


@experiment("matrix", says={"vary": list(GROUPS)}, judged_by_task=True)
def ood(
    refs: str | Sequence[str],
    vary: Annotated[str | Sequence[str], VARY, list[str]] = GROUPS,
    **options: Unpack[Options],
) -> Result:
    """Try models on other laws of the entries, ranks, numbers of rows and columns than they were trained on.

    Beside each stands a method that is not trained, the first of the task's. Shapes that a model cannot take are named
    in the notes, as are those that use positions it was never trained at.

    Gopalani, Lubana, Hu 2024, appendix J.2 and figure 19.

    Args:
        refs: one or several REFs; all see the same examples.
        vary: groups of the task's ``variations()``.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError: in one line.
    """
    names = [vary] if isinstance(vary, str) else list(vary)
    check_has_task("ood", options)
    comparison = Comparison(Examples.of(options))
    misfits: dict[str, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures one checkpoint on every variation of its task."""
        task = subject.task
        assert task is not None
        using = list(declared(task, "baselines"))[:1]
        groups = declared(task, "variations")
        rows: list[Row] = []
        # Every group has the task of training among its own.
        compared: dict[Any, list[Row]] = {}
        for group in chosen(groups, names, "--vary", task):
            for name, other in groups[group].items():
                about = {"variant": name, "site": group}
                batch, new = comparison.batch(other), max(0, other.sequence_length - task.sequence_length)
                count = {"metric": UNTRAINED, "intervention": "untrained positions", "n": len(batch)}
                wrong = misfit(other, subject.model)
                rows.append({**about, **count, "value": math.nan if wrong else float(new)})
                if wrong:
                    misfits[f"{name}: not measured at {subject.labels['ref']}; {wrong}."] = None
                    continue
                if other not in compared:
                    output = forward(subject.model, batch.tokens)
                    compared[other] = comparison.rows(other, output, using, subject.seed)
                rows += [{**row, **about} for row in compared[other]]
        return rows

    result = measure("ood", refs, options, measure_checkpoint, config={"vary": names})
    notes = (
        PAIRED,
        "baseline: the first method of the task, on the same examples.",
        "Position m·i + j is entry (i, j): with other columns the same entry stands at another position.",
        *misfits,
    )
    return replace(result, notes=notes)


def misfit(task: Task, model: Any) -> str:
    """Returns the reason why a model cannot take a task's inputs; empty where it can."""
    from tasks.errors import TaskError

    try:
        task.check_model(model)
    except TaskError as error:
        return str(error)
    return ""


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns the rows against the method; the count of untrained positions only where nothing else is asked for."""
    rows = frame[frame["intervention"] != TRUTH]
    measured = rows[rows["metric"] != UNTRAINED]
    return rows if measured.empty else measured


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    """Returns the columns of ``view_rows``; a shape may be named twice, by its rows and by its columns."""
    return [
        Column("varied", "site"),
        Column("variant", "variant"),
        Column("metric", "metric"),
        Column("baseline", "baseline"),
        Column("value [95% CI]", "value", value_text),
        Column("effect [95% CI]", "effect", effect_text),
    ]
