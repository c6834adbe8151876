"""Measures how the embeddings of values and positions are arranged, and when they come to be so.

``variant`` is ``tokens`` or ``positions``, ``baseline`` the untrained model's, of silhouettes their mean under
permuted labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from circuits.figures.layout import SEQUENTIAL, Panel, draw
from circuits.figures.panels import Series, scatter
from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings import WEIGHTS, Tables, interval
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import measure
from interp_tasks.measurement.subjects import (
    Examples,
    LoadedCheckpoint,
    Options,
    Refs,
    by_run,
    check_has_task,
    resolve_refs,
    run_of,
)
from interp_tasks.measurement.table import Row, numbers
from interp_tasks.measurement.untrained import untrained
from interp_tasks.pages import Figure
from interp_tasks.papers.matrix_completion.arrangement import (
    EmbeddingTargets,
    clustered,
    of_tokens,
    principal_components,
    tsne,
)

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from interp_tasks.measurement.embeddings import Array

#: Width of the bins that values are coloured by, as in figure 7 of the paper.
BIN = 0.5
LARGEST = typer.Option(
    "--largest", help="Only values up to ± this.", show_default="all the examples can hold"
)


@experiment("matrix", says={"largest": None})
def embeddings(
    refs: Refs,
    largest: Annotated[float | None, LARGEST] = None,
    **options: Unpack[Options],
) -> Result:
    """See how token embeddings follow the values they stand for, and position embeddings the grid.

    Norms of v against -v, sign and size on two principal components, clusters of positions by row and column with a
    permutation test, norms of the middle row.

    Gopalani, Lubana, Hu 2024, figures 7, 9 and 10. Examples play no part.

    Args:
        refs: one or several REFs. Of several checkpoints of a run also the correlation over values of each one's
            embeddings with the last one's, on the last one's two principal components, without centring.
        largest: only values up to ±this (1.5 in the paper). Default: all that the task's examples can hold
            (``token_values``).
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples,
            permutations, t-SNE and the untrained model.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that says of neither tokens nor
            positions what they stand for.
    """
    from interp_tasks.checkpoints.load import load_resolved

    if largest is not None and not 0 < largest < 1e9:
        raise UserError(f"--largest {largest:g}: give a value above 0 and below 1e9")
    check_has_task("embeddings", options)
    found = resolve_refs(refs, Examples.of(options))
    last = {run: several[-1] for run, several in by_run(found).items() if len(several) > 1}
    ends: dict[str, Tables] = {}
    drawn: dict[str, list[pandas.DataFrame]] = {}

    def check(subject: LoadedCheckpoint) -> None:
        EmbeddingTargets.of(subject.task, largest)

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures the token and position embeddings of one checkpoint, beside those of an untrained model."""
        run, targets = run_of(subject), EmbeddingTargets.of(subject.task, largest)
        if run in last and run not in ends:
            ends[run] = Tables.of(load_resolved(last[run], options.get("device", "cpu")).model)
        tables, other = Tables.of(subject.model), untrained_tables(subject)
        ref = str(subject.labels["ref"])
        rows: list[Row] = []
        if targets.values:
            rows += token_rows(targets, tables, other, ends.get(run), subject.seed)
            drawn.setdefault(ref, []).append(token_points(targets, tables))
        # t-SNE cannot place fewer than four points.
        if targets.axes and tables.positions is not None and math.prod(targets.axes.values()) > 3:
            plane = tsne(tables.positions[: math.prod(targets.axes.values())], subject.seed)
            untrained_positions = None if other is None else other.positions
            rows += position_rows(targets, tables.positions, untrained_positions, plane, subject.seed)
            drawn.setdefault(ref, []).append(position_points(targets, tables.positions, plane))
        return [{"split": WEIGHTS, "engine": "exact", **row} for row in rows]

    asked = {"largest": largest}
    result = measure("embeddings", found, options, measure_checkpoint, config=asked, check=check)
    return replace(result, notes=notes(largest), data={"tables": drawn})


def untrained_tables(subject: LoadedCheckpoint) -> Tables | None:
    """Returns the embeddings of an untrained model; ``None`` for an architecture that the task cannot build."""
    try:
        return Tables.of(untrained(subject))
    except UserError:
        return None


def notes(largest: float | None) -> tuple[str, ...]:
    which = "that the task's examples can hold" if largest is None else f"up to ±{largest:g}"
    return (
        f"tokens: values {which}; other rows of W_E are left out. Intervals: 95%, bootstrap over values.",
        "sign separability: area under the ROC curve of the sign along that one of two principal components that tells "
        "signs apart better; magnitude correlation: Spearman's of |v| with the other one, without its sign.",
        "baseline: an untrained model of the architecture; of silhouettes their mean under permuted labels, with p "
        "from 999 permutations. t-SNE: scikit-learn, perplexity 30, or a third of the other points.",
    )


def token_rows(
    targets: EmbeddingTargets, tables: Tables, other: Tables | None, end: Tables | None, seed: int
) -> Iterator[Row]:
    """Yields rows of the token embeddings, beside those of an untrained model."""
    baseline = {} if other is None else of_tokens(targets, other, end, seed)
    for metric, (about, value) in of_tokens(targets, tables, end, seed).items():
        row = {"variant": "tokens", "site": "embed", "n": len(targets.values), "intervention": about}
        yield {
            **row,
            "metric": metric,
            **numbers(value[0], interval(value[1:]), float(baseline[metric][1][0])),
        }


