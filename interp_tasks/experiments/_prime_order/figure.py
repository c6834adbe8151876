"""The figure of ``prime-order``: the step at which each prime of each run generalises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from circuits.figures.palette import COLOURS, SYMBOLS, template
from circuits.figures.style import log_axis

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(points: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws steps over primes, a line for each run; primes that never reach the level are left out.

    Args:
        points: columns ``run``, ``p``, ``q`` and ``step``, which is infinite where it is never reached.
    """
    from plotly import graph_objects

    figure = graph_objects.Figure()
    runs = list(dict.fromkeys(points["run"]))
    bases = sorted(set(points["p"].tolist()))
    order = sorted(set(points["q"].tolist()))
    for name in runs:
        of_run = points[points["run"] == name]
        p = int(of_run["p"].iloc[0])
        reached = of_run[of_run["step"] < math.inf]
        # Runs of one p are told apart by their own names.
        short = name.rsplit("/", 1)[-1]
        kind = f"p = {p}" if len(bases) > 1 or len(runs) == 1 else f"{short}, p = {p}"
        index = bases.index(p) if len(bases) > 1 else runs.index(name)
        colour = COLOURS["light"][index % len(COLOURS["light"])]
        symbol = SYMBOLS[index % len(SYMBOLS)]
        figure.add_trace(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": kind,
                "legendgroup": kind,
                "showlegend": not any(trace.legendgroup == kind for trace in figure.data),
                "x": reached["q"].astype(str).tolist(),
                "y": reached["step"].tolist(),
                "line": {"color": colour, "width": 1.5},
                "marker": {
                    "size": 10,
                    "color": colour,
                    "symbol": [symbol if p % q == 1 else f"{symbol}-open" for q in reached["q"].tolist()],
                },
                "hovertemplate": f"{short}<br>q = %{{x}}: step %{{y:.0f}}<extra>p = {p}</extra>",
            }
        )
    figure.update_xaxes(
        title_text="prime q", type="category", categoryorder="array", categoryarray=list(map(str, order))
    )
    steps = [step for step in points["step"].tolist() if 0 < step < math.inf]
    axis = log_axis(min(steps), max(steps)) if steps else {"type": "log"}
    figure.update_yaxes(title_text="step", **axis)
    figure.update_layout(height=460, margin={"t": 80, "b": 70}, template=template("light"))
    return figure
