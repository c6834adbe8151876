"""Accuracies or losses of every answer over the steps, as lines, or as maps where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SEQUENTIAL
from interp_tasks.measurement.figure import Panel, stacked_panels

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: More answers than this, or more than one run with several answers, are a map.
MAX_LINES = 7
LINES, ROW = 260, 17
DASHES = ("solid", "dash", "dot", "dashdot")


def figure(curves: pandas.DataFrame, kind: str, level: float | None) -> plotly.graph_objects.Figure:
    """Draws runs of a single answer in one panel, each run of several answers in its own; all that per split.

    Args:
        curves: a row per logged value: ``run``, ``metric``, ``split``, ``step`` and ``value``, in order.
        kind: what the metrics begin with, ``"accuracy"`` or ``"loss"``.
        level: of an accuracy, drawn as a line.
    """
    panels = []
    metrics = {
        run: list(dict.fromkeys(of_run["metric"])) for run, of_run in curves.groupby("run", sort=False)
    }
    single = [str(run) for run, names in metrics.items() if len(names) == 1]
    for split in dict.fromkeys(curves["split"]):
        of_split = curves[curves["split"] == split]
        if single:
            panels.append(lines_panel(of_split, [(run, kind) for run in single], split, kind, level))
        for run, names in metrics.items():
            answers = [name for name in names if answer(name).isdecimal()]
            if len(names) > 1 and len(answers) > MAX_LINES:
                panels.append(map_panel(of_split, str(run), answers, split, kind))
            elif len(names) > 1:
                lines = [(str(run), name) for name in answers]
                panels.append(lines_panel(of_split, lines, split, kind, level))
    drawn = stacked_panels(panels, ragged=True)
    if not single:
        # Else names of runs stand beside those of answers.
        drawn.update_layout(legend_title_text="answer modulo ")
    # Lines over steps, which would be moved aside where points stand side by side.
    return drawn.update_layout(scattermode="overlay")


def lines_panel(
    curves: pandas.DataFrame, lines: Sequence[tuple[str, str]], split: str, kind: str, level: float | None
) -> Panel:
    """Returns a panel with a line for each (run, metric)."""
    runs = {run for run, _ in lines}
    title = f"{split} {kind}" + (f", {short(lines[0][0])}" if len(runs) == 1 else "")

    def draw(figure: Any, row: int) -> None:
        """Draws a line for each run and quantity, over steps on a logarithmic axis."""
        colours = COLOURS["light"]
        last = 1
        for index, (run, name) in enumerate(lines):
            steps, values = later_points(curves, run, name)
            called = answer(name) if len(runs) == 1 and len(lines) > 1 else short(run)
            last = max(last, *steps, 1)
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": called,
                    "legendgroup": called,
                    "showlegend": not any(trace.name == called for trace in figure.data),
                    "x": steps,
                    "y": values,
                    "line": {
                        "color": colours[index % len(colours)],
                        "dash": DASHES[index // len(colours) % len(DASHES)],
                        "width": 1.6,
                    },
                },
                row=row,
                col=1,
            )
        if level is not None:
            ends = {
                "x": [1, last],
                "y": [level, level],
                "mode": "lines+text",
                "text": [f"{level:.4g}", ""],
                "textposition": "bottom right",
                "showlegend": False,
                "hoverinfo": "skip",
            }
            line = {"color": colours[-1], "width": 1, "dash": "dot"}
            figure.add_trace({"type": "scatter", **ends, "line": line}, row=row, col=1)
        figure.update_xaxes(type="log", dtick=1, exponentformat="none", title_text="step", row=row, col=1)
        # Losses fall by powers of ten, and accuracies end at 1.
        bounds = {"range": [-0.02, 1.02]} if level is not None else {"type": "log", "exponentformat": "power"}
        # Of one answer alone the loss is in nats; of several each is a share of its ln q.
        said = "loss, chance = 1" if kind == "loss" and len(lines) > len(runs) else kind
        figure.update_yaxes(title_text=said, row=row, col=1, **bounds)

    return Panel(LINES, draw, title)


def map_panel(curves: pandas.DataFrame, run: str, names: Sequence[str], split: str, kind: str) -> Panel:
    """Returns a map with a row per answer, smallest modulus on top; colours are values, from chance to right."""

    def draw(figure: Any, row: int) -> None:
        """Draws the accuracies as a map into a panel, quantity by step."""
        points = [later_points(curves, run, name) for name in names]
        figure.add_trace(
            {
                "type": "heatmap",
                "x": points[0][0],
                "y": [answer(name) for name in names],
                "z": [values for _, values in points],
                "colorscale": SEQUENTIAL,
                "zmin": 0,
                "zmax": 1,
                "showscale": not any(trace.type == "heatmap" for trace in figure.data),
                "colorbar": {"title": {"text": kind}, "thickness": 12, "len": 0.4, "y": 1, "yanchor": "top"},
                "hovertemplate": f"{kind} %{{y}}<br>step %{{x}}<br>%{{z:.4g}}<extra></extra>",
            },
            row=row,
            col=1,
        )
        figure.update_xaxes(type="log", dtick=1, exponentformat="none", title_text="step", row=row, col=1)
        figure.update_yaxes(type="category", autorange="reversed", title_text="prime", row=row, col=1)

    return Panel(ROW * len(names) + 20, draw, f"{split} {kind}, {short(run)}")


def later_points(curves: pandas.DataFrame, run: str, name: str) -> tuple[list[int], list[float]]:
    """Returns steps and values of a metric without step 0, which a logarithm has no place for."""
    points = curves[(curves["run"] == run) & (curves["metric"] == name) & (curves["step"] > 0)]
    return points["step"].tolist(), points["value"].tolist()


def answer(name: str) -> str:
    return name.rpartition("_")[2]


def short(run: str) -> str:
    """Shortens a path to ``addition/seed-3``."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
