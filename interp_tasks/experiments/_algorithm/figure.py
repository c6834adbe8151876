"""The figure of ``algorithm``: maps of methods by read-outs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import heat
from interp_tasks.experiments._algorithm.table import DISTANCE, ERRORS, PREDICTIONS
from interp_tasks.pages import number

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Returns a row of maps for each checkpoint and kind of entries, a column for each metric."""
    after = frame["layer"].astype("string").where(frame["site"] != "resid_pre", "embed")
    frame = frame.assign(after=after)
    metrics, order = [DISTANCE, PREDICTIONS, ERRORS], list(dict.fromkeys(after))
    panels = []
    for (ref, kind), rows in frame.groupby(["ref", "intervention"], sort=False):
        for metric in metrics:
            table = rows[rows["metric"] == metric].pivot(index="variant", columns="after", values="value")
            table = table.reindex(index=list(dict.fromkeys(rows["variant"])), columns=order)
            # Correlations: the diverging colours, 0 in the middle. Distances: the sequential ones.
            colours: dict[str, Any] = {} if metric == DISTANCE else {"signed": True, "end": 1.0}
            axes: dict[str, Any] = {
                "across": "read-out after layer",
                "down": "method",
                "text": table.map(number),
                "bar": False,
            }
            panels.append(heat(table, f"{metric}, {kind}<br>{ref}", unit=metric, **axes, **colours))
    return draw(panels, columns=len(metrics), share_y=True)
