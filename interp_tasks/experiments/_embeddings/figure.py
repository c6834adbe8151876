"""Draws embeddings of values and positions, and how they form during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.palette import SEQUENTIAL, SYMBOLS
from circuits.figures.panels import Series, curve, of_rows, scatter

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Width of the bins that values are coloured by, as in figure 7 of the paper.
BIN = 0.5


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


def over_training(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws a panel per metric over steps, a line per run, with open markers for the untrained baseline."""
    shown = frame[~frame["metric"].str.endswith(": p")]
    panels = []
    for metric, rows in shown.groupby("metric", sort=False):
        series: dict[str, Series] = {}
        for look, (run, part) in enumerate(rows.groupby("run", sort=False)):
            part = part.sort_values("step")
            opened: dict[str, Any] = {"symbol": f"{SYMBOLS[look % len(SYMBOLS)]}-open"}
            series[str(run)] = Series(part["step"].tolist(), part["value"].tolist(), look=look)
            style = {"mode": "markers", "marker": opened}
            series[f"{run}, baseline"] = of_rows(part, "step", "baseline", style=style, look=look)
        panels.append(curve(series, str(metric), y="", height=220))
    return draw(panels, columns=2)
