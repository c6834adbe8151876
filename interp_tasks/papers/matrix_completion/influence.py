"""Finds which parts of an input cause which outputs: it changes one position at a time, and sees which outputs move.

Per kind of pair (the ``intervention``) the mean absolute change of the output, and the share that the kind has of all
change, whose ``baseline`` is its share of all pairs. ``variant`` is the model, or a reference of the task's: what
another way to the answer would do; a row of its own has the rank correlation of its changes with the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.errors import UserError
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import without_intervals
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, numbers, value_text
from interp_tasks.pages import Column, Figure

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from typing_extensions import Unpack

    from tasks.base import Influences

#: How far values move, up or down.
SHIFT = 0.1
#: Tokens of one forward pass.
TOKENS_PER_PASS = 32768
DRAWS, LEVEL = 1000, 0.95
MODEL = "model"
CHANGE, PART, AGREEMENT = "mean |change|", "share of all change", "correlation with the model"
SHIFT_OPTION = typer.Option("--shift", help="How far a value moves, up or down.")
REDRAW = typer.Option("--redraw", help="Give it another example's value instead.")


@experiment("matrix", says={"shift": None, "redraw": False})
def influence(
    refs: str | Sequence[str],
    shift: Annotated[float | None, SHIFT_OPTION, float] = SHIFT,
    *,
    redraw: Annotated[bool, REDRAW] = False,
    **options: Unpack[Options],
) -> Result:
    """See which observed entries move which hidden ones: change one at a time.

    Pooled over pairs in the same row, in the same column and neither; over entries on a shortest path of observed
    entries to the hidden one and off it; beside what the rank-1 ratio would do.

    Args:
        refs: one or several REFs; all see the same examples and the same changes.
        shift: how far a value moves, up or down by chance; rounded to the task's values, at least one of them.
        redraw: give the position the value of another example instead.
        options: samples (default 64), seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that does not say what to change.
    """
    check_shift(shift)
    check_has_task("influence", options)
    maps: dict[tuple[str, str], Any] = {}
    step = None if redraw else shift

    def measure_checkpoint(subject: LoadedCheckpoint) -> Measured:
        import pandas

        ref, declared = str(subject.labels["ref"]), influences_of(subject, step)
        moved = changes(subject, declared)
        rows = []
        for variant, changed_outputs in {MODEL: moved, **declared.references}.items():
            rows += rows_of(variant, changed_outputs, declared, subject.seed)
            by_distance = by_offset(subject, declared, changed_outputs)
            if by_distance is not None:
                maps[ref, variant] = by_distance
        for variant, reference in declared.references.items():
            rows.append(agreement(variant, moved, reference, declared, subject.seed))
        return Measured(pandas.DataFrame(rows), {})

    options = {**options, "samples": options.get("samples") or 64}
    result = measure("influence", refs, options, measure_checkpoint, config={"shift": step, "redraw": redraw})
    how = "the value of another example" if redraw else f"its value ± {shift:g}"
    notes = (
        f"One entry at a time is given {how}; change: of the output at each hidden entry.",
        "share of all change: its baseline is the kind's share of all pairs.",
        "Other variants: what that way to the answer would move by, to first order.",
        "Intervals: 95%, bootstrap over examples.",
    )
    return replace(result, notes=notes, data={"maps": maps})


def check_shift(shift: float | None) -> None:
    if shift is not None and not 0 < shift < 1e9:
        raise UserError(f"--shift {shift:g}: give a distance above 0 and below 1e9")


def influences_of(subject: LoadedCheckpoint, shift: float | None) -> Influences:
    """Returns the changes of the input that the task declares.

    Raises:
        UserError: if it says nothing, or its output is more than a number.
    """
    task = subject.task
    assert task is not None
    assert subject.batch is not None
    influences = task.influences(subject.batch, shift, subject.seed)
    if influences is None:
        raise UserError(f"task {task.name!r} does not say what may be changed in its inputs (influences)")
    if task.d_vocab_out != 1:
        raise UserError(
            f"task {task.name!r} has {task.d_vocab_out} outputs per position; influence needs one"
        )
    if not (influences.changed[:, :, None] & influences.read[:, None]).any():
        raise UserError(
            f"{subject.labels['ref']}: no example has both an entry to change and one to read, an observed and a "
            "hidden one say"
        )
    return influences


def changes(subject: LoadedCheckpoint, declared: Influences) -> Tensor:
    """Returns the changes of outputs ``[batch changed read]``, float64; 0 where no input was changed."""
    import torch

    model, tokens = subject.model, subject.tokens
    examples, places = declared.changed.nonzero(as_tuple=True)
    moved = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.float64, device=tokens.device)
    step = max(1, TOKENS_PER_PASS // tokens.shape[1])
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            clean = torch.cat([model(part)[..., 0] for part in tokens.split(step)]).double()
            for changed_examples, at in zip(examples.split(step), places.split(step), strict=True):
                edited = tokens[changed_examples]
                rows = torch.arange(len(changed_examples), device=tokens.device)
                edited[rows, at] = declared.tokens[changed_examples, at]
                moved[changed_examples, at] = model(edited)[..., 0].double() - clean[changed_examples]
    finally:
        model.train(training)
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


def agreement(variant: str, moved: Tensor, reference: Tensor, declared: Influences, seed: int) -> Row:
    """Returns a row with the rank correlation of the model's changes with a reference's, over all pairs."""
    import numpy as np

    from interp_tasks.measurement.embeddings import correlation, ranks

    pairs = (declared.changed[:, :, None] & declared.read[:, None] & ~reference.isnan()).cpu()
    row: Row = {"variant": variant, "intervention": "all pairs", "metric": AGREEMENT, "engine": "naive"}
    if not pairs.any():
        return row
    examples = pairs.nonzero()[:, 0].numpy()
    one, other = (ranks(x.cpu()[pairs].double().numpy()) for x in (moved, reference))
    rng = np.random.default_rng([seed, 5])
    count = len(moved)
    resamples = rng.multinomial(count, np.full(count, 1 / count), size=200)
    weights = np.concatenate([np.ones((1, count)), resamples])[:, examples]
    resampled = correlation(one, other, weights)
    low, high = np.nanquantile(resampled[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    row |= {**numbers(resampled[0], (low, high)), "n": count}
    return row if count > 1 else without_intervals(row)


def by_offset(subject: LoadedCheckpoint, influences: Influences, moved: Tensor) -> Any:
    """Returns mean |change| by the source's offset from the target ``[2n − 1, 2m − 1]``; ``None`` without a grid."""
    import numpy as np

    task = subject.task
    assert task is not None
    axes = task.grid_axes()
    if len(axes) != 2 or any(axis.position is not None for axis in axes):
        return None
    sizes = tuple(len(axis.values) for axis in axes)
    cells = sizes[0] * sizes[1]
    at = np.stack(np.unravel_index(np.arange(cells), sizes))
    away = at[:, :, None] - at[:, None] + np.array(sizes)[:, None, None] - 1
    pairs = (influences.changed[:, :, None] & influences.read[:, None] & ~moved.isnan()).cpu().numpy()
    size = moved.nan_to_num(0.0).abs().cpu().numpy()
    shape = tuple(2 * one - 1 for one in sizes)
    sums, counts = np.zeros(shape), np.zeros(shape)
    use = pairs[:, :cells, :cells]
    np.add.at(sums, (away[0], away[1]), (size[:, :cells, :cells] * use).sum(0))
    np.add.at(counts, (away[0], away[1]), use.sum(0))
    return np.divide(sums, counts, out=np.full(shape, np.nan), where=counts > 0)


def view_columns(frame: pandas.DataFrame) -> list[Column]:
    """Returns the columns; the kind of pair distinguishes rows."""
    return [
        Column("variant", "variant"),
        Column("pairs", "intervention"),
        Column("metric", "metric"),
        Column("value [95% CI]", "value", value_text),
        Column("share of pairs", "baseline"),
    ]


def figures(result: Result) -> list[Figure]:
    """Returns a map per checkpoint, and one of each reference, each with its own scale; nothing without a grid."""
    import pandas

    caption = (
        "Mean absolute change of an output when one entry is changed, by where that entry lies from the output's "
        "own: rows down, columns across, the output's own place in the middle."
    )
    panels = []
    for (ref, variant), values in result.data["maps"].items():
        rows, columns = (range(-(size // 2), size // 2 + 1) for size in values.shape)
        table = pandas.DataFrame(values, index=rows, columns=columns)
        axes: dict[str, Any] = {"across": "columns away", "down": "rows away", "numbers": False}
        panels.append(heat(table, f"{variant}<br>{ref}", unit="mean change", width=220, row=24, **axes))
    drawn = [draw(panels, columns=min(2, len(panels)))] if panels else []
    return [Figure(one, "Where the entries are that move an output", caption) for one in drawn]
