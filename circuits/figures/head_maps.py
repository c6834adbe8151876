"""Draws layer × head heatmaps of a number per head, from a sweep, a table or an array."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.style import finished, read_numbers

#: Pixels: width of a cell, height of a row, gaps below and beside a panel, space around all, narrowest panel.
CELL, ROW, GAP, ASIDE, AROUND, NARROWEST = 62, 44, 100, 120, 100, 200
#: The height of a row of one head; a model has many.
HEAD_ROW = 22
#: The most columns at which cells show their numbers, and the most panels side by side.
NUMBERED, ABREAST = 12, 3
#: Pixels of a colour bar with its title.
LOWEST_BAR = 100
_CALLER = "plots.heads"


@dataclass(frozen=True)
class Panel:
    """A heatmap to draw: values with a row per layer or head, and a column per head or position; `unit` names the
    colours.
    """

    title: str
    values: pd.DataFrame
    unit: str
    #: Signed values are neutral at 0, others at their smallest.
    signed: bool
    across: str = "head"
    down: str = "layer"
    #: The text in the cells (default: the values).
    text: pd.DataFrame | None = None
    #: The value at the end of the colours (default: the largest of the values).
    end: float | None = None
    #: Whether a colour bar stands beside it.
    bar: bool = True


def heads(
    values: Any,
    metric: str | Sequence[str] | None = None,
    *,
    column: str | None = None,
    title: str | None = None,
    unit: str | None = None,
    layers: Sequence[int] | None = None,
) -> Any:
    """Returns a plotly figure with a heatmap, layers down and heads across, for each metric and checkpoint.

        plots.heads(sweep(model, tokens, ablate.each(ablate.uniform, heads("all", model))))
        plots.heads(result.frame, "mse_masked", column="value")
        plots.heads({"diffuseness": maps.diffuseness})

    Args:
        values: a result with a `frame`, or a table: one row per head, with columns `layer`, `head`, and where there are
            several `metric`, `checkpoint` or `ref`; rows that are not of one head, and single draws, are left out. Or
            an array [layer head], or several by name.
        metric: these only.
        column: the column drawn (default: `effect` where there is one, else `value`).
        unit: what the colours mean (default: the column).
        layers: names of an array's rows, where they do not count from 0.
    """
    table = getattr(values, "frame", values)
    if isinstance(table, pd.DataFrame):
        panels = _of_table(table, metric, column, unit)
    else:
        named = values if isinstance(values, Mapping) else {"": values}
        if not named:
            raise CircuitsError(f"{_CALLER}: there is nothing to draw")
        panels = [_of_array(str(name), array, unit, layers) for name, array in named.items()]
    quantity = panels[0].unit
    return maps(panels, title or f"{quantity[:1].upper()}{quantity[1:]} of each head")


def maps(panels: Sequence[Panel], title: str, subtitle: str = "") -> Any:
    """Draws panels in rows of up to three, all with cells of one height."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    columns, rows = min(ABREAST, len(panels)), -(-len(panels) // ABREAST)
    row_height = HEAD_ROW if any(panel.down == "head" for panel in panels) else ROW
    panel_height = row_height * max(len(panel.values.index) for panel in panels)
    panel_width = max(NARROWEST, CELL * min(NUMBERED, max(len(panel.values.columns) for panel in panels)))
    total_height, total_width = (
        panel_height * rows + GAP * (rows - 1),
        panel_width * columns + ASIDE * (columns - 1),
    )
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[panel.title for panel in panels],
        vertical_spacing=GAP / total_height if rows > 1 else 0,
        horizontal_spacing=ASIDE / total_width,
    )
    for index, panel in enumerate(panels):
        cell = {"row": index // ABREAST + 1, "col": index % ABREAST + 1}
        grid = panel.values
        ends = grid.abs().to_numpy(dtype=float) if panel.end is None else panel.end
        largest = float(np.nan_to_num(ends).max()) or 1.0
        right_edge, span = (
            figure.layout[_axis("x", cell, columns)].domain[1],
            figure.layout[_axis("y", cell, columns)].domain,
        )
        trace = graph_objects.Heatmap(
            x=[str(x) for x in grid.columns],
            y=[str(y) for y in grid.index],
            z=grid.to_numpy(dtype=float),
            # The colours come from the template, because a page in the dark scheme replaces that.
            autocolorscale=True,
            # Symmetric, so that no effect has the same colour in every panel.
            zmin=-largest if panel.signed else 0,
            zmax=largest,
            showscale=panel.bar,
            text=_in_cells(panel),
            texttemplate="%{text}",
            colorbar={
                "x": right_edge,
                "y": sum(span) / 2,
                # Beside a map of a row or two its numbers would lie on each other.
                "len": (span[1] - span[0]) * max(1.0, LOWEST_BAR / panel_height),
                "thickness": 12,
                "title": {"text": panel.unit, "font": {"size": 12}},
                "tickfont": {"size": 11},
            },
            xgap=1,
            ygap=1,
            hovertemplate=f"{panel.down} %{{y}}, {panel.across} %{{x}}<br>{panel.unit} %{{z:.4g}}"
            f"<extra>{panel.title}</extra>",
        )
        figure.add_trace(trace, **cell)
        figure.update_xaxes(title_text=panel.across, type="category", showgrid=False, **cell)
        if cell["col"] == 1:
            figure.update_yaxes(title_text=panel.down, **cell)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    title_lines = max(panel.title.count("<br>") for panel in panels)
    figure.update_layout(
        height=AROUND + 16 * title_lines + total_height,
        width=max(520, 60 + total_width + ASIDE),
        margin={
            "t": 40 + 16 * title_lines,
            "b": 60,
            "l": 60,
            "r": ASIDE if 60 + total_width + ASIDE > 520 else 460 - total_width,
        },
    )
    figure.update_annotations(font_size=13)
    return finished(figure, title, subtitle)


def _axis(name: str, cell: Mapping[str, int], columns: int) -> str:
    """Returns plotly's name of a panel's axis, such as "xaxis2"."""
    number = (cell["row"] - 1) * columns + cell["col"]
    return f"{name}axis{number if number > 1 else ''}"


def _in_cells(panel: Panel) -> list[list[str]] | None:
    if panel.text is not None:
        return [[str(cell) for cell in row] for row in panel.text.to_numpy().tolist()]
    if len(panel.values.columns) > NUMBERED:
        return None
    rows = panel.values.to_numpy(dtype=float).tolist()
    return [["" if cell != cell else f"{cell:.2g}".replace("e-0", "e-") for cell in row] for row in rows]


def _of_table(
    table: pd.DataFrame, metric: str | Sequence[str] | None, column: str | None, unit: str | None
) -> list[Panel]:
    """Returns a panel for each metric and checkpoint of a table, from its rows about one head alone."""
    drawn_column = column or ("effect" if "effect" in table else "value")
    missing = [name for name in ("layer", "head", drawn_column) if name not in table]
    if missing:
        raise CircuitsError(
            f"{_CALLER}: the table has no column {', '.join(missing)}; it has {', '.join(map(str, table.columns))}"
        )
    rows = table[table["layer"].notna() & table["head"].notna()]
    if "draw" in rows:
        rows = rows[rows["draw"].isna()]
    if metric is not None:
        metrics = [metric] if isinstance(metric, str) else list(metric)
        if not metrics:
            raise CircuitsError(f"{_CALLER}: metric= names none; leave it out for all")
        known = list(dict.fromkeys(rows["metric"])) if "metric" in rows else []
        if unknown := [name for name in metrics if name not in known]:
            raise CircuitsError(
                f"{_CALLER}: no metric {unknown[0]!r}; there are {', '.join(map(str, known))}"
            )
        rows = rows[rows["metric"].isin(metrics)]
    if rows.empty:
        raise CircuitsError(f"{_CALLER}: the table has no row about one head alone")
    if not pd.api.types.is_numeric_dtype(rows[drawn_column]):
        raise CircuitsError(
            f"{_CALLER}: column {drawn_column} holds {rows[drawn_column].dtype}, and no numbers"
        )
    by = [name for name in ("metric", "checkpoint", "ref") if name in rows and rows[name].notna().any()]
    panels: list[Panel] = []
    for name, part in rows.groupby(by, sort=False, dropna=False) if by else [((), rows)]:
        if part.duplicated(["layer", "head"]).any():
            raise CircuitsError(
                f"{_CALLER}: a head has several rows in the table; keep one per head, metric and checkpoint"
            )
        signed = bool((part[drawn_column] < 0).any()) or drawn_column == "effect"
        grid = part.pivot(index="layer", columns="head", values=drawn_column)
        panels.append(Panel("<br>".join(map(str, name)), grid, unit or drawn_column, signed))
    # Panels of one metric are drawn beside each other; metrics keep the order of the table.
    order = {
        title: index
        for index, title in enumerate(dict.fromkeys(panel.title.split("<br>")[0] for panel in panels))
    }
    panels.sort(key=lambda panel: order[panel.title.split("<br>")[0]])
    return panels


def _of_array(name: str, values: Any, unit: str | None, layers: Sequence[int] | None) -> Panel:
    array = read_numbers(values, _CALLER, "an array [layer head] is needed")
    if array.ndim != 2 or not array.size:
        raise CircuitsError(f"{_CALLER}: an array [layer head] is needed; got {list(array.shape)}")
    if layers is not None and len(layers) != len(array):
        raise CircuitsError(f"{_CALLER}: {len(layers)} names of layers for {len(array)} rows")
    grid = pd.DataFrame(array, index=None if layers is None else list(layers))
    return Panel(name, grid, unit or name or "value", bool((array < 0).any()))
