"""The figure of a screening: exact effects against their estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from circuits.figures.palette import COLOURS
from circuits.figures.style import finished, interval


def screening_figure(frame: pd.DataFrame, correlation: pd.DataFrame, metrics: Sequence[str]) -> Any:
    """A panel per metric: exact effect against estimate of the measured rows, and the identity."""
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    agreement = correlation.set_index("metric")
    titles = [
        f"{metric}: Spearman {agreement.loc[metric, 'spearman']:.2f} over {agreement.loc[metric, 'n']} of "
        f"{agreement.loc[metric, 'of']}"
        for metric in metrics
    ]
    found = make_subplots(rows=1, cols=len(metrics), subplot_titles=titles)
    for column, metric in enumerate(metrics, start=1):
        dots = frame[(frame["metric"] == metric) & frame["effect"].notna()]
        ends = np.array([dots[["estimate", "effect"]].min().min(), dots[["estimate", "effect"]].max().max()])
        line = graph_objects.Scatter(
            x=ends, y=ends, mode="lines", line={"dash": "dash", "color": "#808080"}, hoverinfo="skip"
        )
        points = graph_objects.Scatter(
            x=list(dots["estimate"]),
            y=list(dots["effect"]),
            error_x=interval(dots["estimate"], dots["estimate_ci_low"], dots["estimate_ci_high"]),
            error_y=interval(dots["effect"], dots["effect_ci_low"], dots["effect_ci_high"]),
            mode="markers",
            marker={"color": COLOURS["light"][0], "size": 7},
            text=list(dots["variant"]),
            hovertemplate="%{text}<br>estimate %{x:.4g}<br>effect %{y:.4g}" + f"<extra>{metric}</extra>",
        )
        for trace in (line, points):
            found.add_trace(trace.update(showlegend=False), row=1, col=column)
        found.update_xaxes(title_text=f"estimated effect on {metric}", row=1, col=column)
    found.update_yaxes(title_text="exact effect", row=1, col=1)
    found.update_layout(height=430, width=80 + 440 * len(metrics), margin={"t": 40, "b": 60})
    said = "A point per patch that was measured, with 95% intervals over examples; dashed: where both agree."
    return finished(found, "Estimated and exact effects", said)
