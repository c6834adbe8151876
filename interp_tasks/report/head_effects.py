"""Draws the effect of each head on the metrics: maps at the slider's step, and all heads over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SYMBOLS
from interp_tasks.pages import Beside, Section, number, signed
from interp_tasks.report.draw import (
    move_line,
    rounded,
    see_through,
    step_line,
    stepped,
    width_of,
)
from interp_tasks.report.snapshots import ALL, MODES, counted

if TYPE_CHECKING:
    import pandas

    from interp_tasks.report.published import Mark
    from interp_tasks.report.snapshots import View

#: Pixels: of a row of a map, between metrics, around all; narrowest cell that holds a number.
ROW, GAP, TOP, BOTTOM, NARROWEST = 34, 78, 60, 45, 46
#: Pixels: the lowest panel, on whose colour bar numbers stand apart.
LOWEST = 68
#: Pixels of a colour bar with its numbers.
BAR = 74
#: Column of the heads of a layer together.
TOGETHER = "all"
CURVE = 300
#: The share of all effects of single heads that have a colour of their own.
STRONGEST = 0.96


def effects_section(views: Sequence[View]) -> Section:
    """Returns the effect of each edit of each head on each metric, layer by head."""
    # Equal colours mean equal effects, at every step and in every view.
    metrics = dict.fromkeys(metric for view in views for metric in view.metrics)
    scales = {metric: largest_effect(views, metric) for metric in metrics}
    return Beside(
        [effect_maps(view, scales, width_of(views)) for view in views],
        "Effect of each head alone",
        f"The metric with the head edited minus without, on the same {counted(views)}; orange: it rises, blue: it "
        "falls. Colours of a metric mean the same at every step and under every edit; the strongest 4% of effects of "
        "single heads have the colour of the end. Column all: the heads of a layer together. Hover: 95% intervals.",
    )


def largest_effect(views: Sequence[View], metric: str) -> float:
    """Returns the end of the colour scale, which a few checkpoints of an untrained model would take up alone."""
    import pandas

    rows = pandas.concat([view.effects() for view in views])
    sizes = rows.loc[(rows["metric"] == metric) & rows["head"].notna(), "effect"].abs().dropna()
    if sizes.empty:
        return 1.0
    return float(sizes.quantile(STRONGEST)) or float(sizes.max()) or 1.0


def effect_maps(view: View, scales: Mapping[str, float], width: int) -> Section:
    """Draws the effect of every head under each edit, layer by head, which the slider moves over checkpoints."""
    from plotly.subplots import make_subplots

    layers, heads = view.snapshots[0].maps.shape[:2]
    metrics = view.metrics
    width -= BAR
    panel = max(ROW * layers, LOWEST)
    total_height = panel * len(metrics) + GAP * (len(metrics) - 1)
    figure = make_subplots(
        rows=len(metrics),
        cols=len(MODES),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=GAP / total_height if len(metrics) > 1 else 0,
        subplot_titles=[f"{metric}: {mode}" for metric in metrics for mode in MODES],
    )
    moves: dict[str, Any] = {}
    columns = [*map(str, range(heads)), TOGETHER]
    roomy = width / len(MODES) / len(columns) >= NARROWEST
    for index, (metric, mode) in enumerate((metric, mode) for metric in metrics for mode in MODES):
        grids = [grid(snapshot.effects, metric, mode, layers, heads) for snapshot in view.snapshots]
        figure.add_heatmap(
            x=columns,
            y=[str(layer) for layer in range(layers)],
            z=[],
            # The template's diverging colours, which a page in the dark scheme replaces.
            autocolorscale=True,
            zmin=-scales[metric],
            zmax=scales[metric],
            # One bar for each metric, beside the last of its maps.
            showscale=index % len(MODES) == len(MODES) - 1,
            colorbar={"thickness": 10, "len": panel / total_height, "x": 1.01, "xanchor": "left"}
            | {"y": 1 - (index // len(MODES) * (panel + GAP) + panel / 2) / total_height}
            | {"outlinewidth": 0, "tickfont": {"size": 10}}
            | ticks(scales[metric], *extremes(view, metric)),
            xgap=2,
            ygap=2,
            texttemplate="%{text}" if roomy else None,
            textfont={"size": 11},
            meta={"roomFrom": NARROWEST * len(columns) * len(MODES) + 90 + BAR},
            hovertemplate=f"{mode}, layer %{{y}}, head %{{x}}<br>{metric} %{{customdata[0]:.6g}}, unedited "
            "%{customdata[1]:.6g}<br>effect %{z:+.4g} [%{customdata[2]:+.4g}, %{customdata[3]:+.4g}]"
            "<br>p adj. %{customdata[4]:.3g}<extra></extra>",
            row=index // len(MODES) + 1,
            col=index % len(MODES) + 1,
        )
        moves[f"data.{index}.z"] = [rounded(each[..., 0]) for each in grids]
        moves[f"data.{index}.customdata"] = [rounded(each[..., 1:]) for each in grids]
        if roomy:
            moves[f"data.{index}.text"] = [
                [[signed(value) for value in row] for row in each[..., 0]] for each in grids
            ]
    figure.update_xaxes(type="category", showgrid=False, ticks="", title={"standoff": 2})
    figure.update_yaxes(type="category", showgrid=False, ticks="", autorange="reversed")
    for column in range(len(MODES)):
        figure.update_xaxes(title_text="head", row=len(metrics), col=column + 1)
    for row in range(len(metrics)):
        figure.update_yaxes(title_text="layer", row=row + 1, col=1)
    figure.update_annotations(font_size=12)
    top = TOP if view.beside else TOP - 25
    figure.update_layout(margin={"l": 50, "r": 10 + BAR, "t": top, "b": BOTTOM})
    alt = f"effects of {', '.join(MODES)} on {', '.join(metrics)}, layer by head, at the step of the slider"
    return stepped(view, figure, moves, alt, top + total_height + BOTTOM)


def extremes(view: View, metric: str) -> tuple[float, float]:
    """Returns the lowest and the highest effect that the maps of a metric show."""
    effects = view.effects()
    shown = effects.loc[(effects["metric"] == metric) & (effects["variant"] != ALL), "effect"].dropna()
    return (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 0.0)


def ticks(end: float, lowest: float, highest: float) -> dict[str, Any]:
    """Returns the ticks of a colour bar: its ends and 0; an end says so where effects beyond it have its colour too."""
    text = f"{end:.2g}"
    low, high = (
        f"{abs(each):.2g}" if abs(each) > end else text for each in (min(lowest, 0), max(highest, 0))
    )
    return {
        "tickvals": [-end, 0, end],
        "ticktext": [f"{'' if low == text else '≤ '}−{text}", "0", f"{'' if high == text else '≥ '}{text}"],
    }


def grid(effects: pandas.DataFrame, metric: str, mode: str, layers: int, heads: int) -> Any:
    """Returns ``[layer head+1 (effect, value, baseline, low, high, p)]``; last, the layer's heads together."""
    import numpy as np

    columns = ["effect", "value", "baseline", "effect_ci_low", "effect_ci_high", "p_adjusted"]
    rows = effects[(effects["metric"] == metric) & (effects["intervention"] == mode)].set_index("variant")
    values = np.full((layers, heads + 1, len(columns)), np.nan)
    numbers = rows[columns].astype(float)
    for layer in range(layers):
        for head in range(heads):
            values[layer, head] = numbers.loc[f"{layer}.{head}"]
        values[layer, heads] = numbers.loc[f"layer {layer}"]
    return values


