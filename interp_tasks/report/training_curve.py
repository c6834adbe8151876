"""The training curve of a run, or of two: every logged metric, the detected drop, the plateau by theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, template
from interp_tasks.measurement.curve_figures import DASHES
from interp_tasks.measurement.run_logs import plateau_levels
from interp_tasks.pages import Beside, Figure, Section, Stepped, Text
from interp_tasks.report.draw import move_line, step_line
from interp_tasks.report.head_effects import add_mark, value_axis
from interp_tasks.report.headlines import change
from interp_tasks.report.snapshots import shown_metrics

if TYPE_CHECKING:
    from interp_tasks.measurement.run_logs import Run
    from interp_tasks.report.published import Mark
    from interp_tasks.report.snapshots import View

TITLE = "Training"
#: Pixels: of a panel, between panels, above and below.
PANEL, GAP, TOP, BOTTOM = 195, 24, 30, 50


def training_section(views: Sequence[View], marks: Mapping[str, Sequence[Mark]]) -> Section:
    """Returns curves of all views in one figure; views without a log are named."""
    logged = [view for view in views if view.source.run is not None and view.source.curve is not None]
    several = len(views) > 1
    missing = [
        f"{view.name}: {caption}" if several else caption for view in views for caption in view.source.missing
    ]
    if not logged:
        return Text("\n\n".join(missing), TITLE)
    caption = (
        "Validation: solid; the batch just trained on: faint. Shaded: from onset to end of the detected "
    )
    changes = dict.fromkeys(
        change(view.source.curve.metric) for view in logged if view.source.curve is not None
    )
    caption += f"{' or '.join(changes)}. "
    if any(plateau_levels(view.source.run) for view in logged if view.source.run is not None):
        caption += "Dotted: the plateau by theory. "
    if any(marks.values()):
        caption += "Stars: published numbers, in the unit of this run. "
    caption += (
        "The line is the slider's checkpoint, triangles are the stored ones: a click goes to the nearest."
    )
    if views[0].source.marks:
        caption += (
            " Its buttons: pre, well before the shaded span; onset and end, the checkpoints on either side of it; "
            "post, the last."
        )
    return Beside([training_curve(logged, marks, views[0], " ".join([caption, *missing]))], TITLE)


def training_curve(
    logged: Sequence[View], marks: Mapping[str, Sequence[Mark]], leading: View, caption: str
) -> Section:
    """Draws the logged metrics over training, losses above accuracies, with the drops and the slider's step marked."""
    from plotly.subplots import make_subplots

    first = logged[0].source.run
    assert first is not None
    metrics = shown_metrics(first.logged(), first.drop_metric)
    panels = [
        [metric for metric in metrics if "accuracy" not in metric],
        [metric for metric in metrics if "accuracy" in metric],
    ]
    panels = [panel for panel in panels if panel]
    total_height = PANEL * len(panels) + GAP * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=GAP / total_height if len(panels) > 1 else 0,
    )
    for row, panel in enumerate(panels, start=1):
        add_panel(figure, row, panel, metrics, logged, marks)
    shapes = [
        step_line(),
        *(shape for index, view in enumerate(logged) for shape in drop_shapes(view, index)),
    ]
    top = TOP + 22 * ((len(figure.data) // 2) // 6)
    rug(figure, leading, len(panels))
    figure.update_xaxes(title_text="step", row=len(panels), col=1)
    height = top + total_height + BOTTOM
    figure.update_layout(
        template=template("light"),
        height=height,
        shapes=shapes,
        hovermode="x",
        margin={"l": 65, "r": 15, "t": top, "b": BOTTOM},
        legend={"y": 1.02},
    )
    alt = f"{', '.join(metrics)} over training of {' and '.join(view.name for view in logged)}"
    return Stepped(
        Figure(figure, caption=caption, alt=alt, height=height),
        move_line(leading),
        leading.at,
        picks=leading.steps,
    )


def add_panel(
    figure: Any,
    row: int,
    panel: Sequence[str],
    metrics: Sequence[str],
    logged: Sequence[View],
    marks: Mapping[str, Sequence[Mark]],
) -> None:
    """Draws some of the metrics of every run into one panel, with their levels and marks.

    Args:
        metrics: all that are drawn, in the order of their colours.
    """
    extremes: list[float] = []
    for which, view in enumerate(logged):
        run = view.source.run
        assert run is not None
        logged_metrics = [metric for metric in panel if run.points(metric)[1]]
        for metric in logged_metrics:
            index = metrics.index(metric)
            name = f"{metric}, {run.name}" if len(logged) > 1 else metric
            extremes += add_metric(figure, run, metric, name, row, index, which, len(logged) == 1)
        if logged_metrics:
            add_levels(figure, run, logged_metrics, metrics, row)
        for mark in marks.get(view.name, ()):
            if mark.metric in logged_metrics and mark.of_curve:
                add_mark(figure, mark)
                figure.data[-1].update(xaxis=f"x{row if row > 1 else ''}", yaxis=f"y{row if row > 1 else ''}")
    # Of mse_masked and mse_observed it is mse.
    families = {metric.partition("_")[0] for metric in panel}
    figure.update_yaxes(
        title_text=panel[0] if len(panel) == 1 else families.pop() if len(families) == 1 else "metric",
        row=row,
        col=1,
        **value_axis(panel[0], extremes),
    )


def add_metric(
    figure: Any, run: Run, metric: str, name: str, row: int, index: int, which: int, train: bool
) -> list[Any]:
    """Draws a metric's curve (with ``train``, the training batch's too); returns the extremes of the drawn values."""
    colour = COLOURS["light"][index % len(COLOURS["light"])]
    steps, values = run.points(metric)
    ends = [min(values), max(values)]
    if train and run.points(metric, "train")[1]:
        batch_steps, batch_values = run.points(metric, "train")
        ends += [value for value in batch_values if value > 0]
        figure.add_scatter(
            x=batch_steps,
            y=batch_values,
            name=f"{metric}, train",
            mode="lines",
            # Opacity of the curve, not of its colour, which a page in the dark scheme replaces.
            line={"color": colour, "width": 1.2},
            opacity=0.6,
            legendgroup=metric,
            showlegend=False,
            hovertemplate="train %{y:.5g}<extra></extra>",
            row=row,
            col=1,
        )
    figure.add_scatter(
        x=steps,
        y=values,
        name=name,
        mode="lines",
        line={"color": colour, "width": 1.7, "dash": DASHES[which]},
        legendgroup=metric,
        hovertemplate=f"{name} %{{y:.6g}}<extra></extra>",
        row=row,
        col=1,
    )
    return ends


def add_levels(figure: Any, run: Run, panel_metrics: Sequence[str], metrics: Sequence[str], row: int) -> None:
    """Draws the plateau that theory gives for each metric of a panel."""
    last = run.lines[-1]["step"]
    for metric, level in plateau_levels(run).items():
        if metric in panel_metrics and level > 0:
            figure.add_scatter(
                x=[0, last],
                y=[level, level],
                mode="lines",
                line={"color": COLOURS["light"][metrics.index(metric)], "dash": "dot", "width": 1.2},
                name=f"{metric}, plateau by theory",
                legendgroup=metric,
                showlegend=False,
                hovertemplate=f"{metric}, plateau by theory %{{y:.5g}}<extra></extra>",
                row=row,
                col=1,
            )


def drop_shapes(view: View, index: int) -> list[dict[str, Any]]:
    """Returns the span of a run's drop, in grey; that of the second run has an outline, dashed as its curves."""
    curve = view.source.curve
    if curve is None or curve.drop is None:
        return []
    return [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": curve.drop.onset,
            "x1": curve.drop.end,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1 if index else 0, "color": COLOURS["light"][6], "dash": DASHES[index]},
            "fillcolor": "rgba(128,128,128,0.15)",
            "layer": "below",
        }
    ]


def rug(figure: Any, view: View, row: int) -> None:
    """Draws a triangle on the axis at every stored step."""
    axis = f"y{row + 1}"
    figure.add_scatter(
        x=view.steps,
        y=[0.02] * len(view.steps),
        mode="markers",
        marker={"symbol": "triangle-up", "size": 8, "color": COLOURS["light"][6]},
        showlegend=False,
        hovertemplate="checkpoint %{x:,}<extra></extra>",
        xaxis=f"x{row if row > 1 else ''}",
        yaxis=axis,
    )
    figure.update_layout(
        {
            f"yaxis{row + 1}": {
                "overlaying": f"y{row if row > 1 else ''}",
                "range": [0, 1],
                "visible": False,
                "fixedrange": True,
            }
        }
    )
