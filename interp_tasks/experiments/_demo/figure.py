"""Draws the pictures of the demo: curves, matrices, errors, a ring of embeddings, where heads look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, CYCLIC, SEQUENTIAL, template

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects

#: Pixels.
CURVE, MATRIX, BARS, RING, ATTENTION = 250, 316, 306, 346, 286
#: What the unedited model and the edited one are called, and their colours, on the whole page.
TRAINED, UNIFORM = "as trained", "uniform attention"
BLUE, ORANGE, GREEN, GREY = (COLOURS["light"][index] for index in (0, 1, 2, 6))
#: The share of the largest below which a bar has no room for its number.
LOW = 0.12
#: Entries that the model is given are drawn paler than those it fills in, by this factor.
PALER = 2.5


def empty(height: int, **layout: Any) -> plotly.graph_objects.Figure:
    import plotly.graph_objects as go

    return go.Figure(layout={"template": template("light"), "height": height, **layout})


def curve(
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    span: tuple[int, int] | None,
    level: float,
    says: str,
    axis: str,
) -> plotly.graph_objects.Figure:
    """Returns metrics over training, with the span of the drop shaded and a dotted line at a level.

    Args:
        series: name -> steps and values; the first is drawn strongest.
        says: stands at the dotted line.
        axis: title of the vertical axis.
    """
    figure = empty(CURVE, margin={"l": 60, "r": 15, "t": 28, "b": 45}, hovermode="x", legend={"y": 1.02})
    for index, (name, (steps, values)) in enumerate(series.items()):
        figure.add_scatter(
            x=list(steps),
            y=[float(f"{value:.4g}") for value in values],
            name=name,
            mode="lines",
            line={"color": (BLUE, GREEN)[index % 2], "width": 2.2 if index == 0 else 1.4},
            hovertemplate=f"{name} %{{y:.4g}}<extra></extra>",
        )
    figure.add_shape(step_line())
    if span is not None:
        figure.add_shape(
            type="rect",
            yref="paper",
            x0=span[0],
            x1=span[1],
            y0=0,
            y1=1,
            line={"width": 0},
            fillcolor="rgba(128,128,128,0.15)",
            layer="below",
        )
    figure.add_shape(
        type="line",
        xref="paper",
        x0=0,
        x1=1,
        y0=level,
        y1=level,
        line={"color": GREY, "dash": "dot", "width": 1.5},
    )
    figure.add_annotation(
        xref="paper",
        x=1,
        y=level,
        text=says,
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        # Clear of the slider's line at the last step.
        xshift=-5,
        font={"size": 12},
    )
    figure.update_xaxes(title_text="training step")
    figure.update_yaxes(title_text=axis, rangemode="tozero")
    return figure


def step_line() -> dict[str, Any]:
    """Returns a vertical line at the slider's step, shape 0 of its figure; its place is moved."""
    line = {"color": GREY, "width": 2}
    return {"type": "line", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "line": line}


def matrix(
    values: np.ndarray, hidden: np.ndarray, largest: float, blank: bool = False
) -> plotly.graph_objects.Figure:
    """Returns a matrix as coloured cells with its numbers: given entries pale, blanks strong.

    Args:
        values, hidden: ``[row column]``.
        largest: the end of the colour scale.
        blank: a question mark at each blank in place of its number.
    """
    figure = empty(MATRIX, margin={"l": 4, "r": 4, "t": 30, "b": 4})
    given, filled = split(values, hidden)
    common = {"xgap": 2, "ygap": 2, "showscale": False, "hoverongaps": False, "autocolorscale": True}
    where = "row %{y}, column %{x}: "
    figure.add_heatmap(
        z=given,
        zmin=-PALER * largest,
        zmax=PALER * largest,
        texttemplate="%{z:.2f}",
        textfont={"size": 11},
        hovertemplate=where + "%{z:.2f}, given<extra></extra>",
        **common,
    )
    figure.add_heatmap(
        z=filled,
        zmin=-largest,
        zmax=largest,
        texttemplate="%{z:.2f}",
        textfont={"size": 11, "weight": "bold"},
        hovertemplate=where + "%{z:.3f}<extra></extra>",
        **common,
    )
    if blank:
        figure.data[1].update(
            colorscale=[[0, "rgba(128,128,128,0.12)"], [1, "rgba(128,128,128,0.12)"]],
            autocolorscale=False,
            # The room that a cell needs is that of its mark, not of the number behind it.
            text=marks(hidden),
            texttemplate="%{text}",
            textfont={"size": 15, "color": GREY},
            hovertemplate="row %{y}, column %{x}: blank<extra></extra>",
        )
    rows, columns = values.shape
    hide = {"showticklabels": False, "showgrid": False, "zeroline": False, "ticks": "", "fixedrange": True}
    figure.update_yaxes(
        range=[rows - 0.5, -0.5], scaleanchor="x", constrain="domain", constraintoward="top", **hide
    )
    figure.update_xaxes(range=[-0.5, columns - 0.5], constrain="domain", **hide)
    return titled(figure)


