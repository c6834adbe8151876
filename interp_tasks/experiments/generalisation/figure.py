"""Accuracies or losses of every answer over the steps, as lines, or as maps where there are many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interp_tasks.experiments.generalisation.measure import SPLITS, modulus, named
from interp_tasks.measurement.figure import Panel, drawn
from interp_tasks.measurement.run_logs import Run
from interp_tasks.pages.palette import COLOURS, SEQUENTIAL

if TYPE_CHECKING:
    import plotly.graph_objects

#: More answers than this, or more than one run with several answers, are a map.
MOST_LINES = 7
LINES, ROW = 260, 17
DASHES = ("solid", "dash", "dot", "dashdot")


def figure(runs: Sequence[Run], kind: str, level: float | None) -> plotly.graph_objects.Figure:
    """Of a single answer all runs share a panel; of several answers each run has its own, per split."""
    panels = []
    several = [run for run in runs if len(named(run, kind)) > 1]
    single = [run for run in runs if len(named(run, kind)) == 1]
    for split in SPLITS:
        if single:
            panels.append(lines_panel([(run, kind) for run in single], split, kind, level))
        for run in several:
            names = [name for name in named(run, kind) if modulus(name) is not None]
            if len(names) > MOST_LINES:
                panels.append(map_panel(run, names, split, kind))
            else:
                panels.append(lines_panel([(run, name) for name in names], split, kind, level))
    # Lines over steps, which would be moved aside where points stand side by side.
    return drawn(panels, ragged=True).update_layout(scattermode="overlay")


def lines_panel(curves: Sequence[tuple[Run, str]], split: str, kind: str, level: float | None) -> Panel:
    runs = {run.name for run, _ in curves}
    title = f"{split} {kind}" + (f", {short(curves[0][0].name)}" if len(runs) == 1 else "")

    def draw(found: Any, row: int) -> None:
        colours = COLOURS["light"]
        last = 1
        for index, (run, name) in enumerate(curves):
            steps, values = later_points(run, name, split)
            called = answer(name) if len(runs) == 1 and len(curves) > 1 else short(run.name)
            last = max(last, *steps, 1)
            found.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": called,
                    "legendgroup": called,
                    "showlegend": not any(trace.name == called for trace in found.data),
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
                "mode": "lines",
                "showlegend": False,
                "hoverinfo": "skip",
            }
            line = {"color": colours[-1], "width": 1, "dash": "dot"}
            found.add_trace({"type": "scatter", **ends, "line": line}, row=row, col=1)
        found.update_xaxes(type="log", dtick=1, exponentformat="none", title_text="step", row=row, col=1)
        # Losses fall by powers of ten, and accuracies end at 1.
        bounds = {"range": [-0.02, 1.02]} if level is not None else {"type": "log", "exponentformat": "power"}
        found.update_yaxes(title_text=kind, row=row, col=1, **bounds)

    return Panel(LINES, draw, title)


def map_panel(run: Run, names: Sequence[str], split: str, kind: str) -> Panel:
    """A row per answer, smallest modulus on top; colours are values, from chance to right."""

    def draw(found: Any, row: int) -> None:
        points = [later_points(run, name, split) for name in names]
        found.add_trace(
            {
                "type": "heatmap",
                "x": points[0][0],
                "y": [answer(name) for name in names],
                "z": [values for _, values in points],
                "colorscale": SEQUENTIAL,
                "zmin": 0,
                "zmax": 1,
                "showscale": not any(trace.type == "heatmap" for trace in found.data),
                "colorbar": {"title": {"text": kind}, "thickness": 12, "len": 0.4, "y": 1, "yanchor": "top"},
                "hovertemplate": f"{kind} %{{y}}<br>step %{{x}}<br>%{{z:.4g}}<extra></extra>",
            },
            row=row,
            col=1,
        )
        found.update_xaxes(type="log", dtick=1, exponentformat="none", title_text="step", row=row, col=1)
        found.update_yaxes(type="category", autorange="reversed", title_text="prime", row=row, col=1)

    return Panel(ROW * len(names) + 20, draw, f"{split} {kind}, {short(run.name)}")


def later_points(run: Run, name: str, split: str) -> tuple[list[int], list[float]]:
    """Without step 0, which a logarithm has no place for."""
    steps, values = run.points(name, split)
    kept = [(step, value) for step, value in zip(steps, values, strict=True) if step]
    return [step for step, _ in kept], [value for _, value in kept]


def answer(name: str) -> str:
    return name.rpartition("_")[2]


def short(run: str) -> str:
    """``addition/seed-3`` of a longer path."""
    parts = run.split("/")
    return "/".join(parts[-2:] if parts[-1].startswith("seed-") else parts[-1:])