def position_rows(
    targets: EmbeddingTargets, positions: Array, other: Array | None, plane: Array, seed: int
) -> Iterator[Row]:
    """Yields rows of the position embeddings, and of their t-SNE ``plane``."""
    import numpy as np

    cells = math.prod(targets.axes.values())
    common: Row = {"variant": "positions", "site": "pos_embed", "n": cells}
    for prefix, points in (("", positions[:cells]), ("t-SNE ", plane)):
        for axis in targets.clustered_axes:
            value, null, p = clustered(points, targets.labels(axis), seed)
            name = f"{prefix}silhouette by {axis}"
            about = {**common, "intervention": "against permuted labels", "metric": name}
            yield {**about, **numbers(value, baseline=null), "p_value": p}
            yield {**about, "metric": f"{name}: p", "value": p}
    axis, size = next(iter(targets.axes.items()))
    if size > 2:
        # The one or two lines in the middle of the first axis.
        middle = np.abs(targets.labels(axis) - (size - 1) / 2) < 1
        norms = [np.linalg.norm(each[:cells], axis=1) for each in (positions, other) if each is not None]
        ratios = [float(each[middle].mean() / each[~middle].mean()) for each in norms]
        about = {**common, "intervention": "norms", "metric": f"norm of the middle {axis} / others"}
        yield {**about, **numbers(ratios[0], baseline=ratios[1] if ratios[1:] else None)}


# ---- figures


def token_points(targets: EmbeddingTargets, tables: Tables) -> pandas.DataFrame:
    """Returns the table of the figures of tokens."""
    import numpy as np
    import pandas

    points = tables.rows(targets.values)
    _, scores = principal_components(points)
    columns = {"value": list(targets.values.values()), "norm": np.linalg.norm(points, axis=1)}
    return pandas.DataFrame({**columns, "component 1": scores[:, 0], "component 2": scores[:, 1]})


def position_points(targets: EmbeddingTargets, positions: Array, plane: Array) -> pandas.DataFrame:
    """Returns the table of the figures of positions."""
    import numpy as np
    import pandas

    norms = np.linalg.norm(positions[: len(plane)], axis=1)
    shown = {"position": range(len(plane)), "norm": norms, "t-SNE 1": plane[:, 0], "t-SNE 2": plane[:, 1]}
    return pandas.DataFrame(shown | {axis: targets.labels(axis) for axis in targets.axes})


def value_panels(ref: str, table: pandas.DataFrame) -> list[Panel]:
    """Returns values on two principal components, and norms over values."""
    # The ends of the scale are near black and near white: a rim is seen on both grounds.
    rim = {"width": 0.8, "color": "#808080"}
    bins = ((table["value"] / BIN).round() * BIN).tolist()
    style = {"marker": {"size": 7, "color": bins, "colorscale": SEQUENTIAL, "line": rim, "symbol": "circle"}}
    hover = [f"value {value:g}" for value in table["value"]]
    return [
        scatter(
            {"values": Series(table[x].tolist(), table[y].tolist(), hover=hover, style=style)},
            title,
            x=x,
            y=y,
            height=320,
        )
        for title, x, y in (
            (f"values: principal components<br>{ref}", "component 1", "component 2"),
            ("values: norms", "value", "norm"),
        )
    ]


def position_panels(ref: str, table: pandas.DataFrame) -> list[Panel]:
    """Returns positions by t-SNE, and norms over positions; a colour and symbol for each value of the last axis."""
    axes = [name for name in table.columns if name not in ("position", "norm", "t-SNE 1", "t-SNE 2")]
    panels = []
    for title, x, y in (
        (f"positions: t-SNE<br>{ref}", "t-SNE 1", "t-SNE 2"),
        ("positions: norms", "position", "norm"),
    ):
        series = {}
        for value in sorted(set(table[axes[-1]])):
            part = table[table[axes[-1]] == value]
            hover = [", ".join(f"{axis} {row[axis]}" for axis in axes) for row in part.to_dict("records")]
            series[f"{axes[-1]} {value}"] = Series(
                part[x].tolist(), part[y].tolist(), hover=hover, look=int(value)
            )
        panels.append(scatter(series, title, x=x, y=y, height=320))
    return panels


def figures(result: Result) -> list[Figure]:
    """Returns the arrangement in every checkpoint, and every number where there are several."""
    from interp_tasks.measurement.figure import figure

    caption = "Values: principal components, coloured by bins half a unit wide. Positions: t-SNE, coloured by column."
    drawn = []
    for ref, tables in result.data["tables"].items():
        panels: list[Panel] = []
        for table in tables:
            panels += (value_panels if "value" in table else position_panels)(ref, table)
        drawn.append(Figure(draw(panels, columns=2, showlegend=False), f"Embeddings, {ref}", caption))
    if len(drawn) > 1:
        shown = result.frame[~result.frame["metric"].str.endswith(": p")]
        drawn.append(Figure(figure(shown), "Every number of every checkpoint", "Open: the baseline."))
    return drawn
