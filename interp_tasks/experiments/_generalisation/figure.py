"""Accuracies or losses of every answer over the steps, as lines, or as maps where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, curve, heat

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: More answers than this, or more than one run with several answers, are a map.
MAX_LINES = 7
#: Steps are on a logarithmic axis.
STEPS = {"type": "log", "dtick": 1, "exponentformat": "none"}


def figure(curves: pandas.DataFrame, kind: str, level: float | None) -> plotly.graph_objects.Figure:
    """Draws runs of a single answer in one panel, each run of several answers in its own; all that per split.

    Args:
        curves: a row per logged value: ``run``, ``metric``, ``split``, ``step`` and ``value``, in order.
        kind: what the metrics begin with, ``"accuracy"`` or ``"loss"``.
        level: of an accuracy, drawn as a line.
    """
    panels = []
    # A logarithm has no place for step 0.
    curves = curves[curves["step"] > 0]
    metrics = {
        str(run): list(dict.fromkeys(part["metric"])) for run, part in curves.groupby("run", sort=False)
    }
    single = [run for run, names in metrics.items() if len(names) == 1]
    for split in dict.fromkeys(curves["split"]):
        of_split = curves[curves["split"] == split]
        if single:
            panels.append(lines_panel(of_split, [(run, kind) for run in single], split, kind, level))
        for run, names in metrics.items():
            answers = [name for name in names if answer(name).isdecimal()]
            if len(names) > 1 and len(answers) > MAX_LINES:
                panels.append(map_panel(of_split, run, answers, split, kind))
            elif len(names) > 1:
                panels.append(lines_panel(of_split, [(run, name) for name in answers], split, kind, level))
    return draw(panels)


def lines_panel(
    curves: pandas.DataFrame, lines: Sequence[tuple[str, str]], split: str, kind: str, level: float | None
) -> Panel:
    """Returns a panel with a line for each (run, metric)."""
    runs = {run for run, _ in lines}
    series = {}
    for run, name in lines:
        part = curves[(curves["run"] == run) & (curves["metric"] == name)]
        called = f"modulo {answer(name)}" if len(runs) == 1 and len(lines) > 1 else short(run)
        series[called] = Series(part["step"].tolist(), part["value"].tolist())
    # Losses fall by powers of ten, and accuracies end at 1. Of several answers each loss is a share of its ln q.
    said = "loss, chance = 1" if kind == "loss" and len(lines) > len(runs) else kind
    title = f"{split} {kind}" + (f", {short(lines[0][0])}" if len(runs) == 1 else "")
    bounds = {} if level is None else {"range": [-0.02, 1.02]}
    marked = [] if level is None else [{"y": level}]
    axes: dict[str, Any] = {"y": said, "log_y": level is None, "x_axis": STEPS, "y_axis": bounds}
    return curve(series, title, lines=marked, height=260, **axes)


def map_panel(curves: pandas.DataFrame, run: str, names: Sequence[str], split: str, kind: str) -> Panel:
    """Returns a map with a row per answer, smallest modulus on top; colours are values, from chance to right."""
    table = (
        curves[curves["run"] == run]
        .pivot(index="metric", columns="step", values="value")
        .reindex(list(names))
    )
    table.index = table.index.map(answer)
    drawn = heat(
        table, f"{split} {kind}, {short(run)}", unit=kind, across="step", down="prime", end=1.0, row=17
    )
    trace = {**drawn.traces[0], "x": table.columns.tolist(), "xgap": 0, "ygap": 0}
    axis = {key: value for key, value in drawn.x.items() if key != "type"} | STEPS
    return Panel([trace], drawn.title, axis, drawn.y, drawn.height, drawn.width, bar=True)


def answer(name: str) -> str:
    return name.rpartition("_")[2]


def short(run: str) -> str:
    """Shortens a path to ``addition/seed-3``."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