def marks(hidden: np.ndarray) -> list[list[str]]:
    """Returns a question mark for each blank, and nothing elsewhere."""
    return [["?" if cell else "" for cell in row] for row in hidden]


def titled(figure: plotly.graph_objects.Figure) -> plotly.graph_objects.Figure:
    """Gives a figure room for a title that moves with the slider."""
    return figure.update_layout(
        title={"text": "", "font": {"size": 14}, "x": 0.5, "xanchor": "center", "y": 1, "yanchor": "top"}
        | {"pad": {"t": 4}}
    )


def split(values: np.ndarray, hidden: np.ndarray, digits: int = 3) -> tuple[list[Any], list[Any]]:
    """Returns the entries that are given, and the others: rows with ``None`` elsewhere."""
    pairs = [
        [(round(float(value), digits), bool(blank)) for value, blank in zip(*row, strict=True)]
        for row in zip(values, hidden, strict=True)
    ]
    return (
        [[None if blank else value for value, blank in row] for row in pairs],
        [[value if blank else None for value, blank in row] for row in pairs],
    )


def bars(
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
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), horizontal_spacing=0.12)
    colours = (BLUE, ORANGE, COLOURS["light"][3])
    for column, edits in enumerate(panels.values(), start=1):
        # An error five hundred times smaller would be no bar at all on the axis of the other.
        largest = max(top(point) for points in edits.values() for point in points)
        largest = max(level, largest) if column == 1 else largest
        power = small_power(largest)
        if power:
            figure.layout.annotations[column - 1].text += f", {in_powers(power)}"
            edits = {name: [larger(point, 10.0**power) for point in points] for name, points in edits.items()}
            largest *= 10.0**power
        figure.update_yaxes(range=[0, 1.18 * largest or 1], row=1, col=column)
        for index, (name, points) in enumerate(edits.items()):
            values = [point["value"] for point in points]
            figure.add_bar(
                x=list(moments),
                y=values,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                marker={"color": colours[index]},
                text=[label(point, largest, percent) for point in points],
                # Within a bar its interval would run over the number, but for its middle; a low bar is narrower.
                textposition=["outside" if is_low(point, largest) else "auto" for point in points],
                insidetextanchor="middle",
                textangle=0,
                textfont={"size": 10},
                constraintext="none",
                cliponaxis=False,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [whisker(point, "value_ci_high") for point in points],
                    "arrayminus": [whisker(point, "value_ci_low") for point in points],
                    "thickness": 1.3,
                },
                hovertemplate="%{x}, "
                + name
                + ": %{y:.4g}"
                + (f" {in_powers(power)}" if power else "")
                + "<extra></extra>",
                row=1,
                col=column,
            )
    line = {"color": GREY, "dash": "dash", "width": 1.6}
    figure.add_shape(type="line", xref="x domain", x0=0, x1=1, y0=level, y1=level, line=line)
    figure.update_yaxes(title_text=axis, row=1, col=1)
    if percent:
        figure.update_yaxes(tickformat=".0%")
    figure.update_annotations(font_size=13)
    return figure.update_layout(
        template=template("light"),
        height=BARS,
        margin={"l": 60, "r": 15, "t": 56, "b": 45},
        legend={"y": 1.12},
        bargap=0.15,
    )


def small_power(largest: float) -> int:
    """Returns by which power of ten numbers on an axis are multiplied: of those below 0.001 a bar has no room for."""
    return -math.floor(math.log10(largest)) if 0 < largest < 1e-3 else 0


def in_powers(power: int) -> str:
    """Returns what numbers that were so multiplied are to be multiplied by: ×10⁻⁴."""
    return "×10⁻" + str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def larger(point: Mapping[str, Any], factor: float) -> dict[str, Any]:
    return {key: factor * point[key] for key in ("value", "value_ci_low", "value_ci_high")}


