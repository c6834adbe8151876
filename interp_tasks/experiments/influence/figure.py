"""Maps of influence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages.palette import SEQUENTIAL, template

if TYPE_CHECKING:
    import plotly.graph_objects

PANEL, GAP = 300, 90


def figure(maps: Mapping[tuple[str, str], Any]) -> plotly.graph_objects.Figure:
    """A panel per checkpoint and variant, each with a scale of its own."""
    from plotly.subplots import make_subplots

    rows = (len(maps) + 1) // 2
    whole = PANEL * rows + GAP * (rows - 1)
    found = make_subplots(
        rows=rows,
        cols=2,
        vertical_spacing=GAP / whole if rows > 1 else 0,
        horizontal_spacing=0.18,
        subplot_titles=[f"{variant}<br>{ref}" for ref, variant in maps],
    )
    for index, held in enumerate(maps.values()):
        place = {"row": index // 2 + 1, "col": index % 2 + 1}
        lines, columns = (size // 2 for size in held.shape)
        axes = next(found.select_xaxes(**place)), next(found.select_yaxes(**place))
        right, ends = axes[0].domain[1], axes[1].domain
        found.add_trace(
            {
                "type": "heatmap",
                "x": list(range(-columns, columns + 1)),
                "y": list(range(-lines, lines + 1)),
                "z": [[None if value != value else float(value) for value in line] for line in held],
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
            **place,
        )
        # No lines in the middle, where nothing is drawn.
        plain = {"showgrid": False, "zeroline": False, "dtick": 1}
        found.update_xaxes(title_text="columns away", **plain, **place)
        found.update_yaxes(title_text="rows away", autorange="reversed", **plain, **place)
    found.update_layout(height=whole + 160, margin={"t": 90, "b": 70, "r": 90}, template=template("light"))
    found.update_annotations(font_size=13)
    return found
