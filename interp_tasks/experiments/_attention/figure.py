"""The figure of ``attention`` over training: a panel per template, a line per head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve
from interp_tasks.experiments._attention.table import ALL_HEADS, FOLLOWS, MOVED

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def over_steps(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws scores corrected for chance, and shares that move or follow, by step; colours say the layer."""
    heads = frame[frame["variant"] != ALL_HEADS]
    panels = []
    for metric, rows in heads.groupby("metric", sort=False):
        series = {}
        for (run, variant), part in rows.groupby(["run", "variant"], sort=False):
            line = part.sort_values("step")
            layer = int(line["layer"].iloc[0])
            series[f"{variant} of {run}"] = Series(
                line["step"].tolist(),
                shown(line, str(metric)).tolist(),
                hover=[f"{run}<br>{variant}, step {step}" for step in line["step"]],
                style={"name": f"layer {layer}", "line": {"width": 1.5}},
                look=layer,
            )
        panels.append(curve(series, str(metric), y="", height=200))
    return draw(panels, columns=min(3, len(panels)))


def shown(rows: pandas.DataFrame, metric: str) -> pandas.Series:
    """Returns the values to draw: scores corrected for chance (0 at chance, 1 all attention), shares unchanged."""
    if metric.startswith((MOVED, FOLLOWS)):
        return rows["value"]
    return rows["effect"] / (1 - rows["baseline"])
