"""Draws, for each quantity of ``order``, the share of its total change that it has reached by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from circuits.figures.palette import COLOURS, SYMBOLS, template

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

PANEL, GAP = 420, 90


def figure(curves: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """Returns a panel per run; what overshoots far is cut, so that 0 to 1 can be read."""
    from plotly.subplots import make_subplots

    total_height = PANEL * len(curves) + GAP * (len(curves) - 1)
    figure = make_subplots(
        rows=len(curves),
        cols=1,
        subplot_titles=[run.rsplit("/", 1)[-1] for run in curves],
        vertical_spacing=GAP / total_height if len(curves) > 1 else 0,
    )
    names: dict[str, int] = {}
    for row, table in enumerate(curves.values(), start=1):
        for name in (column for column in table.columns if column != "step"):
            index = names.setdefault(name, len(names))
            colour = COLOURS["light"][index % len(COLOURS["light"])]
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": not any(trace.name == name for trace in figure.data),
                    "x": table["step"].tolist(),
                    "y": table[name].tolist(),
                    "line": {"color": colour, "dash": "solid" if index < len(COLOURS["light"]) else "dash"},
                    "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "color": colour},
                },
                row=row,
                col=1,
            )
        figure.update_xaxes(title_text="step", row=row, col=1)
        figure.update_yaxes(title_text="share of its way", range=[-0.6, 1.6], row=row, col=1)
    figure.update_layout(
        height=total_height + 220,
        margin={"t": 160, "b": 60},
        legend={"y": 1 + 60 / total_height},
        template=template("light"),
    )
    return figure
