"""Draws the pictures of the demo: curves, matrices, errors, a ring of embeddings, where heads look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, bars, curve, heat, scatter

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects

    from interp_tasks.experiments._demo.matrices import Filled
    from interp_tasks.experiments._demo.sums import Answered, Ring

#: What the unedited model and the edited one are called on the whole page; digits that are named beside the ring.
TRAINED, UNIFORM, LABELLED = "as trained", "uniform attention", 5


def curve_figure(
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    span: tuple[int, int] | None,
    level: float,
    axis: str,
) -> plotly.graph_objects.Figure:
    """Returns metrics over training, with the span of the drop shaded and a dashed line at a level."""
    named = {
        name: Series(*points, style={"mode": "lines"}, look=2 * look)
        for look, (name, points) in enumerate(series.items())
    }
    lines: list[dict[str, Any]] = [{"y": level}]
    lines += [] if span is None else [{"x0": span[0], "x1": span[1]}]
    return draw([curve(named, x="training step", y=axis, lines=lines, y_axis={"rangemode": "tozero"})])


def matrix_figure(filled: Filled, step: int, index: int) -> plotly.graph_objects.Figure:
    """Returns a matrix with its blanks, the whole one, and what a checkpoint makes of it as it is and edited."""
    import numpy as np

    hidden, truth = filled.hidden[index], filled.truth[index]
    titles = [f"Given: {int(hidden.sum())} of {hidden.size} are blank", "The truth"]
    outputs = [filled.trained, filled.uniform]
    for name, made in zip(("Filled in", UNIFORM.capitalize()), outputs, strict=True):
        titles.append(f"{name}: error {short(filled.error(made, step, index))}")
    values = [np.where(hidden, np.nan, truth), truth, *(made[step, index] for made in outputs)]
    largest = float(abs(filled.truth).max())
    panels = [matrix_panel(each, hidden, title, largest) for each, title in zip(values, titles, strict=True)]
    return draw(panels, columns=2)


def matrix_panel(values: np.ndarray, hidden: np.ndarray, title: str, largest: float) -> Panel:
    """Returns a matrix as coloured cells with its numbers, those at blanks in bold."""
    text = [
        [
            "" if value != value else f"<b>{value:.2f}</b>" if blank else f"{value:.2f}"
            for value, blank in zip(*row, strict=True)
        ]
        for row in zip(values, hidden, strict=True)
    ]
    axes: dict[str, Any] = {"across": "column", "down": "row", "text": text, "bar": False}
    return heat(values, title, unit="entry", signed=True, end=largest, width=230, **axes)


def bars_figure(
    panels: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]],
    moments: Sequence[str],
    level: float,
    axis: str,
    percent: bool = False,
) -> plotly.graph_objects.Figure:
    """Returns bars with their intervals, panels with an axis each, and a dashed line at a level in the first.

    Args:
        panels: title -> name of an edit -> for each moment ``value``, ``value_ci_low`` and ``value_ci_high``.
        moments: names of what stands side by side.
    """
    drawn: list[Panel] = []
    for title, edits in panels.items():
        series = {}
        for look, (name, points) in enumerate(edits.items()):
            columns = [[point[key] for point in points] for key in ("value", "value_ci_low", "value_ci_high")]
            labels = [f"{value:.0%}" if percent else short(value) for value in columns[0]]
            style = {"text": labels, "textposition": "outside", "cliponaxis": False}
            values, low, high = columns
            series[name] = Series(list(moments), values, low, high, style=style, look=look)
        lines = [] if drawn else [{"y": level}]
        drawn.append(bars(series, title, y=axis if not drawn else "", lines=lines, width=240))
    figure = draw(drawn, columns=len(drawn), barmode="group")
    return figure.update_yaxes(tickformat=".0%") if percent else figure


def ring_figure(ring: Ring, step: int) -> plotly.graph_objects.Figure:
    """Returns digits as points in a plane, joined in the order of their phases; the first ones are named."""
    points = ring.points[step]
    order = sorted(range(len(points)), key=lambda digit: ring.phases[digit])
    order.append(order[0])
    reach = 1.3 * float(abs(ring.points).max())
    names = [str(digit) for digit in range(len(points))]
    colours: dict[str, Any] = {
        "size": 8,
        "color": list(ring.phases),
        "colorscale": "Phase",
        "cmin": 0,
        "cmax": 1,
        "symbol": "circle",
    }
    around: dict[str, Any] = {
        "mode": "lines",
        "line": {"color": "rgba(128,128,128,0.5)", "width": 1},
        "hoverinfo": "skip",
    }
    named = {
        "mode": "text",
        "text": names[:LABELLED],
        "hoverinfo": "skip",
        "textfont": {"size": 13, "weight": "bold"},
    }
    # Names stand outside the ring, where they lie on no point.
    outside = 1.17 * points[:LABELLED]
    series = {
        "order": Series(points[order, 0], points[order, 1], style=around),
        "digits": Series(
            points[:, 0], points[:, 1], hover=[f"digit {name}" for name in names], style={"marker": colours}
        ),
        "names": Series(outside[:, 0], outside[:, 1], style=named),
    }
    title = f"Embeddings of 0 to {len(points) - 1}: {ring.shares[step]:.0%} of their variance is seen here"
    panel = scatter(
        series, title, x=f"cosine of frequency {ring.frequency}", y="sine", square=True, height=340
    )
    hide: dict[str, Any] = {"range": [-reach, reach], "showticklabels": False, "zeroline": False}
    return draw([panel], showlegend=False).update_xaxes(constrain="domain", **hide).update_yaxes(**hide)


def attention_figure(answered: Answered, step: int, index: int) -> plotly.graph_objects.Figure:
    """Returns where each head looks when the model answers a sum, as it is and under uniform attention."""
    import pandas

    a, b = answered.operands[index]
    panels = []
    for edit, name in enumerate((TRAINED, UNIFORM)):
        said, right = int(answered.said[step, edit, index]), int(answered.right[index])
        judged = "right" if said == right else f"wrong: it is {right}"
        looks = answered.looks[step, edit, index]
        table = pandas.DataFrame(looks, columns=[f"a = {a}", f"b = {b}", "="][-looks.shape[1] :])
        title = f"{name.capitalize()}: {a} + {b} = {said}, {judged}"
        axes: dict[str, Any] = {
            "across": "attention from the last token to",
            "down": "head",
            "bar": bool(edit),
        }
        panels.append(heat(table, title, unit="attention", end=1.0, width=240, row=40, **axes))
    return draw(panels, columns=2)


def short(value: float) -> str:
    """Returns a number with two significant digits, zeros included, and no exponent: 0.20, 0.000055; a dash for NaN."""
    if value != value:
        return "–"
    if value == 0 or abs(value) >= 10:
        return f"{value:.0f}"
    rounded = float(f"{value:.1e}")
    return f"{value:.{1 - math.floor(math.log10(abs(rounded)))}f}"
