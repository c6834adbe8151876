"""The figure of ``prime-order``: the step at which each prime of each run generalises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from circuits.figures.layout import draw
from circuits.figures.palette import mark
from circuits.figures.panels import Series, curve

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(points: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws steps over primes, a line for each run; primes that never reach the level are left out.

    Args:
        points: columns ``run``, ``p``, ``q`` and ``step``, which is infinite where it is never reached.
    """
    bases, runs = sorted(set(points["p"].tolist())), list(dict.fromkeys(points["run"]))
    series = {}
    for index, name in enumerate(runs):
        of_run = points[(points["run"] == name) & (points["step"] < math.inf)]
        p = int(points.loc[points["run"] == name, "p"].iloc[0])
        # Runs of one p are told apart by their own names.
        short = name.rsplit("/", 1)[-1]
        look = bases.index(p) if len(bases) > 1 else index
        symbol = mark(look)[1]
        symbols = [symbol if p % q == 1 else f"{symbol}-open" for q in of_run["q"].tolist()]
        called = f"p = {p}" if len(bases) > 1 or len(runs) == 1 else f"{short}, p = {p}"
        steps = of_run["step"].tolist()
        hover = [f"{short}<br>q = {q}: step {step:.0f}" for q, step in zip(of_run["q"], steps, strict=True)]
        style = {"name": called, "marker": {"size": 10, "symbol": symbols}}
        series[name] = Series(of_run["q"].astype(str).tolist(), steps, hover=hover, style=style, look=look)
    order = [str(q) for q in sorted(set(points["q"].tolist()))]
    axis = {"type": "category", "categoryorder": "array", "categoryarray": order}
    return draw([curve(series, x="prime q", y="step", log_y=True, x_axis=axis, height=340)])
