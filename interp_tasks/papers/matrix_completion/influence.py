"""Finds which parts of an input cause which outputs: it changes one position at a time, and sees which outputs move.

Per kind of pair (the ``intervention``) the mean absolute change of the output, and the share that the kind has of all
change, whose ``baseline`` is its share of all pairs. ``variant`` is the model, or a reference of the task's: what
another way to the answer would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import in_passes
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import without_intervals
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, numbers, value_text
from interp_tasks.pages import Column

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from typing_extensions import Unpack

    from tasks.base import Influences

#: How far values move, up or down.
SHIFT = 0.1
DRAWS, LEVEL = 1000, 0.95
MODEL = "model"
CHANGE, PART = "mean |change|", "share of all change"


@experiment("matrix")
def influence(refs: str | Sequence[str], **options: Unpack[Options]) -> Result:
    """See which observed entries move which hidden ones: change one at a time.

    Pooled over pairs in the same row, in the same column and neither; over entries on a shortest path of observed
    entries to the hidden one and off it; beside what the rank-1 ratio would do.

    Args:
        refs: one or several REFs; all see the same examples and the same changes.
        options: samples (default 64), seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that does not say what to change.
    """
    check_has_task("influence", options)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        declared = influences_of(subject)
        moved = {MODEL: changes(subject, declared), **declared.references}
        return [
            row for variant, each in moved.items() for row in rows_of(variant, each, declared, subject.seed)
        ]

    options = {**options, "samples": options.get("samples") or 64}
    result = measure("influence", refs, options, measure_checkpoint, config={"shift": SHIFT})
    notes = (
        f"One entry at a time is given its value ± {SHIFT:g}; change: of the output at each hidden entry.",
        "share of all change: its baseline is the kind's share of all pairs.",
        "Other variants: what that way to the answer would move by, to first order.",
        "Intervals: 95%, bootstrap over examples.",
    )
    return replace(result, notes=notes)


def influences_of(subject: LoadedCheckpoint) -> Influences:
    """Returns the changes of the input that the task declares.

    Raises:
        UserError: if it says nothing, or its output is more than a number.
    """
    task = subject.task
    assert task is not None
    assert subject.batch is not None
    influences = task.influences(subject.batch, SHIFT, subject.seed)
    if influences is None:
        raise UserError(f"task {task.name!r} does not say what may be changed in its inputs (influences)")
    if task.d_vocab_out != 1:
        raise UserError(
            f"task {task.name!r} has {task.d_vocab_out} outputs per position; influence needs one"
        )
    if not (influences.changed[:, :, None] & influences.read[:, None]).any():
        raise UserError(f"{subject.labels['ref']}: no example has both an entry to change and one to read")
    return influences


def changes(subject: LoadedCheckpoint, declared: Influences) -> Tensor:
    """Returns the changes of outputs ``[batch changed read]``, float64; 0 where no input was changed."""
    import torch

    from circuits import run

    model, tokens = subject.model, subject.tokens
    examples, places = declared.changed.nonzero(as_tuple=True)
    edited = tokens[examples]
    edited[torch.arange(len(edited), device=tokens.device), places] = declared.tokens[examples, places]
    clean, after = (
        torch.cat([run(model, part)[..., 0].double() for part in in_passes(given)])
        for given in (tokens, edited)
    )
    moved = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.float64, device=tokens.device)
    moved[examples, places] = after - clean[examples]
    return moved


def rows_of(variant: str, moved: Tensor, declared: Influences, seed: int) -> list[Row]:
    """Returns two rows per kind of pair: the mean change, and the kind's share of it beside that of all pairs."""
    import torch

    from circuits.statistics import bootstrap, interval, ratio

    known = ~moved.isnan()
    sizes = moved.nan_to_num(0.0).abs().double()
    pairs = (declared.changed[:, :, None] & declared.read[:, None] & known).double()
    total, all_pairs = (sizes * pairs).sum((1, 2)), pairs.sum((1, 2))
    sums, counts, kinds = [], [], []
    for kind, mask in declared.kinds.items():
        inside = pairs * mask
        change, number = (sizes * inside).sum((1, 2)), inside.sum((1, 2))
        if number.sum():
            sums += [change, change, number]
            counts += [number, total, all_pairs]
            kinds.append(kind)
    if not kinds:
        return []
    sum_array, count_array = (torch.stack(each).cpu().numpy() for each in (sums, counts))
    values = ratio(sum_array.sum(1), count_array.sum(1))
    resampled = bootstrap(sum_array, count_array, seed, DRAWS)
    ends = list(zip(*interval(resampled, LEVEL), strict=True))
    gaps = list(zip(*interval(resampled[:, 1::3] - resampled[:, 2::3], LEVEL), strict=True))
    rows: list[Row] = []
    for index, kind in enumerate(kinds):
        about = {"variant": variant, "intervention": kind, "n": len(moved), "engine": "naive"}
        at = 3 * index
        rows.append({**about, "metric": CHANGE, **numbers(values[at], ends[at])})
        share = numbers(values[at + 1], ends[at + 1], values[at + 2], gaps[index])
        rows.append({**about, "metric": PART, **share})
    return rows if len(moved) > 1 else [without_intervals(row) for row in rows]


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns; the kind of pair distinguishes rows."""
    return [
        Column("variant", "variant"),
        Column("pairs", "intervention"),
        Column("metric", "metric"),
        Column("value [95% CI]", "value", value_text),
        Column("share of pairs", "baseline"),
    ]
