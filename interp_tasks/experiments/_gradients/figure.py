"""The figure of ``gradients``: a map of each tensor's norm over its largest, and the norms themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from circuits.figures.palette import COLOURS, SEQUENTIAL, SYMBOLS, template
from interp_tasks.measurement.curve_figures import line

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


#: Heights in pixels: of the lines, of a tensor's row in a map, between panels, and around all.
LINES, ROW, GAP, TOP, BOTTOM = 320, 26, 90, 60, 60


def figure(logged: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """Draws by stage a map of each tensor's norm over its largest, and below it the norms themselves.

    Args:
        logged: stage -> the norms, a row per step and a column per tensor; the first stage has the legend.
    """
    from plotly.subplots import make_subplots

    from circuits.figures.style import POWERS

    heights = [height for one in logged.values() for height in (ROW * max(4, len(one.columns)), LINES)]
    total_height = sum(heights) + GAP * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=GAP / total_height,
        subplot_titles=[
            title for stage in logged for title in (f"{stage}: norm / its largest", f"{stage}: norm")
        ],
    )
    for at, one in enumerate(logged.values()):
        row = 2 * at + 1
        figure.add_trace(
            {
                "type": "heatmap",
                "x": one.index.tolist(),
                "y": list(one.columns),
                "z": [shares(one[name].tolist()) for name in one],
                "coloraxis": "coloraxis",
                "hovertemplate": "%{y}, step %{x}<br>%{z:.2f} of its largest<extra></extra>",
            },
            row=row,
            col=1,
        )
        figure.update_yaxes(autorange="reversed", dtick=1, row=row, col=1)
        for index, (name, values) in enumerate(one.items()):
            style = line(index)
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": one.index.tolist(),
                    # A log axis has no room for 0.
                    "y": [finite(value) or None for value in values.tolist()],
                    "name": name,
                    "legendgroup": name,
                    "showlegend": at == 0,
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
        figure.update_yaxes(type="log", title_text="norm", **POWERS, row=row + 1, col=1)
    # The same step stands at the same place in all panels; half a step beside the first and the last, as in a map.
    steps = [step for one in logged.values() for step in one.index]
    half = (max(steps) - min(steps)) / max(max(map(len, logged.values())) - 1, 1) / 2 or 0.5
    figure.update_xaxes(title_text="step", range=[min(steps) - half, max(steps) + half])
    figure.update_annotations(font_size=13)
    # A legend beside the panels would take the width of a narrow page.
    return figure.update_layout(
        height=total_height + TOP + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        coloraxis={
            "colorscale": SEQUENTIAL,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {
                "title": "norm /<br>largest",
                "len": heights[0] / total_height,
                "y": 1,
                "yanchor": "top",
                "thickness": 12,
            },
        },
        template=template("light"),
    )


def shares(values: Sequence[float]) -> list[float | None]:
    """Returns each value over the largest; of one that is 0 or infinite nothing is a share."""
    largest = max(values)
    return [value / largest if 0 < largest < math.inf else None for value in values]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
