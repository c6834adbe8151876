"""The figure of ``influence``: maps of how far an output moves, by where the input is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import heat

if TYPE_CHECKING:
    import plotly.graph_objects


def figure(maps: Mapping[tuple[str, str], Any]) -> plotly.graph_objects.Figure:
    """Draws a panel per checkpoint and variant, each with its own scale."""
    import pandas

    panels = []
    for (ref, variant), values in maps.items():
        rows, columns = (range(-(size // 2), size // 2 + 1) for size in values.shape)
        table = pandas.DataFrame(values, index=rows, columns=columns)
        axes: dict[str, Any] = {"across": "columns away", "down": "rows away", "numbers": False}
        panels.append(heat(table, f"{variant}<br>{ref}", unit="mean change", width=220, row=24, **axes))
    return draw(panels, columns=min(2, len(panels)))
