"""Compares a model's read-out after each layer with known methods, entry by entry.

Per checkpoint, read-out (``site``, ``layer``), method (the ``variant``) and kind of entries (the ``intervention``)
three metrics. ``distance``: the mean squared difference; its ``baseline`` is that between read-out and truth, so that
a negative ``effect`` says that the read-out is nearer to the method than to what is right. ``r_predictions``:
correlation with the method's predictions; ``baseline``: with the truth. ``r_errors``: correlation of the errors of
both; no value where a method has none. The method ``truth`` has the read-out's own error as ``distance``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.measurement.activations import place_of_readout
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.paired import LEVEL, paired, resamples, without_intervals
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import LoadedCheckpoint, Options, check_has_task
from interp_tasks.measurement.table import Row, numbers, side_by_side
from interp_tasks.pages import Column, Figure, number, with_interval
from interp_tasks.papers.matrix_completion.comparison import chosen, declared

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from typing_extensions import Unpack

#: The metrics of a row: of the distance of predictions, of the correlation of predictions and of errors.
DISTANCE, PREDICTIONS, ERRORS = "distance", "r_predictions", "r_errors"
#: Whose rows compare the read-out with what is right.
TRUTH = "truth"
HEADERS = {DISTANCE: "distance [95% CI]", PREDICTIONS: "r", ERRORS: "r of errors [95% CI]"}
#: Numbers whose s.d. is below this count as constant; values of the tasks are of order 1.
CONSTANT = 1e-6
METHODS = typer.Option(
    "--method", metavar="NAME", help="One that the task declares; repeat.", show_default="all"
)
ENTRIES = typer.Option(
    "--entries", metavar="KIND", help="Kind of entries it declares; repeat.", show_default="all"
)


@experiment("matrix", says={"methods": [], "entries": []})
def algorithm(
    refs: str | Sequence[str],
    methods: Annotated[str | Sequence[str], METHODS, list[str]] = (),
    entries: Annotated[str | Sequence[str], ENTRIES, list[str]] = (),
    **options: Unpack[Options],
) -> Result:
    """Ask which known method fills in the blanks as the model does: agreement of predictions and of errors.

    The table is about the output; files, JSON, CSV and the figure have the read-out after each layer too.

    Args:
        refs: one or several REFs; all see the same examples.
        methods: names of those that the task declares in ``methods()``; default: all.
        entries: kinds of entries that it declares in ``entry_groups(batch)``; default: all.
        options: samples, seed, split, task, task_config, device, progress: see :class:`Options`.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that declares no methods.
    """
    methods, entries = ([given] if isinstance(given, str) else list(given) for given in (methods, entries))
    check_has_task("algorithm", options)
    known: dict[tuple[Any, str], Tensor] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures how far one checkpoint's answers agree with each method's, by kind of entry."""
        task: Any = subject.task
        assert subject.batch is not None
        batch = subject.batch.to("cpu")
        truth, groups = batch.targets.double(), task.entry_groups(batch)
        using = chosen(declared(task, "methods"), methods, "--method", task)
        kinds = chosen(groups, entries, "--entries", task)
        for name in using:
            if (task, name) not in known:
                known[task, name] = declared(task, "methods")[name](batch).squeeze(-1).double()
        others = {name: known[task, name] for name in using} | {TRUTH: truth}
        return [
            {**row, **about, "variant": name, "intervention": kind}
            for about, output in readouts(subject)
            for kind in kinds
            for name, other in others.items()
            for row in agreement(output, other, truth, groups[kind], subject.seed)
        ]

    config = {"methods": methods, "entries": entries}
    result = measure("algorithm", refs, options, measure_checkpoint, config=config)
    notes = (
        "distance: mean squared difference of read-out and method; baseline: of read-out and truth.",
        "r_predictions, r_errors: correlations over entries of predictions (baseline: with the truth), and of errors.",
        "Intervals: 95%, bootstrap over examples.",
    )
    return replace(result, notes=notes)


def readouts(subject: LoadedCheckpoint) -> list[tuple[dict[str, Any], Tensor]]:
    """Returns (labels, output [batch pos]) of the read-out after the embedding and after each layer."""
    import torch

    from circuits import lens

    parts = [lens(subject.model, chunk).readouts for chunk in subject.tokens.split(1024)]
    return [
        (place_of_readout(name), torch.cat([part[name].squeeze(-1).double().cpu() for part in parts]))
        for name in parts[0]
    ]


