"""The figure of ``influence``: maps of how far an output moves, by where the input is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import SEQUENTIAL, template

if TYPE_CHECKING:
    import plotly.graph_objects

PANEL, GAP = 300, 90


def figure(maps: Mapping[tuple[str, str], Any]) -> plotly.graph_objects.Figure:
    """Draws a panel per checkpoint and variant, each with its own scale."""
    from plotly.subplots import make_subplots

    rows = (len(maps) + 1) // 2
    total_height = PANEL * rows + GAP * (rows - 1)
    figure = make_subplots(
        rows=rows,
        cols=2,
        vertical_spacing=GAP / total_height if rows > 1 else 0,
        horizontal_spacing=0.18,
        subplot_titles=[f"{variant}<br>{ref}" for ref, variant in maps],
    )
    for index, values in enumerate(maps.values()):
        panel = {"row": index // 2 + 1, "col": index % 2 + 1}
        lines, columns = (size // 2 for size in values.shape)
        axes = next(figure.select_xaxes(**panel)), next(figure.select_yaxes(**panel))
        right, ends = axes[0].domain[1], axes[1].domain
        figure.add_trace(
            {
                "type": "heatmap",
                "x": list(range(-columns, columns + 1)),
                "y": list(range(-lines, lines + 1)),
                "z": [[None if value != value else float(value) for value in line] for line in values],
                "colorscale": SEQUENTIAL,
                "zmin": 0,
                "colorbar": {
                    "title": {"text": "mean<br>change", "font": {"size": 12}},
                    "x": right,
                    "y": sum(ends) / 2,
                    "len": ends[1] - ends[0],
                    "thickness": 12,
                },
                "hovertemplate": "%{y} rows, %{x} columns away<br>%{z:.4g}<extra></extra>",
            },
            **panel,
        )
        # No lines in the middle, where nothing is drawn.
        plain = {"showgrid": False, "zeroline": False, "dtick": 1}
        figure.update_xaxes(title_text="columns away", **plain, **panel)
        figure.update_yaxes(title_text="rows away", autorange="reversed", **plain, **panel)
    figure.update_layout(
        height=total_height + 160, margin={"t": 90, "b": 70, "r": 90}, template=template("light")
    )
    figure.update_annotations(font_size=13)
    return figure
