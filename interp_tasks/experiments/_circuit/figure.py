"""The figure of ``circuit`` over training: the size of the smallest circuit, and the metric that it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits.figures.layout import draw
from circuits.figures.panels import curve, of_rows
from interp_tasks.experiments._circuit.rows import CIRCUIT, FAITHFULNESS, SIZE

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def over_steps(frame: pandas.DataFrame, metric: str) -> plotly.graph_objects.Figure:
    """Returns three panels over steps, a line per run: share of the members, faithfulness, and the clean metric."""
    own = frame[frame["variant"] == CIRCUIT].sort_values("step", kind="stable")
    sizes, clean = own[own["metric"] == SIZE], own[own["metric"] == metric]
    shown = {
        "share of members": (sizes.assign(share=sizes["value"] / sizes["baseline"]), "share"),
        FAITHFULNESS: (own[own["metric"] == FAITHFULNESS], "value"),
        f"{metric}, clean": (clean, "baseline"),
    }
    panels = []
    for name, (rows, column) in shown.items():
        groups = rows.groupby("run", sort=False, dropna=False)
        series = {str(run): of_rows(part, "step", column) for run, part in groups}
        panels.append(curve(series, y=name, bars=True, height=200))
    return draw(panels)
