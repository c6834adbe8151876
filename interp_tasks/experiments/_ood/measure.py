"""Models on data unlike that of their training, beside a method that knows of no training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interp_tasks.measurement.baselines.comparison import (
    PAIRED,
    Comparison,
    ComparisonResult,
    baseline_note,
    chosen,
    declared,
    forward,
    metrics_and_properties,
)
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import Examples, LoadedCheckpoint, Options, check_has_task

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tasks import Task

GROUPS = ("entries", "rank", "rows", "columns")
#: The metric that counts positions whose embedding training never used.
UNTRAINED = "untrained_positions"


def metrics_of_ood(task: Any) -> Sequence[str]:
    """Returns the names of the metrics that rows can have: the task's, its outputs' properties, and the count."""
    own = metrics_and_properties(task)
    return [*own, UNTRAINED] if own else ()


@experiment("matrix", says={"vary": list(GROUPS), "method": None}, metrics=metrics_of_ood)
def ood(
    refs: str | Sequence[str],
    vary: Annotated[
        str | Sequence[str],
        typer.Option(
            "--vary", metavar="GROUP", help="Variations of the task; repeat.", show_default=", ".join(GROUPS)
        ),
        list[str],
    ] = GROUPS,
    method: Annotated[
        str | None, typer.Option("--method", metavar="NAME", help="The method.", show_default="the first")
    ] = None,
    **options: Unpack[Options],
) -> ComparisonResult:
    """Try models on other laws of the entries, ranks, numbers of rows and columns than they were trained on.

    Beside each stands a method that is not trained. Shapes that a model cannot take are named in the notes, as are
    those that use positions it was never trained at.

    Gopalani, Lubana, Hu 2024, appendix J.2 and figure 19.

    Args:
        refs: one or several REFs; all see the same examples.
        vary: groups of the task's ``variations()``.
        method: one of the task's ``baselines()``; default: the first.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.

    Returns:
        A row per checkpoint, variation (the ``variant``) and metric: ``value`` is the model's, ``baseline`` the
        method's; ``site`` names the group. The metric ``untrained_positions`` counts positions of the input that the
        task of training has not. Variations that a model cannot take have that row only, with no value, and a note.

    Raises:
        UserError, TaskError: in one line.
    """
    names = [vary] if isinstance(vary, str) else list(vary)
    check_has_task("ood", options)
    comparison = Comparison(Examples.of(options), options.get("progress"))
    note_texts: dict[str, None] = {}
    used: dict[str, None] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        """Measures one checkpoint on every variation of its task; the notes say which do not fit it."""
        import pandas

        assert subject.task is not None
        known = declared(subject.task, "baselines")
        using = chosen(known, [method] if method else [], "--method", subject.task) or list(known)[:1]
        used.update(dict.fromkeys(using))
        groups = declared(subject.task, "variations")
        rows: list[dict[str, Any]] = []
        # Every group has the task of training among its own.
        compared: dict[Any, list[dict[str, Any]]] = {}
        for group in chosen(groups, names, "--vary", subject.task):
            for name, task in groups[group].items():
                about = {"variant": name, "site": group}
                new = max(0, task.sequence_length - subject.task.sequence_length)
                wrong = misfit(task, subject.model)
                count = {"metric": UNTRAINED, "value": float("nan") if wrong else float(new)}
                size = len(comparison.batch(task))
                rows.append({**about, **count, "n": size, "intervention": "untrained positions"})
                if wrong:
                    note_texts[f"{name}: not measured at {subject.labels['ref']}; {wrong}."] = None
                    continue
                if new:
                    note_texts[f"{name}: {new} of {task.sequence_length} positions were never trained."] = (
                        None
                    )
                if task not in compared:
                    output = forward(subject.model, comparison.batch(task).tokens)
                    compared[task] = comparison.rows(task, output, using, subject.seed)
                rows += [{**row, **about} for row in compared[task]]
        return Measured(pandas.DataFrame(rows), {})

    result = measure("ood", refs, options, measure_checkpoint, config={"vary": names, "method": method})
    notes = (
        PAIRED,
        f"{baseline_note(list(used))}, on the same examples.",
        "Position m·i + j is entry (i, j): with other columns the same entry stands at another position.",
        *note_texts,
    )
    return ComparisonResult.of(result, notes=notes)


def misfit(task: Task, model: Any) -> str:
    """Returns the reason why a model cannot take a task's inputs; empty where it can."""
    from tasks.errors import TaskError

    try:
        task.check_model(model)
    except TaskError as error:
        return str(error)
    return ""
