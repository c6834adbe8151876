"""The figure of ``prime-order``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from circuits.figures.style import log_axis
from interp_tasks.pages.palette import COLOURS, SYMBOLS, template

if TYPE_CHECKING:
    import plotly.graph_objects

    from interp_tasks.experiments.prime_order.measure import Point


def figure(points: Sequence[Point]) -> plotly.graph_objects.Figure:
    """Primes across, steps up, a line for each run; those that do not get there are left out."""
    from plotly import graph_objects

    found = graph_objects.Figure()
    runs = list(dict.fromkeys(point.run.name for point in points))
    bases = sorted({point.p for point in points})
    order = sorted({point.q for point in points})
    for name in runs:
        mine = [point for point in points if point.run.name == name and math.isfinite(point.step)]
        p = next(point.p for point in points if point.run.name == name)
        # Runs of one p are told apart by their own names.
        short = name.rsplit("/", 1)[-1]
        kind = f"p = {p}" if len(bases) > 1 or len(runs) == 1 else f"{short}, p = {p}"
        index = bases.index(p) if len(bases) > 1 else runs.index(name)
        colour = COLOURS["light"][index % len(COLOURS["light"])]
        symbol = SYMBOLS[index % len(SYMBOLS)]
        found.add_trace(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": kind,
                "legendgroup": kind,
                "showlegend": not any(trace.legendgroup == kind for trace in found.data),
                "x": [str(point.q) for point in mine],
                "y": [point.step for point in mine],
                "line": {"color": colour, "width": 1.5},
                "marker": {
                    "size": 10,
                    "color": colour,
                    "symbol": [symbol if point.p % point.q == 1 else f"{symbol}-open" for point in mine],
                },
                "hovertemplate": f"{short}<br>q = %{{x}}: step %{{y:.0f}}<extra>p = {p}</extra>",
            }
        )
    found.update_xaxes(
        title_text="prime q", type="category", categoryorder="array", categoryarray=list(map(str, order))
    )
    steps = [point.step for point in points if 0 < point.step < math.inf]
    axis = log_axis(min(steps), max(steps)) if steps else {"type": "log"}
    found.update_yaxes(title_text="step", **axis)
    found.update_layout(height=460, margin={"t": 80, "b": 70}, template=template("light"))
    return found
