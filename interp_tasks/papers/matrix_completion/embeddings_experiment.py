"""Measures how the embeddings of values and positions are arranged, and when they come to be so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from circuits.figures.panel_grid import SEQUENTIAL, Panel, draw_panels
from circuits.figures.panel_kinds import points as marks
from circuits.figures.panel_kinds import rows_to_one_series
from interp_tasks.errors import UserError
from interp_tasks.measurement.loaded_checkpoints import (
    LoadedCheckpoint,
    Refs,
    checkpoints_by_run,
    path_of_run,
    resolve_refs,
)
from interp_tasks.measurement.measure_checkpoints import measure
from interp_tasks.measurement.options_and_examples import Examples, Options
from interp_tasks.measurement.result import Result, Row, experiment
from interp_tasks.measurement.token_and_position_embeddings import WEIGHTS, Embeddings, untrained_embeddings
from interp_tasks.pages import Figure

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack


#: Width of the bins that values are coloured by, as in figure 7 of the paper.
BIN = 0.5
NOTES = (
    "tokens: other rows of W_E than those of the values are left out. Intervals: 95%, bootstrap over values.",
    "sign separability: area under the ROC curve of the sign along that one of two principal components that tells "
    "signs apart better; magnitude correlation: Spearman's of |v| with the other one, without its sign.",
    "baseline: an untrained model of the architecture; of silhouettes their mean under permuted labels, with p from "
    "999 permutations. t-SNE: scikit-learn, perplexity 30, or a third of the other points.",
)
LARGEST = typer.Option(
    "--largest", help="Only values up to ± this.", show_default="all the examples can hold"
)


@experiment(says={"largest": None}, without=("tokens", "prompts", "samples", "split"))
def embeddings(
    refs: Refs, largest: Annotated[float | None, LARGEST] = None, **options: Unpack[Options]
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
    """
    from interp_tasks.checkpoints.checkpoint import load_model
    from interp_tasks.papers.matrix_completion import embedding_geometry

    if largest is not None and not 0 < largest < 1e9:
        raise UserError(f"--largest {largest:g}: give a value above 0 and below 1e9")
    found = resolve_refs(refs, Examples.of(options))
    last = {run: several[-1] for run, several in checkpoints_by_run(found).items() if len(several) > 1}
    ends: dict[str, Embeddings] = {}
    drawn: dict[str, list[pandas.DataFrame]] = {}

    def measure_checkpoint(subject: LoadedCheckpoint) -> list[Row]:
        """Measures the token and position embeddings of one checkpoint, beside those of an untrained model."""
        run, task = path_of_run(subject), subject.task
        assert task is not None
        if run in last and run not in ends:
            ends[run] = Embeddings.of(load_model(last[run], options.get("device", "cpu")))
        values = embedding_geometry.token_values_up_to(task, largest)
        axes = embedding_geometry.grid_sizes(task)
        tables, other = Embeddings.of(subject.model), untrained_embeddings(subject)
        points = drawn.setdefault(str(subject.labels["ref"]), [])
        rows: list[Row] = []
        if values:
            rows += embedding_geometry.token_rows(values, tables, other, ends.get(run), subject.seed)
            points.append(embedding_geometry.token_components_and_norms(values, tables))
        cells = math.prod(axes.values())
        # t-SNE cannot place fewer than four points.
        if axes and tables.positions is not None and cells > 3:
            plane = embedding_geometry.tsne(tables.positions[:cells], subject.seed)
            beside = None if other is None else other.positions
            rows += embedding_geometry.position_rows(axes, tables.positions, beside, plane, subject.seed)
            points.append(embedding_geometry.position_tsne_and_norms(axes, tables.positions, plane))
        if not rows:
            raise UserError(f"task {task.name!r} has neither tokens with values nor positions on a grid")
        return [{"split": WEIGHTS, "engine": "exact", **row} for row in rows]

    config = {"largest": largest}
    check = lambda subject: embedding_geometry.token_values_up_to(subject.task, largest)  # noqa: E731
    result = measure("embeddings", found, options, measure_checkpoint, config=config, check=check)
    return replace(result, notes=NOTES, data={"tables": drawn})


# ---- figures


def plane_and_norm_panels(ref: str, table: pandas.DataFrame) -> Iterator[Panel]:
    """Yields the plane that points lie in, and their norms: values in colours of bins, positions of the last axis."""
    if "value" in table:
        # The ends of the scale are near black and near white: a rim is seen on both grounds.
        rim = {"width": 0.8, "color": "#808080"}
        bins = ((table["value"] / BIN).round() * BIN).tolist()
        marker = {"size": 7, "color": bins, "colorscale": SEQUENTIAL, "line": rim, "symbol": "circle"}
        kind, x, parts, style = "value", "component", [("values", table)], {"marker": marker}
    else:
        axis, style = str(table.columns[-1]), {}
        parts = [(f"{axis} {value}", part) for value, part in table.groupby(axis)]
        kind, x = "position", "t-SNE"
    for title, across, up in (
        (f"{kind}s: {x}<br>{ref}", f"{x} 1", f"{x} 2"),
        (f"{kind}s: norms", kind, "norm"),
    ):
        series = {
            name: rows_to_one_series(
                part, across, up, hover=[f"{kind} {each:g}" for each in part[kind]], style=style
            )
            for name, part in parts
        }
        yield marks(series, title, x=across, y=up, height=320, categories=False)


def figures(result: Result) -> list[Figure]:
    """Returns the arrangement in every checkpoint, and every number where there are several."""
    from interp_tasks.measurement.result_table_plots import values_figure

    caption = "Values: principal components, coloured by bins half a unit wide. Positions: t-SNE, coloured by column."
    drawn = []
    for ref, tables in result.data["tables"].items():
        panels = [panel for table in tables for panel in plane_and_norm_panels(ref, table)]
        drawn.append(Figure(draw_panels(panels, columns=2, showlegend=False), f"Embeddings, {ref}", caption))
    if len(drawn) > 1:
        shown = result.frame[~result.frame["metric"].str.endswith(": p")]
        drawn.append(Figure(values_figure(shown), "Every number of every checkpoint", "Open: the baseline."))
    return drawn
