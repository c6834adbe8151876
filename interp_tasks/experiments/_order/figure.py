"""Draws, for each quantity of ``order``, the share of its total change that it has reached by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(curves: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """Returns a panel per run; what overshoots far is cut, so that 0 to 1 can be read."""
    names = list(dict.fromkeys(name for table in curves.values() for name in table.columns if name != "step"))
    panels = []
    for run, table in curves.items():
        steps = table["step"].tolist()
        series = {
            name: Series(steps, table[name].tolist(), look=look)
            for look, name in enumerate(names)
            if name in table
        }
        axes: dict[str, Any] = {"y": "share of its way", "y_axis": {"range": [-0.6, 1.6]}}
        panels.append(curve(series, run.rsplit("/", 1)[-1], height=420, **axes))
    return draw(panels)
