"""Draws a circuit: its graph by layers, with edges as wide as their effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from circuits.figures.panel_grid import COLOURS, INK, TEMPLATE, titled

#: What an edge ends at, with its colour and dash.
INPUTS = {
    "q": (0, "solid"),
    "k": (1, "solid"),
    "v": (2, "solid"),
    "MLP": (3, "9px,5px"),
    "output": (6, "dot"),
}
#: Edges that are drawn, the largest of a larger circuit; and their opacity.
DRAWN, SHOWN = 400, 0.85
#: Pixels: widest and narrowest line, those of the key, height of a row, width of a column and of the narrowest figure.
_WIDEST, _NARROWEST, _KEY, _ROW, _COLUMN, _NARROW = 6.0, 1.2, 2.0, 84, 120, 560
#: Pixels above the graph; rows around it.
_TOP, _AROUND = 30, 0.35
#: Pixels of a node, in which "output" has room; and its radius in rows.
_NODE = 46
_RADIUS = _NODE / 2 / _ROW
#: Columns that a line keeps off the middle of a node beside it.
_GAP = 0.47


class _NodePosition(NamedTuple):
    x: float
    y: float


def circuit_figure(frame: pd.DataFrame, order_by_node: Mapping[str, int]) -> Any:
    """Draws the members of a circuit, embeddings below and the output on top.

    Args:
        frame: a row per member: name, positions, metric, estimate and effect; of edges also sender, node, the one that
            receives, and input, one of `INPUTS`.
        order_by_node: by node, its place in the order of computation; nodes of one stage stand side by side.
    """
    from plotly import graph_objects

    figure, kind = graph_objects.Figure(), "edge" if "sender" in frame else "node"
    title = f"A circuit of {len(frame)} {kind}{'s' * (len(frame) != 1)}"
    if kind == "node":
        places = _place_nodes(order_by_node)
        _add_nodes(figure, places, {row["name"]: _format_hover_text(row) for row in frame.to_dict("records")})
        return _lay_out_figure(figure, places, title, "Hover for what is known of a node.")
    size = frame["effect"].abs().fillna(frame["estimate"].abs())
    # Without any effect all lines are of one width, and the first are drawn.
    order = np.argsort(-size.fillna(0).to_numpy(), kind="stable")[:DRAWN]
    rows = frame.assign(size=size.fillna(0)).iloc[np.sort(order)].to_dict("records")
    largest = float(size.max()) if size.notna().any() else 0.0
    drawn = {row[end] for row in rows for end in ("sender", "node")}
    places = _place_nodes({name: stage for name, stage in order_by_node.items() if name in drawn})
    # The key has lines of its own: those of edges are faded.
    for group in INPUTS:
        if any(row["input"] == group for row in rows):
            _add_line(figure, [None], [None], group, _KEY)
    for row in rows:
        group, hover = row["input"], _format_hover_text(row)
        width = _NARROWEST + (_WIDEST - _NARROWEST) * (row["size"] / largest if largest else 0.0)
        xs, ys = _curve(places[row["sender"]], places[row["node"]], group, places)
        known = {"text": [hover] * len(xs), "hovertemplate": "%{text}<extra></extra>"}
        _add_line(figure, xs, ys, group, width, showlegend=False, opacity=SHOWN, **known)
    _add_nodes(figure, places, {name: name for name in places})
    subtitle = "Width: size of the effect, where known; hover for it. The legend hides edges of a kind."
    if len(frame) > DRAWN:
        subtitle += f" Drawn are the {DRAWN} largest of {len(frame)} edges."
    return _lay_out_figure(figure, places, title, subtitle)


def _add_line(
    figure: Any, xs: Sequence[Any], ys: Sequence[Any], kind: str, width: float, **more: Any
) -> None:
    """Draws a line into a kind of input, or its entry in the key."""
    colour, dash = INPUTS[kind]
    line = {"color": COLOURS[colour], "width": width, "dash": dash, "shape": "spline"}
    figure.add_scatter(x=xs, y=ys, mode="lines", line=line, name=f"into {kind}", legendgroup=kind, **more)


def _add_nodes(figure: Any, places: dict[str, _NodePosition], hover: dict[str, str]) -> None:
    """Draws the nodes with their names."""
    figure.add_scatter(
        x=[place.x for place in places.values()],
        y=[place.y for place in places.values()],
        mode="markers+text",
        marker={"size": _NODE, "color": "#f2f2f2", "line": {"color": INK, "width": 1}},
        text=list(places),
        textfont={"size": 11, "color": INK},
        customdata=[hover[name] for name in places],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
        name="nodes",
    )


def _lay_out_figure(figure: Any, places: dict[str, _NodePosition], title: str, subtitle: str) -> Any:
    """Lays the figure out: both axes in proportion to pixels, so that lines end at the nodes."""
    xs, ys = [place.x for place in places.values()] or [0], [place.y for place in places.values()] or [0]
    # The title needs some width.
    margin = max(0.8, (_NARROW / _COLUMN - max(xs) + min(xs)) / 2)
    figure.update_layout(
        xaxis={"visible": False, "range": [min(xs) - margin, max(xs) + margin]},
        yaxis={"visible": False, "range": [min(ys) - _AROUND, max(ys) + _AROUND]},
        width=int(40 + _COLUMN * (max(xs) - min(xs) + 2 * margin)),
        height=int(_TOP + 40 + _ROW * (max(ys) - min(ys) + 2 * _AROUND)),
        margin={"l": 20, "r": 20, "b": 40, "t": _TOP},
        template=TEMPLATE,
        # Below the graph, in the margin: beside it the legend would take the graph's width.
        legend={"groupclick": "togglegroup", "orientation": "h", "x": 0, "y": 0, "yanchor": "top"},
        hovermode="closest",
    )
    return titled(figure, title, subtitle)


def _place_nodes(order_by_node: Mapping[str, int]) -> dict[str, _NodePosition]:
    """Returns where nodes are drawn, by name and from below: the rows that are there stand close together."""
    places: dict[str, _NodePosition] = {}
    for height, stage in enumerate(sorted(set(order_by_node.values()))):
        row = [name for name in order_by_node if order_by_node[name] == stage]
        for index, name in enumerate(row):
            places[name] = _NodePosition(index - (len(row) - 1) / 2, float(height))
    return places


def _curve(
    start: _NodePosition, end: _NodePosition, kind: str, places: Mapping[str, _NodePosition]
) -> tuple[list[float], list[float]]:
    """Returns points of a line that passes beside the nodes between its ends; q, k and v arrive side by side."""
    side = {"q": -1, "v": 1}.get(kind, 0)
    span = end.y - start.y
    # A line to the next row is straight; others go round the middle, where MLPs stand.
    bend = (0.13 * span if span > 1 else 0.0) * (side or (1 if start.x >= end.x else -1))
    # From the top of one node to the bottom of the other.
    start = _NodePosition(start.x, start.y + _RADIUS)
    end = _NodePosition(
        end.x + 0.6 * side * _RADIUS * _ROW / _COLUMN, end.y - (0.8 if side else 1.0) * _RADIUS
    )
    bend = _bend_around_nodes(start, end, bend, places)
    share = np.linspace(0, 1, 9)
    xs = start.x + (end.x - start.x) * share + bend * np.sin(np.pi * share)
    ys = start.y + (end.y - start.y) * share
    return [float(x) for x in xs], [float(y) for y in ys]


def _bend_around_nodes(
    start: _NodePosition, end: _NodePosition, bend: float, places: Mapping[str, _NodePosition]
) -> float:
    """Returns the bend nearest to this one with which a line keeps off all nodes between its ends, or the one that
    keeps off them most. Columns are narrow on a narrow page: only midway between two nodes is a line sure to be seen.
    """
    between = np.array([(one.x, one.y) for one in places.values() if start.y < one.y < end.y])
    if not len(between):
        return bend
    bends = np.array(sorted({bend, *(step / 20 for step in range(-30, 31))}, key=lambda one: abs(one - bend)))
    share = (between[:, 1] - start.y) / (end.y - start.y)
    at = start.x + (end.x - start.x) * share + bends[:, None] * np.sin(np.pi * share)
    gaps = np.abs(at - between[:, 0]).min(1).clip(max=_GAP)
    return float(bends[np.argmax(gaps)])


def _format_hover_text(row: Mapping[Any, Any]) -> str:
    lines = [f"<b>{row['name']}</b>"]
    if row["positions"] != "all":
        lines.append(f"at {row['positions']}")
    on = f" on {row['metric']}" if isinstance(row["metric"], str) else ""
    for name, said in (("effect", "exact effect"), ("estimate", "estimate")):
        if row[name] is not None and not pd.isna(row[name]):
            lines.append(f"{said}{on}: {row[name]:.4g}")
    return "<br>".join(lines)
