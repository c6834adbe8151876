"""Measures how the embeddings of values and positions are arranged, and when they come to be so.

``variant`` is ``tokens`` or ``positions``, ``baseline`` the untrained model's, of silhouettes their mean under
permuted labels.
"""

from __future__ import annotations

import math
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
from interp_tasks.measurement.untrained import untrained as untrained_model
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
UNTRAINED = typer.Option("--untrained/--no-untrained", help="Compare with an untrained model.")


@experiment("matrix", says={"largest": None})
def embeddings(
    refs: Refs,
    largest: Annotated[float | None, LARGEST] = None,
    *,
    untrained: Annotated[bool, UNTRAINED] = True,
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
        untrained: compare with an untrained model of the architecture.
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
        tables = Tables.of(subject.model)
        other = Tables.of(untrained_model(subject)) if untrained else None
        parts = []
        if targets.values:
            parts.append(token_rows(targets, tables, other, ends.get(run), subject.seed))
        # t-SNE cannot place fewer than four points.
        if targets.axes and tables.positions is not None and math.prod(targets.axes.values()) > 3:
            parts.append(position_rows(targets, tables.positions, other, subject.seed))
        drawn[str(subject.labels["ref"])] = [table for _, table in parts]
        return [{"split": WEIGHTS, "engine": "exact", **row} for rows, _ in parts for row in rows]

    asked = {"largest": largest}
    result = measure("embeddings", found, options, measure_checkpoint, config=asked, check=check)
    return replace(result, notes=notes(largest), data={"tables": drawn})


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
    targets: EmbeddingTargets, tables: Tables, untrained: Tables | None, end: Tables | None, seed: int
) -> tuple[list[Row], pandas.DataFrame]:
    """Returns rows of the tidy table, and the table of the figures."""
    import numpy as np
    import pandas

    measured = of_tokens(targets, tables, end, seed)
    baseline = {} if untrained is None else of_tokens(targets, untrained, end, seed)
    shared: Row = {"variant": "tokens", "site": "embed", "n": len(targets.values)}
    rows = []
    for metric, (about, value) in measured.items():
        other = float(baseline[metric][1][0]) if metric in baseline else None
        columns = numbers(value[0], interval(value[1:]), other)
        rows.append({**shared, "intervention": about, "metric": metric, **columns})
    points = tables.rows(targets.values)
    scores = principal_components(points).scores
    columns = {"value": list(targets.values.values()), "norm": np.linalg.norm(points, axis=1)}
    return rows, pandas.DataFrame({**columns, "component 1": scores[:, 0], "component 2": scores[:, 1]})


def position_rows(
    targets: EmbeddingTargets, positions: Array, untrained: Tables | None, seed: int
) -> tuple[list[Row], pandas.DataFrame]:
    """Returns rows of the tidy table, and the table of the figures."""
    import numpy as np
    import pandas

    cells = math.prod(targets.axes.values())
    points = positions[:cells]
    norms = np.linalg.norm(points, axis=1)
    plane = tsne(points, seed)
    common: Row = {"variant": "positions", "site": "pos_embed", "n": cells}
    rows: list[Row] = []
    for prefix, coordinates in (("", points), ("t-SNE ", plane)):
        for axis in targets.clustered_axes:
            clusters = clustered(coordinates, targets.labels(axis), seed)
            name, p = f"{prefix}silhouette by {axis}", clusters.p_value
            about = {**common, "intervention": "against permuted labels", "metric": name}
            rows.append({**about, **numbers(clusters.value, baseline=clusters.null), "p_value": p})
            rows.append({**about, "metric": f"{name}: p", "value": p})
    axis, size = next(iter(targets.axes.items()))
    if size > 2:
        # The one or two lines in the middle of the first axis.
        middle = np.abs(targets.labels(axis) - (size - 1) / 2) < 1
        both = [norms]
        if untrained is not None and untrained.positions is not None:
            both.append(np.linalg.norm(untrained.positions[:cells], axis=1))
        ratios = [float(each[middle].mean() / each[~middle].mean()) for each in both]
        about = {**common, "intervention": "norms", "metric": f"norm of the middle {axis} / others"}
        rows.append({**about, **numbers(ratios[0], baseline=ratios[1] if both[1:] else None)})
    shown = {"position": range(cells), "norm": norms, "t-SNE 1": plane[:, 0], "t-SNE 2": plane[:, 1]}
    return rows, pandas.DataFrame(shown | {axis: targets.labels(axis) for axis in targets.axes})


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
