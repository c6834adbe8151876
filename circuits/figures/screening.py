"""Draws a screening: exact effects against their estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from circuits.figures.palette import COLOURS
from circuits.figures.style import finished, interval


def screening_figure(
    frame: pd.DataFrame,
    correlation: pd.DataFrame,
    metrics: Sequence[str],
    words: Sequence[str] | None = None,
) -> Any:
    """Draws a panel per metric: exact effect against estimate of the measured rows, and the identity line.

    Args:
        words: by position, its name (default: its number).
    """
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    by_metric = correlation.set_index("metric")
    titles = [
        f"{metric}: Spearman {by_metric.loc[metric, 'spearman']:.2f} over {by_metric.loc[metric, 'n']} of "
        f"{by_metric.loc[metric, 'of']}"
        for metric in metrics
    ]
    figure = make_subplots(rows=1, cols=len(metrics), subplot_titles=titles)
    for column, metric in enumerate(metrics, start=1):
        measured = frame[(frame["metric"] == metric) & frame["effect"].notna()]
        ends = np.array(
            [measured[["estimate", "effect"]].min().min(), measured[["estimate", "effect"]].max().max()]
        )
        line = graph_objects.Scatter(
            x=ends, y=ends, mode="lines", line={"dash": "dash", "color": "#808080"}, hoverinfo="skip"
        )
        points = graph_objects.Scatter(
            x=list(measured["estimate"]),
            y=list(measured["effect"]),
            error_x=interval(measured["estimate"], measured["estimate_ci_low"], measured["estimate_ci_high"]),
            error_y=interval(measured["effect"], measured["effect_ci_low"], measured["effect_ci_high"]),
            mode="markers",
            marker={"color": COLOURS["light"][0], "size": 7},
            text=_named(measured, words),
            hovertemplate="%{text}<br>estimate %{x:.4g}<br>effect %{y:.4g}" + f"<extra>{metric}</extra>",
        )
        for trace in (line, points):
            figure.add_trace(trace.update(showlegend=False), row=1, col=column)
        figure.update_xaxes(title_text=f"estimated effect on {metric}", row=1, col=column)
    figure.update_yaxes(title_text="exact effect", row=1, col=1)
    figure.update_layout(height=430, width=80 + 440 * len(metrics), margin={"t": 40, "b": 60})
    subtitle = (
        "A point per patch that was measured, with 95% intervals over examples; dashed: where both agree."
    )
    return finished(figure, "Estimated and exact effects", subtitle)


def _named(rows: pd.DataFrame, words: Sequence[str] | None) -> list[str]:
    if words is None or "position" not in rows:
        return list(rows["variant"])
    pairs = zip(rows["variant"], rows["position"], strict=True)
    return [
        name if pd.isna(at) else name.replace(f"position {at}", f"position {words[at]}") for name, at in pairs
    ]
