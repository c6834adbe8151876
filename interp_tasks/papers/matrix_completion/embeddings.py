"""Measures how the embeddings of values and positions are arranged, and when they come to be so.

``variant`` is ``tokens`` or ``positions``, ``baseline`` the untrained model's, of silhouettes their mean under
permuted labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuits.figures.layout import SEQUENTIAL, Panel, draw
from circuits.figures.panels import Series, scatter
from interp_tasks.errors import UserError
from interp_tasks.measurement.embeddings import WEIGHTS, Tables, interval
from interp_tasks.measurement.experiment import experiment
from interp_tasks.measurement.result import Result
from interp_tasks.measurement.runner import Measured, measure
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
    import plotly.graph_objects
    from typing_extensions import Unpack

    from interp_tasks.checkpoints import ResolvedCheckpoint
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
    permutation test, norms of the middle row. Of several checkpoints of one run also how far each is on the way to the
    last.

    Gopalani, Lubana, Hu 2024, figures 7, 9 and 10. Examples play no part.

    Args:
        refs: one or several REFs. With several checkpoints of one run, also how far each is on the way to the last:
            its embeddings and the last one's, both on the last one's two principal components by plain dot products
            (no centring), as a correlation over values.
        largest: only values up to ±this (1.5 in the paper). Default: all that the task's examples can hold
            (``token_values``).
        untrained: compare with an untrained model of the architecture.
        options: seed, task, task_config, device, progress: see :class:`Options`; the seed draws resamples,
            permutations, t-SNE and the untrained model.

    Raises:
        UserError, TaskError, CircuitsError: in one line; a UserError for a task that says of neither tokens nor
            positions what they stand for.
    """
    if largest is not None and not 0 < largest < 1e9:
        raise UserError(f"--largest {largest:g}: give a value above 0 and below 1e9")
    check_has_task("embeddings", options)
    found = resolve_refs(refs, Examples.of(options))
    last = {run: several[-1] for run, several in by_run(found).items() if len(several) > 1}
    measures = Measures(largest, untrained, last, options.get("device", "cpu"))

    def check(subject: LoadedCheckpoint) -> None:
        EmbeddingTargets.of(subject.task, largest)

    config = {"largest": largest}
    result = measure("embeddings", found, options, measures.measured, config=config, check=check)
    return replace(
        result,
        frame=result.frame.assign(split=WEIGHTS),
        notes=(*notes(largest), *measures.remarks),
        data={"tokens": measures.tokens, "positions": measures.positions},
    )


@dataclass
class Measures:
    """What is measured of each checkpoint, and the tables of the figures by REF.

    Attributes:
        last: the last chosen checkpoint of each run that has several; ``ends``: its embeddings, of one run at a time.
    """

    largest: float | None
    untrained: bool
    last: Mapping[str, ResolvedCheckpoint]
    device: str
    ends: dict[str, Tables] = field(default_factory=dict)
    tokens: dict[str, pandas.DataFrame] = field(default_factory=dict)
    positions: dict[str, pandas.DataFrame] = field(default_factory=dict)
    remarks: dict[str, None] = field(default_factory=dict)

    def measured(self, subject: LoadedCheckpoint) -> Measured:
        """Measures the token and position embeddings of one checkpoint, beside those of an untrained model."""
        import pandas

        ref = str(subject.labels["ref"])
        targets, tables = EmbeddingTargets.of(subject.task, self.largest), Tables.of(subject.model)
        untrained = Tables.of(untrained_model(subject)) if self.untrained else None
        rows: list[Row] = []
        if targets.values:
            end = self.end_of(subject)
            rows, self.tokens[ref] = token_rows(targets, tables, untrained, end, subject.seed)
        # t-SNE cannot place fewer than four points.
        if targets.axes and tables.positions is not None and math.prod(targets.axes.values()) > 3:
            more, self.positions[ref], note = position_rows(targets, tables, untrained, subject.seed)
            rows += more
            self.remarks[note] = None
        return Measured(pandas.DataFrame(rows), {})

    def end_of(self, subject: LoadedCheckpoint) -> Tables | None:
        """Returns the embeddings of the last chosen checkpoint of a run; ``None`` where it is the only one."""
        from interp_tasks.checkpoints.load import load_resolved

        run = run_of(subject)
        if run not in self.last:
            return None
        if run not in self.ends:
            self.ends = {run: Tables.of(load_resolved(self.last[run], self.device).model)}
        return self.ends[run]


def notes(largest: float | None) -> tuple[str, ...]:
    which = "that the task's examples can hold" if largest is None else f"up to ±{largest:g}"
    return (
        f"tokens: values {which}; other rows of W_E are left out. Intervals: 95%, bootstrap over values.",
        "sign separability: area under the ROC curve of the sign along that one of two principal components that tells "
        "signs apart better; magnitude correlation: Spearman's of |v| with the other one, without its sign.",
        "baseline: an untrained model of the architecture; of silhouettes their mean under permuted labels, with p "
        "from 999 permutations.",
    )