def label(point: Mapping[str, Any], largest: float, percent: bool) -> str:
    """Returns the number of a bar; one that stands above its bar stands above the interval too."""
    shown = f"{point['value']:.0%}" if percent else short(point["value"])
    above = is_low(point, largest) and top(point) > point["value"] + LOW / 10 * largest
    return f"{shown}<br> " if above else shown


def top(point: Mapping[str, Any]) -> float:
    """Returns the upper end of a bar with its interval; of one example there is none."""
    return float(
        point["value"] if point["value_ci_high"] != point["value_ci_high"] else point["value_ci_high"]
    )


def whisker(point: Mapping[str, Any], end: str) -> float | str:
    """Returns how far one end of an interval is from its value; none where all examples agree, or there is one."""
    # Plotly takes what is missing for 0, and draws a flat cap there.
    return abs(point[end] - point["value"]) if point["value_ci_high"] > point["value_ci_low"] else "none"


def is_low(point: Mapping[str, Any], largest: float) -> bool:
    """Returns whether a bar is too low for its number."""
    return bool(point["value"] < LOW * largest)


def short(value: float) -> str:
    """Returns a number with two significant digits, zeros included, and no exponent: 0.20, 0.000055; a dash for NaN."""
    if value != value:
        return "–"
    if value == 0 or abs(value) >= 10:
        return f"{value:.0f}"
    rounded = float(f"{value:.1e}")
    return f"{value:.{1 - math.floor(math.log10(abs(rounded)))}f}"


def ring(
    points: np.ndarray, phases: Sequence[float], reach: float, frequency: int
) -> plotly.graph_objects.Figure:
    """Returns digits as points in a plane, joined in the order of their phases.

    Args:
        points: ``[digit 2]``.
        phases: of each digit on the ring, 0 to 1.
        reach: axes go from minus this to this.
    """
    order = around(phases)
    figure = empty(RING, margin={"l": 10, "r": 10, "t": 30, "b": 35}, showlegend=False)
    labels = [str(digit) for digit in range(len(points))]
    figure.add_scatter(
        x=[], y=[], mode="lines", line={"color": "rgba(128,128,128,0.5)", "width": 1}, hoverinfo="skip"
    )
    figure.add_scatter(
        x=[],
        y=[],
        mode="markers",
        customdata=labels,
        marker={"size": 8, "color": [phases[digit] for digit in range(len(points))], "colorscale": CYCLIC}
        | {"cmin": 0, "cmax": 1},
        hovertemplate="digit %{customdata}<extra></extra>",
    )
    # Names stand outside the ring, where they lie on no point.
    figure.add_scatter(
        x=[],
        y=[],
        mode="text",
        text=labels[:LABELLED],
        textfont={"size": 13, "weight": "bold"},
        hoverinfo="skip",
    )
    assert len(order) == len(points) + 1
    square = {"range": [-reach, reach], "zeroline": False, "showticklabels": False, "ticks": ""}
    figure.update_xaxes(title_text=f"cosine of frequency {frequency}", constrain="domain", **square)
    figure.update_yaxes(title_text="sine", scaleanchor="x", constrain="domain", **square)
    return titled(figure)


#: Digits that are named beside the ring, and where: so many times as far from the middle as their points.
LABELLED, OUTSIDE = 5, 1.17


def around(phases: Sequence[float]) -> list[int]:
    """Returns digits in the order of their phases, the first one again at the end."""
    order = sorted(range(len(phases)), key=lambda digit: phases[digit])
    return [*order, order[0]]


def attention(heads: int, keys: int) -> plotly.graph_objects.Figure:
    """Returns rows of heads and columns of the tokens that they look at; values are moved."""
    figure = empty(ATTENTION, margin={"l": 60, "r": 10, "t": 50, "b": 35})
    figure.add_heatmap(
        z=[],
        y=[f"head {head}" for head in range(heads)],
        zmin=0,
        zmax=1,
        colorscale=SEQUENTIAL,
        showscale=False,
        xgap=3,
        ygap=3,
        texttemplate="%{z:.2f}",
        textfont={"size": 13},
        hovertemplate="%{y}: %{z:.3f} of its attention<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="")
    figure.update_xaxes(
        tickvals=list(range(keys)),
        ticktext=[""] * keys,
        showgrid=False,
        zeroline=False,
        ticks="",
        tickfont={"size": 15},
        title_text="attention from the last token to each",
    )
    return titled(figure)