def ablation_section(views: Sequence[View], marks: Mapping[str, Sequence[Mark]]) -> Section:
    """Returns all heads edited at once, at every checkpoint, beside the unedited model and published numbers."""
    parts = []
    for metric in dict.fromkeys(metric for view in views for metric in view.metrics):
        figures = {
            view.name: [mark for mark in marks.get(view.name, ()) if mark.metric == metric] for view in views
        }
        metric_views = [view for view in views if metric in view.metrics]
        axis = common_axis(metric, metric_views, [mark for each in figures.values() for mark in each])
        parts += [ablation_curve(view, metric, figures[view.name], axis) for view in metric_views]
    examples = counted(views)
    stars = "Stars: the published number, in the unit of this model. " if any(marks.values()) else ""
    return Beside(
        parts,
        "All heads edited at once, over training",
        f"Each metric with its 95% interval, over the same {examples} at every checkpoint: where they are few, all "
        f"points are off the theoretical value by the same sampling error. {stars}A click goes to the nearest "
        "checkpoint.",
        narrowest=24 if len(views) == 1 else 30,
    )


def common_axis(metric: str, views: Sequence[View], marks: Sequence[Mark]) -> dict[str, Any]:
    """Returns one axis for all views, with room for every interval and mark."""
    import math

    import pandas

    rows = [view.unedited() for view in views]
    rows += [effects[effects["variant"] == ALL] for effects in (view.effects() for view in views)]
    frame = pandas.concat([each[each["metric"] == metric] for each in rows])
    columns = [name for name in ("value", "value_ci_low", "value_ci_high") if name in frame]
    values = [value for name in columns for value in frame[name].dropna().tolist()]
    values += [mark.value for mark in marks]
    axis = value_axis(metric, values)
    ends = [min(values), max(values)] if values else [0.0, 1.0]
    if axis["type"] == "log":
        ends = [math.log10(end) for end in ends]
    room = 0.05 * (ends[1] - ends[0]) or 0.05
    return {**axis, "range": [ends[0] - room, ends[1] + room]}


