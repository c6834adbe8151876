"""Figures of the tidy table, in the palette of the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_tasks.reporting.palette import COLOURS, SYMBOLS, template

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def values(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """A panel per metric: each variant's value with its interval (filled) and its baseline (open)."""
    from plotly.subplots import make_subplots

    metrics = list(dict.fromkeys(frame["metric"]))
    refs = list(dict.fromkeys(frame["ref"]))
    figure = make_subplots(
        rows=len(metrics),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.25 / len(metrics) ** 1.3,
    )
    for row, metric in enumerate(metrics, start=1):
        for index, ref in enumerate(refs):
            part = frame[(frame["metric"] == metric) & (frame["ref"] == ref)]
            if part.empty:
                continue
            figure.add_trace(series(part, str(ref), index, edited=True, in_legend=row == 1), row=row, col=1)
            figure.add_trace(series(part, str(ref), index, edited=False, in_legend=False), row=row, col=1)
        axis = scale(frame[frame["metric"] == metric])
        powers = {"dtick": 1, "exponentformat": "power"} if axis == "log" else {}
        figure.update_yaxes(title_text=metric, type=axis, row=row, col=1, **powers)
    # On every row: plotly would read head "0.1" as a number, and shared axes show only the last row's labels.
    figure.update_xaxes(type="category")
    figure.update_xaxes(title_text="variant", row=len(metrics), col=1)
    # Points of different checkpoints stand side by side, not on top of each other.
    figure.update_layout(
        scattermode="group", scattergap=0.6, height=140 + 230 * len(metrics), template=template("light")
    )
    return figure


def series(part: pandas.DataFrame, ref: str, index: int, *, edited: bool, in_legend: bool) -> dict[str, Any]:
    symbol = SYMBOLS[index % len(SYMBOLS)]
    colour = COLOURS["light"][index % len(COLOURS["light"])]
    several = part["intervention"].nunique() > 1
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": ref if edited else f"{ref}, unedited",
        "legendgroup": ref,
        "offsetgroup": ref,
        "showlegend": in_legend,
        "x": [
            f"{v}<br>{i}" if several else str(v)
            for v, i in zip(part["variant"], part["intervention"], strict=True)
        ],
        "y": part["value" if edited else "baseline"].tolist(),
        "marker": {"symbol": symbol if edited else f"{symbol}-open", "size": 10, "color": colour},
        "hovertemplate": f"{ref}<br>%{{x}}<br>%{{customdata}}<extra></extra>",
    }
    if edited:
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": (part["ci_high"] - part["value"]).tolist(),
            "arrayminus": (part["value"] - part["ci_low"]).tolist(),
        }
    trace["customdata"] = [
        f"value {row['value']:.6g} [{row['ci_low']:.4g}, {row['ci_high']:.4g}]"
        f"<br>unedited {row['baseline']:.6g}<br>effect {row['effect']:+.4g} "
        f"[{row['effect_ci_low']:.4g}, {row['effect_ci_high']:.4g}]"
        for row in part.to_dict("records")
    ]
    return trace


def scale(part: pandas.DataFrame) -> str:
    """Logarithmic where values span two powers of ten and nothing, interval included, reaches zero."""
    numbers = part[["value", "baseline", "ci_low"]].to_numpy(dtype=float)
    smallest, largest = numbers.min(), numbers.max()
    return "log" if smallest > 0 and largest > 100 * smallest else "linear"