def agreement(output: Tensor, other: Tensor, truth: Tensor, mask: Tensor, seed: int) -> list[Row]:
    """Returns the rows of one read-out, method and kind of entries; all tensors are [batch pos]."""

    def squares(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        return (one - two).square().masked_fill(~mask, 0).sum(1), mask.sum(1)

    rows = paired({DISTANCE: squares(output, other)}, {DISTANCE: squares(output, truth)}, seed)
    rows.append({"metric": PREDICTIONS, **correlation(output, other, mask, seed, control=truth)})
    if other is not truth:
        rows.append({"metric": ERRORS, **correlation(output - truth, other - truth, mask, seed)})
    return rows


def correlation(one: Tensor, two: Tensor, mask: Tensor, seed: int, control: Tensor | None = None) -> Row:
    """Returns Pearson's r over the chosen entries, pooled; ``baseline`` is that of ``one`` and ``control``.

    Intervals: 95%, bootstrap over examples. Where one of the two is constant there is no correlation: NaN.
    """
    import numpy as np

    from circuits.statistics import interval

    others = [two] if control is None else [two, control]
    moments = np.stack([moments_of(one, other, mask) for other in others])
    pooled, weights = pearson(moments.sum(1)), resamples(seed, len(one))
    # [draws series]
    resampled = np.stack([pearson(weights @ series) for series in moments], axis=1)
    ends = np.stack(interval(resampled, LEVEL))[:, 0]
    compared: tuple[Any, ...] = ()
    if control is not None:
        compared = pooled[1], np.stack(interval(resampled[:, :1] - resampled[:, 1:], LEVEL))[:, 0]
    row = {**numbers(pooled[0], ends, *compared), "n": len(one)}
    return row if len(one) > 1 else without_intervals(row)


def moments_of(one: Tensor, two: Tensor, mask: Tensor) -> Any:
    """Returns [batch 6]: number of entries, and sums of x, y, x², y², xy over them."""
    import numpy as np

    x, y, w = (part.double().numpy() for part in (one, two, mask))
    return np.stack([(w * part).sum(1) for part in (np.ones_like(x), x, y, x * x, y * y, x * y)], axis=1)


def pearson(moments: Any) -> Any:
    """Computes r from the sums [... 6] that :func:`moments_of` gives."""
    import numpy as np

    count, x, y, xx, yy, xy = (moments[..., part] for part in range(6))
    count = np.maximum(count, 1)
    spread_x, spread_y = xx - x * x / count, yy - y * y / count
    # What rounding and a solver's tolerance leave of a constant is no spread.
    real = np.minimum(spread_x, spread_y) > count * CONSTANT**2
    product = np.where(real, spread_x * spread_y, 1.0)
    return np.where(real, (xy - x * y / count) / np.sqrt(product), np.nan)


def figures(result: Result) -> list[Figure]:
    """Returns a row of maps for each checkpoint and kind of entries, a column for each metric."""
    frame = result.frame
    frame = frame.assign(after=frame["layer"].astype("string").where(frame["site"] != "resid_pre", "embed"))
    panels, order = [], list(dict.fromkeys(frame["after"]))
    for (ref, kind), rows in frame.groupby(["ref", "intervention"], sort=False):
        for metric in HEADERS:
            table = rows[rows["metric"] == metric].pivot(index="variant", columns="after", values="value")
            table = table.reindex(index=list(dict.fromkeys(rows["variant"])), columns=order)
            # Correlations: the diverging colours, 0 in the middle. Distances: the sequential ones.
            colours: dict[str, Any] = {} if metric == DISTANCE else {"signed": True, "end": 1.0}
            axes: dict[str, Any] = {"across": "read-out after layer", "down": "method", "bar": False}
            title = f"{metric}, {kind}<br>{ref}"
            panels.append(heat(table, title, unit=metric, text=table.map(number), **axes, **colours))
    caption = (
        "Methods down, read-outs after each layer across; a map for each metric, kind of entries and checkpoint. "
        "distance: mean squared difference. r: correlation of predictions, and of their errors."
    )
    drawn = draw(panels, columns=len(HEADERS), share_y=True)
    return [Figure(drawn, "Agreement of read-outs with methods, over hidden entries", caption)]


def view_rows(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Returns a row per checkpoint, kind of entries and method, with a column (value, low, high) per metric."""
    last = frame["layer"] == frame.groupby("ref")["layer"].transform("max")
    return side_by_side(
        frame[last & (frame["site"] == "resid_post")],
        lambda row: (row["ref"], row["intervention"], row["variant"]),
        lambda row: {row["metric"]: (row["value"], row["value_ci_low"], row["value_ci_high"])},
    )


def view_columns(rows: pandas.DataFrame) -> list[Column]:
    def text(row: Mapping[str, Any], metric: str) -> str:
        if not isinstance(row[metric], tuple):
            return ""
        value, low, high = row[metric]
        if metric == DISTANCE:
            return with_interval(number(value), low, high)
        correlation = "–" if math.isnan(value) else f"{value:.3f}"
        return correlation if metric == PREDICTIONS else with_interval(correlation, low, high)

    return [
        Column("entries", "intervention"),
        Column("method", "variant"),
        *(Column(header, metric, partial(text, metric=metric)) for metric, header in HEADERS.items()),
    ]