def token_rows(
    targets: EmbeddingTargets, tables: Tables, untrained_tables: Tables | None, end: Tables | None, seed: int
) -> tuple[list[Row], pandas.DataFrame]:
    """Returns rows of the tidy table, and the table of the figures."""
    import numpy as np
    import pandas

    measured = of_tokens(targets, tables, end, seed)
    baseline = {} if untrained_tables is None else of_tokens(targets, untrained_tables, end, seed)
    shared = {"variant": "tokens", "site": "embed", "n": len(targets.values), "engine": "exact"}
    rows = []
    for metric, (about, value) in measured.items():
        other = float(baseline[metric][1][0]) if metric in baseline else None
        columns = numbers(value[0], interval(value[1:]), other)
        rows.append({**shared, "intervention": about, "metric": metric, **columns})
    points = tables.rows(targets.values)
    components = principal_components(points)
    table = pandas.DataFrame(
        {
            "id": list(targets.values),
            "value": list(targets.values.values()),
            "norm": np.linalg.norm(points, axis=1),
            "component 1": components.scores[:, 0],
            "component 2": components.scores[:, 1],
        }
    )
    return rows, table


def position_rows(
    targets: EmbeddingTargets, tables: Tables, untrained_tables: Tables | None, seed: int
) -> tuple[list[Row], pandas.DataFrame, str]:
    """Returns rows of the tidy table, the table of the figures, and a note on t-SNE's settings."""
    import numpy as np
    import pandas

    assert tables.positions is not None
    cells = int(np.prod(list(targets.axes.values())))
    points = tables.positions[:cells]
    norms = np.linalg.norm(points, axis=1)
    plane, perplexity = tsne(points, seed)
    common: dict[str, Any] = {"variant": "positions", "site": "pos_embed", "n": cells, "engine": "exact"}
    rows: list[Row] = []
    for prefix, coordinates in (("", points), ("t-SNE ", plane)):
        for axis in targets.clustered_axes:
            clusters = clustered(coordinates, targets.labels(axis), seed)
            name, p = f"{prefix}silhouette by {axis}", clusters.p_value
            about = {**common, "intervention": "against permuted labels", "metric": name}
            rows.append({**about, **numbers(clusters.value, baseline=clusters.null), "p_value": p})
            rows.append({**about, "metric": f"{name}: p", "value": p})
    measured = middle_norm(targets, norms)
    other = {}
    if untrained_tables is not None and untrained_tables.positions is not None:
        other = middle_norm(targets, np.linalg.norm(untrained_tables.positions[:cells], axis=1))
    for metric, value in measured.items():
        columns = numbers(value, baseline=other.get(metric))
        rows.append({**common, "intervention": "norms", "metric": metric, **columns})
    shown = {"position": range(cells), "norm": norms, "t-SNE 1": plane[:, 0], "t-SNE 2": plane[:, 1]}
    table = pandas.DataFrame(shown | {axis: targets.labels(axis) for axis in targets.axes})
    return rows, table, f"t-SNE: scikit-learn, perplexity {perplexity:g}, seed {seed}."


def middle_norm(targets: EmbeddingTargets, norms: Array) -> dict[str, float]:
    """Returns the mean norm of the one or two middle lines of the first axis over that of the others, by metric."""
    import numpy as np

    axis, size = next(iter(targets.axes.items()))
    if size < 3:
        return {}
    middle = np.abs(targets.labels(axis) - (size - 1) / 2) < 1
    return {f"norm of the middle {axis} / others": float(norms[middle].mean() / norms[~middle].mean())}


def arrangement(
    ref: str, tokens: pandas.DataFrame | None, positions: pandas.DataFrame | None
) -> plotly.graph_objects.Figure:
    """Draws the embeddings of one checkpoint: a row of panels for values, a row for positions."""
    panels: list[Panel] = []
    if tokens is not None:
        panels += value_panels(ref, tokens)
    if positions is not None:
        panels += position_panels(ref, positions)
    return draw(panels, columns=2, showlegend=False)


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

    tokens, positions = result.data["tokens"], result.data["positions"]
    caption = "Values: principal components, coloured by bins half a unit wide. Positions: t-SNE, coloured by column."
    refs = list(dict.fromkeys([*tokens, *positions]))
    drawn = [
        Figure(arrangement(ref, tokens.get(ref), positions.get(ref)), f"Embeddings, {ref}", caption)
        for ref in refs
    ]
    if len(refs) > 1:
        shown = result.frame[~result.frame["metric"].str.endswith(": p")]
        drawn.append(Figure(figure(shown), "Every number of every checkpoint", "Open: the baseline."))
    return drawn