def ablation_curve(view: View, metric: str, marks: Sequence[Mark], axis: Mapping[str, Any]) -> Section:
    """Draws a metric over checkpoints, unedited and with all heads edited."""
    import plotly.graph_objects as go

    unedited = view.unedited()
    unedited = unedited[unedited["metric"] == metric]
    effects = view.effects()
    every = effects[(effects["variant"] == ALL) & (effects["metric"] == metric)]
    figure = go.Figure()
    lines = {"unedited": unedited} | {mode: every[every["intervention"] == mode] for mode in MODES}
    # As in the demo the model as it is is blue, and under uniform attention orange; published numbers have the fourth.
    for index, (name, rows) in zip((0, 1, 2, 4), lines.items(), strict=True):
        add_line(figure, name, rows.sort_values("step"), COLOURS["light"][index], SYMBOLS[index])
    for mark in marks:
        add_mark(figure, mark)
    figure.update_yaxes(title_text=metric, **axis)
    figure.update_xaxes(title_text="step", rangemode="tozero")
    top = 90 if view.beside else 60
    figure.update_layout(
        shapes=[step_line()], hovermode="x", margin={"l": 60, "r": 15, "t": top, "b": 45}, legend={"y": 1.02}
    )
    alt = f"{metric} at every checkpoint, unedited and with all heads edited: {', '.join(MODES)}"
    return stepped(view, figure, move_line(view), alt, CURVE + top, picks=view.steps)


def value_axis(metric: str, values: Sequence[int | float]) -> dict[str, Any]:
    """Returns an axis, logarithmic where values span a power of ten and are no shares."""
    from circuits.figures.style import log_axis

    known = [value for value in values if value == value]
    if "accuracy" in metric or not known or min(known) <= 0 or max(known) < 10 * min(known):
        return {"type": "linear"}
    return log_axis(min(known), max(known))


def add_line(figure: Any, name: str, rows: pandas.DataFrame, colour: str, symbol: str) -> None:
    """Draws a line through the checkpoints, with its interval as a band and in the hover text."""
    steps, values = rows["step"].tolist(), rows["value"].tolist()
    known = "value_ci_low" in rows and bool(rows["value_ci_low"].notna().all())
    lows = rows["value_ci_low"].tolist() if known else values
    highs = rows["value_ci_high"].tolist() if known else values
    if known and len(steps) > 1:
        figure.add_scatter(
            x=[*steps, *reversed(steps)],
            y=[*highs, *reversed(lows)],
            fill="toself",
            fillcolor=see_through(colour, 0.18),
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
        )
    figure.add_scatter(
        x=steps,
        y=values,
        name=name,
        legendgroup=name,
        mode="lines+markers",
        line={"width": 1.6, "color": colour},
        marker={"symbol": symbol, "size": 7},
        customdata=[[number(low), number(high)] for low, high in zip(lows, highs, strict=True)],
        hovertemplate=f"{name}: %{{y:.6g}} [%{{customdata[0]}}, %{{customdata[1]}}]<extra></extra>",
    )


def add_mark(figure: Any, mark: Mark) -> None:
    figure.add_scatter(
        x=[mark.step],
        y=[mark.value],
        name="published",
        legendgroup="published",
        showlegend=not any(trace.name == "published" for trace in figure.data),
        mode="markers",
        marker={"symbol": "star", "size": 13, "color": COLOURS["light"][3], "line": {"width": 1}},
        hovertemplate=f"{mark.says}<extra></extra>",
    )
