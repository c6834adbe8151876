"""The figure of ``gradients``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from interp_tasks.experiments.gradients.measure import STAGES
from interp_tasks.measurement.curve_figures import line
from interp_tasks.pages.palette import COLOURS, SEQUENTIAL, SYMBOLS, template

if TYPE_CHECKING:
    import plotly.graph_objects

    from interp_tasks.experiments.gradients.measure import Norms

#: Heights in pixels: of the lines, of a tensor's row in a map, between panels, and around all.
LINES, ROW, GAP, AROUND = 320, 26, 90, 120


def figure(logged: Mapping[str, Norms]) -> plotly.graph_objects.Figure:
    """By stage a map of each tensor's norm over its largest, and below it the norms themselves."""
    from plotly.subplots import make_subplots

    from circuits.figures.style import POWERS

    heights = [height for one in logged.values() for height in (ROW * max(4, len(one.norms)), LINES)]
    whole = sum(heights) + GAP * (len(heights) - 1)
    found = make_subplots(
        rows=len(heights),
        cols=1,
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=GAP / whole,
        subplot_titles=[
            title for stage in logged for title in (f"{stage}: norm / its largest", f"{stage}: norm")
        ],
    )
    for place, (stage, one) in enumerate(logged.items()):
        row = 2 * place + 1
        found.add_trace(
            {
                "type": "heatmap",
                "x": list(one.steps),
                "y": list(one.norms),
                "z": [
                    [finite(value / max(values)) if max(values) else None for value in values]
                    for values in one.norms.values()
                ],
                "coloraxis": "coloraxis",
                "hovertemplate": "%{y}, step %{x}<br>%{z:.2f} of its largest<extra></extra>",
            },
            row=row,
            col=1,
        )
        found.update_yaxes(autorange="reversed", dtick=1, row=row, col=1)
        for index, (name, values) in enumerate(one.norms.items()):
            style = line(index)
            found.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": list(one.steps),
                    # A log axis has no room for 0.
                    "y": [finite(value) or None for value in values],
                    "name": name,
                    "legendgroup": name,
                    "showlegend": stage == STAGES[0],
                    "line": {**style, "width": 1.5},
                    # Colours begin again with another symbol each.
                    "marker": {
                        "symbol": SYMBOLS[(index + index // len(COLOURS["light"])) % len(SYMBOLS)],
                        "size": 6,
                        "color": style["color"],
                    },
                },
                row=row + 1,
                col=1,
            )
        found.update_yaxes(type="log", title_text="norm", **POWERS, row=row + 1, col=1)
    found.update_xaxes(title_text="step")
    return found.update_layout(
        height=whole + AROUND,
        margin={"t": 60, "b": 50},
        legend={"orientation": "v", "x": 1.02, "y": 1 - (heights[0] + GAP) / whole, "yanchor": "top"},
        coloraxis={
            "colorscale": SEQUENTIAL,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {
                "len": heights[0] / whole,
                "y": 1,
                "yanchor": "top",
                "thickness": 12,
                "title": "norm /<br>largest",
            },
        },
        template=template("light"),
    )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
