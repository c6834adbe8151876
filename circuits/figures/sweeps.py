"""Figures of a sweep's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.head_maps import Panel, maps
from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished, interval

KINDS = ("auto", "points", "heatmap")


def figure(frame: pd.DataFrame, metrics: Sequence[str], kind: str) -> Any:
    if kind not in KINDS:
        raise CircuitsError(f"plot: kind={kind!r}; choose from {', '.join(KINDS)}")
    across = _across(frame)
    if kind == "heatmap" and across is None:
        raise CircuitsError(
            "plot: a heatmap needs a grid, one variant per layer and head or per layer and position, of one checkpoint"
        )
    if kind != "points" and across is not None:
        return _heatmaps(frame, metrics, across)
    return _points(frame, metrics)


def _across(frame: pd.DataFrame) -> str | None:
    """The column that, with the layer, tells all the variants apart: "head" or "position"."""
    variants = frame.drop_duplicates(["variant", "checkpoint", "draw"])
    if len(variants) < 4 or variants["layer"].isna().any():
        return None
    for column in ("head", "position"):
        if variants[column].notna().all() and not variants.duplicated(["layer", column]).any():
            return column
    return None


def _heatmaps(frame: pd.DataFrame, metrics: Sequence[str], across: str) -> Any:
    panels = []
    for metric in metrics:
        grid = frame[frame["metric"] == metric].pivot(index="layer", columns=across, values="effect")
        panels.append(Panel(str(metric), grid, "effect", signed=True, across=across))
    label = frame["checkpoint"].iloc[0]
    of = f", {label}" if isinstance(label, str) else ""
    said = f"Metric under the edit less that of the unedited model{of}; each panel has colours of its own."
    return maps(panels, f"Effect by layer and {across}", said)


def _points(frame: pd.DataFrame, metrics: Sequence[str]) -> Any:
    from plotly.subplots import make_subplots

    found = make_subplots(rows=len(metrics), cols=1, shared_xaxes=True, vertical_spacing=0.16 / len(metrics))
    colours = COLOURS["light"]
    drawn_before = False
    for row, metric in enumerate(metrics, start=1):
        of_metric = frame[frame["metric"] == metric]
        parts = of_metric.groupby("checkpoint", dropna=False, sort=False)
        for index, (label, part) in enumerate(parts):
            named, colour = isinstance(label, str), colours[index % len(colours)]
            for drawn, dots in part.groupby(part["draw"].notna(), sort=False):
                drawn_before |= bool(drawn)
                found.add_scatter(
                    x=list(dots["variant"]),
                    y=list(dots["value"]),
                    error_y=None if drawn else interval(dots["value"], dots["ci_low"], dots["ci_high"]),
                    mode="markers",
                    # Single draws stand beside the point that pools them, and checkpoints beside each other.
                    offsetgroup=f"{label}, draws" if drawn else str(label),
                    marker={
                        "size": 5 if drawn else 9,
                        "opacity": 0.5 if drawn else 1,
                        "symbol": SYMBOLS[index % len(SYMBOLS)],
                        "color": colour,
                    },
                    name=f"{label}{', each draw' if drawn else ''}" if named else str(metric),
                    showlegend=named and row == 1,
                    row=row,
                    col=1,
                )
            unedited = float(part["baseline"].iloc[0])
            if unedited == unedited:
                style = {"line_dash": "dash", "line_color": colour, "line_width": 1.5}
                # Of several the colour says which: their names would lie on each other.
                text = {} if named else {"annotation_text": "unedited", "annotation_position": "right"}
                found.add_hline(y=unedited, row=row, col=1, **style, **text)
        found.update_yaxes(title_text=str(metric), row=row, col=1)
    found.update_xaxes(type="category")
    found.update_xaxes(title_text="variant", row=len(metrics), col=1)
    legend = frame["checkpoint"].notna().any()
    found.update_layout(
        height=110 + 230 * len(metrics) + 30 * bool(legend),
        margin={"t": 50 if legend else 20, "b": 70, "r": 20 if legend else 80},
        scattermode="group",
        scattergap=0.5,
        legend={"y": 1 + 12 / (230 * len(metrics))},
    )
    said = "Points: under the edit, with the 95% interval over examples. Dashed: the unedited model."
    return finished(
        found, "Metrics under each edit", said + (" Small: single draws." if drawn_before else "")
    )
