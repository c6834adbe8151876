"""Draws the embeddings of tokens and positions on two principal components that stay the same over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, CYCLIC, SEQUENTIAL, SYMBOLS
from interp_tasks.pages import Beside, Section, Text
from interp_tasks.report.attention import position_labels
from interp_tasks.report.draw import rounded, stepped

if TYPE_CHECKING:
    from interp_tasks.measurement.embeddings.geometry import Array
    from interp_tasks.report.snapshots import View

TITLE = "Embeddings"
#: Pixels; up to how many points are labelled; beyond how many tokens the rest is left out.
HEIGHT, LABELLED, MAX_TOKENS = 430, 30, 2000


def embeddings_section(views: Sequence[View]) -> Section:
    """Returns a plane for tokens and one for positions, of every view."""
    parts: list[Section] = [tokens_plane(view) for view in views]
    parts += [positions_plane(view) for view in views if view.snapshots[-1].positions is not None]
    if len(parts) == len(views):
        parts.append(Text("No table of positions: the model has none."))
    return Beside(
        parts,
        TITLE,
        "On the first two principal components of the last checkpoint shown; those of the other checkpoints, centred, "
        "are projected on the same two. Axes stay as they are; what is written on them is the share of the variance "
        "at the slider's step.",
    )


def tokens_plane(view: View) -> Section:
    """Draws the token embeddings on two principal components, coloured by value, or by angle where digits go round."""
    labels, values, noun = token_labels(view)
    tables = [snapshot.tables[0].rows[: len(labels)] for snapshot in view.snapshots]
    left_out = len(view.snapshots[0].tables[0].rows) - len(labels)
    more = f" (the first {len(labels):,})" if left_out else ""
    marker = {
        "size": 8,
        # The ends of the scale are near black and near white: a rim is seen on both grounds.
        "line": {"width": 0.8, "color": "#808080"},
        "color": values,
        "colorscale": SEQUENTIAL,
        "showscale": True,
        "colorbar": {"title": {"text": noun}, "thickness": 12, "outlinewidth": 0},
    }
    digits = [axis for axis in view.task.grid_axes() if axis.position is not None] if view.task else []
    if digits and len(digits[0].values) == len(labels) and len(labels) > 2:
        marker |= by_angle(values, strongest_frequency(tables[-1]), len(labels))
    return plane(view, tables, labels, marker, f"tokens{more}", noun, "W_E")


def strongest_frequency(table: Array) -> int:
    """Returns the frequency, from 1, that carries most of the variance of a table [digit d]."""
    import numpy as np

    power = (np.abs(np.fft.rfft(table, axis=0)) ** 2).sum(1)
    return 1 + int(power[1:].argmax())


def by_angle(digits: Sequence[float], frequency: int, period: int) -> dict[str, Any]:
    """Returns the settings of a plotly marker that colour digits by their angle at a frequency, in turns.

    On a ring neighbours have like colours then; by the digit itself they are a shuffle.
    """
    bar = {"title": {"text": f"turns at<br>frequency {frequency}"}, "thickness": 12, "outlinewidth": 0}
    return {
        "color": [frequency * digit / period % 1 for digit in digits],
        "colorscale": CYCLIC,
        "cmin": 0,
        "cmax": 1,
        "colorbar": {**bar, "tickvals": [0, 0.25, 0.5, 0.75, 1], "ticktext": ["0", "¼", "½", "¾", "1"]},
    }


def token_labels(view: View) -> tuple[list[str], list[float], str]:
    """Returns names and numbers of the tokens in the first table, and what the numbers mean."""
    table, task = view.snapshots[0].tables[0], view.task
    count = min(len(table.rows), MAX_TOKENS)
    axes = [] if task is None else [axis for axis in task.grid_axes() if axis.position is not None]
    if axes:
        digits = list(axes[0].values)[:count]
        return [str(digit) for digit in digits], [float(digit) for digit in digits], table.axis or "digit"
    stand_for = {} if task is None else task.token_values()
    if stand_for:
        values = sorted(stand_for.values())[:count]
        return [f"{value:g}" for value in values], values, "value"
    return [str(token) for token in range(count)], [float(token) for token in range(count)], "token"


def positions_plane(view: View) -> Section:
    tables = [snapshot.positions for snapshot in view.snapshots if snapshot.positions is not None]
    labels = position_labels(view.task, len(tables[0]))
    columns = [last_coordinate(label, position) for position, label in enumerate(labels)]
    colours, symbols = COLOURS["light"], SYMBOLS
    marker = {
        "size": 10,
        "color": [colours[column % len(colours)] for column in columns],
        "symbol": [symbols[column % len(symbols)] for column in columns],
    }
    on_grid = len(labels) > LABELLED and labels[0].startswith("(") and max(columns) < len(colours)
    key = {f"column {at}": (colours[at], symbols[at]) for at in sorted(set(columns))} if on_grid else {}
    return plane(view, tables, labels, marker, "positions", "position", "W_pos", key)


def last_coordinate(label: str, position: int) -> int:
    """Returns the number that a position is coloured by: its column, or itself."""
    inside = label.removeprefix("(").removesuffix(")").split(",")
    return int(inside[-1]) if label.startswith("(") and inside[-1].isdigit() else position


def plane(
    view: View,
    tables: Sequence[Array],
    labels: Sequence[str],
    marker: dict[str, Any],
    noun: str,
    one: str,
    table: str,
    key: Mapping[str, tuple[str, str]] | None = None,
) -> Section:
    """Draws rows of a table on the two principal components of its last checkpoint, which the slider moves.

    Args:
        key: of the legend, name -> colour and symbol (default: no legend).
    """
    import numpy as np
    import plotly.graph_objects as go

    from interp_tasks.measurement.embeddings.geometry import principal

    directions = principal(tables[-1]).directions
    centred = [points - points.mean(0) for points in tables]
    scores = np.stack([points @ directions.T for points in centred])
    if scores.shape[-1] < 2:
        scores = np.pad(scores, [(0, 0), (0, 0), (0, 2 - scores.shape[-1])])
    shares = [share(points, score) for points, score in zip(centred, scores, strict=True)]
    figure = go.Figure()
    short = len(labels) <= LABELLED
    figure.add_scatter(
        x=[],
        y=[],
        mode="markers+text" if short else "markers",
        text=list(labels),
        textposition="top center",
        textfont={"size": 10},
        marker=marker,
        cliponaxis=False,
        hovertemplate=f"{one} %{{text}}<br>(%{{x:.5g}}, %{{y:.5g}})<extra></extra>",
        showlegend=False,
    )
    for name, (colour, symbol) in (key or {}).items():
        # A trace without points, for the legend alone: what moves with the slider stays one trace.
        figure.add_scatter(
            x=[None],
            y=[None],
            name=name,
            mode="markers",
            marker={"size": 10, "color": colour, "symbol": symbol},
        )
    moves: dict[str, Any] = {
        "data.0.x": [rounded(each[:, 0], 5) for each in scores],
        "data.0.y": [rounded(each[:, 1], 5) for each in scores],
    }
    for axis, component in (("xaxis", 0), ("yaxis", 1)):
        low, high = float(scores[..., component].min()), float(scores[..., component].max())
        room = 0.08 * ((high - low) or 1.0)
        figure.update_layout({axis: {"range": [low - room, high + room], "zeroline": True}})
        moves[f"layout.{axis}.title.text"] = [
            f"{table}, component {component + 1} ({each[component]:.0%})" for each in shares
        ]
        figure.update_layout({axis: {"title": {"text": "", "standoff": 6}}})
    top = (45 if view.beside else 15) + (50 if key else 0)
    figure.update_layout(
        margin={"l": 60, "r": 15, "t": top, "b": 50}, showlegend=bool(key), legend={"y": 1.02}
    )
    alt = f"{noun} on two principal components at the step of the slider"
    return stepped(view, figure, moves, alt, HEIGHT)


def share(points: Array, scores: Array) -> list[float]:
    """Returns the share of the variance of points that lies along each of two components."""
    total = float((points**2).sum())
    return [float((scores[:, k] ** 2).sum()) / total if total else 0.0 for k in (0, 1)]
