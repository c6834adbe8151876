"""Figures of training curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SYMBOLS, template
from circuits.figures.style import log_axis
from interp_tasks.measurement.run_logs import Curve, shared_folder

if TYPE_CHECKING:
    import plotly.graph_objects

DASHES = ("solid", "dash", "dot", "dashdot")
#: Heights in pixels: of a panel, and of what stands around them.
PANEL, AROUND = 300, 120


def curves_figure(curves: Mapping[tuple[str, str], Curve]) -> plotly.graph_objects.Figure:
    """Returns every curve in one panel; what lies between onset and end is bold."""
    import plotly.graph_objects as go

    figure = go.Figure()
    # Parts of a mixture have metrics such as "loss (n=3)": the axis is that of the loss.
    metrics = list(dict.fromkeys(metric.partition(" (")[0] for _, metric in curves))
    runs = {run for run, _ in curves}
    folder = shared_folder([*runs]) if len(runs) > 1 else ""
    for index, ((run, metric), curve) in enumerate(curves.items()):
        short = run.removeprefix(f"{folder}/") if folder else run
        name = short + metric.removeprefix(metrics[0]) if len(metrics) == 1 else f"{short}, {metric}"
        add_curve(figure, curve, name, index)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=" or ".join(metrics[:3]), **axis(list(curves.values())))
    finish(figure)
    if folder:
        # Left of its entries a title takes their width, and plotly lets the last ones of a line run out of the page.
        figure.update_layout(legend_title={"text": f"{folder}/… ", "side": "top"})
    return figure


def add_curve(figure: Any, curve: Curve, name: str, index: int, row: int | None = None) -> None:
    """Draws a curve over steps, with its drop in bold."""
    style = line(index)
    panel: dict[str, Any] = {} if row is None else {"row": row, "col": 1}
    figure.add_scatter(
        x=curve.steps,
        y=curve.values,
        name=name,
        mode="lines",
        line={**style, "width": 1.3},
        legendgroup=name,
        **panel,
    )
    if curve.drop is None:
        return
    bold = [
        (step, value)
        for step, value in zip(curve.steps, curve.values, strict=True)
        if curve.drop.onset <= step <= curve.drop.end
    ]
    figure.add_scatter(
        x=[step for step, _ in bold],
        y=[value for _, value in bold],
        name=f"{name}, drop",
        mode="lines",
        line={"color": style["color"], "width": 4},
        legendgroup=name,
        showlegend=False,
        **panel,
    )


def line(index: int) -> dict[str, Any]:
    """Returns the colour and dash of a curve; no two curves share both."""
    colours = COLOURS["light"]
    return {"color": colours[index % len(colours)], "dash": DASHES[index // len(colours) % len(DASHES)]}


def run_figure(
    curves: Sequence[Curve],
    levels: Mapping[str, float],
    drop: Curve,
    accuracies: Mapping[str, tuple[Sequence[int], Sequence[float]]],
) -> plotly.graph_objects.Figure:
    """Draws a run's metrics with theoretical plateaus (dotted), and exact accuracies at stored steps below."""
    from plotly.subplots import make_subplots

    # The task's own metric comes first, and has the first colour, as in the report.
    curves = sorted(curves, key=lambda curve: curve.metric != drop.metric)
    rows = 2 if accuracies else 1
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for index, curve in enumerate(curves):
        add_curve(
            figure, drop if curve.metric == drop.metric else without_drop(curve), curve.metric, index, 1
        )
        level = levels.get(curve.metric, 0.0)
        if level > 0:
            figure.add_scatter(
                x=[curve.steps[0], curve.steps[-1]],
                y=[level, level],
                name=f"{curve.metric}, plateau by theory",
                mode="lines",
                line={"color": line(index)["color"], "dash": "dot", "width": 1.3},
                legendgroup=curve.metric,
                showlegend=False,
                row=1,
                col=1,
            )
    logged = [curve.metric for curve in curves]
    for index, (name, (steps, values)) in enumerate(accuracies.items()):
        # What both panels show has one colour.
        colour = logged.index(name) if name in logged else len(curves) + index
        figure.add_scatter(
            x=list(steps),
            y=list(values),
            name=f"{name}, stored steps",
            mode="lines+markers",
            marker={"symbol": SYMBOLS[index], "size": 8},
            line={"color": line(colour)["color"], "width": 1.3},
            row=2,
            col=1,
        )
    figure.update_yaxes(title_text="validation metric", row=1, col=1, **axis(curves))
    if accuracies:
        figure.update_yaxes(title_text="accuracy", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="step", row=rows, col=1)
    finish(figure, rows)
    return figure


def axis(curves: Sequence[Curve]) -> dict[str, Any]:
    """Returns the type of an axis: logarithmic where all values are above 0."""
    smallest = min(min(curve.values) for curve in curves)
    largest = max(max(curve.values) for curve in curves)
    return log_axis(smallest, largest) if smallest > 0 else {"type": "linear"}


def without_drop(curve: Curve) -> Curve:
    """Returns the curve without its drop, which is drawn on the task's own metric alone."""
    return Curve(curve.metric, curve.steps, curve.values, None)


def finish(figure: Any, panels: int = 1) -> None:
    """Gives the figure its height; the rules of the layout find a place for its legend."""
    figure.update_layout(
        template=template("light"),
        height=panels * PANEL + AROUND,
        margin={"t": 60, "b": 60},
    )
