"""Figures of training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve
from interp_tasks.measurement.run_logs import Curve, shared_folder

if TYPE_CHECKING:
    import plotly.graph_objects

#: The height of a panel in pixels.
PANEL = 300


def curves_figure(curves: Mapping[tuple[str, str], Curve]) -> plotly.graph_objects.Figure:
    """Returns every curve in one panel; what lies between onset and end is bold."""
    # Parts of a mixture have metrics such as "loss (n=3)": the axis is that of the loss.
    metrics = list(dict.fromkeys(metric.partition(" (")[0] for _, metric in curves))
    runs = {run for run, _ in curves}
    folder = shared_folder([*runs]) if len(runs) > 1 else ""
    series: dict[str, Series] = {}
    for index, ((run, metric), one) in enumerate(curves.items()):
        short = run.removeprefix(f"{folder}/") if folder else run
        name = short + metric.removeprefix(metrics[0]) if len(metrics) == 1 else f"{short}, {metric}"
        series |= with_drop(one, name, index)
    log = above_zero(list(curves.values()))
    panel = curve(
        series, f"{folder}/…" if folder else "", y=" or ".join(metrics[:3]), log_y=log, height=PANEL
    )
    return draw([panel])


def with_drop(one: Curve, name: str, index: int) -> dict[str, Series]:
    """Returns a curve over steps, and its drop in bold."""
    thin = {"mode": "lines", "line": {"width": 1.3}}
    found = {name: Series(one.steps, one.values, style=thin, look=index)}
    if one.drop is None:
        return found
    pairs = zip(one.steps, one.values, strict=True)
    bold = [(step, value) for step, value in pairs if one.drop.onset <= step <= one.drop.end]
    style: dict[str, Any] = {"mode": "lines", "showlegend": False, "line": {"width": 4, "dash": "solid"}}
    steps, values = [step for step, _ in bold], [value for _, value in bold]
    return found | {f"{name}, drop": Series(steps, values, style=style, look=index)}


def run_figure(
    curves: Sequence[Curve],
    levels: Mapping[str, float],
    drop: Curve,
    accuracies: Mapping[str, tuple[Sequence[int], Sequence[float]]],
) -> plotly.graph_objects.Figure:
    """Draws a run's metrics with theoretical plateaus (dotted), and exact accuracies at stored steps below."""
    # The task's own metric comes first, and has the first colour, as in the report.
    curves = sorted(curves, key=lambda one: one.metric != drop.metric)
    series: dict[str, Series] = {}
    for index, one in enumerate(curves):
        shown = drop if one.metric == drop.metric else Curve(one.metric, one.steps, one.values, None)
        series |= with_drop(shown, one.metric, index)
        if (level := levels.get(one.metric, 0.0)) > 0:
            style: dict[str, Any] = {
                "mode": "lines",
                "line": {"dash": "dot", "width": 1.3},
                "showlegend": False,
            }
            ends = [one.steps[0], one.steps[-1]]
            series[f"{one.metric}, plateau by theory"] = Series(ends, [level, level], style=style, look=index)
    panels = [curve(series, y="validation metric", log_y=above_zero(curves), height=PANEL)]
    if accuracies:
        logged = [one.metric for one in curves]
        stored = {
            # What both panels show has one colour.
            f"{name}, stored steps": Series(
                *points, look=logged.index(name) if name in logged else len(curves) + at
            )
            for at, (name, points) in enumerate(accuracies.items())
        }
        panels.append(curve(stored, y="accuracy", y_axis={"rangemode": "tozero"}))
    return draw(panels)


def above_zero(curves: Sequence[Curve]) -> bool:
    """Returns whether all values have a logarithm."""
    return min(min(one.values) for one in curves) > 0
