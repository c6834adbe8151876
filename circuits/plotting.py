"""Figures of a sweep's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from circuits.errors import CircuitsError

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
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    found = make_subplots(rows=1, cols=len(metrics), subplot_titles=list(metrics), shared_yaxes=True)
    for column, metric in enumerate(metrics, start=1):
        grid = frame[frame["metric"] == metric].pivot(index="layer", columns=across, values="effect")
        largest = float(grid.abs().max().max()) or 1.0
        bar = {"x": (column - 0.02) / len(metrics) + 0.01, "len": 0.9, "thickness": 12, "title": "effect"}
        trace = graph_objects.Heatmap(
            x=[str(x) for x in grid.columns],
            y=[str(y) for y in grid.index],
            z=grid.to_numpy(dtype=float),
            colorscale="RdBu_r",
            # Symmetric, so that no effect is white in every panel.
            zmin=-largest,
            zmax=largest,
            colorbar=bar,
            hovertemplate=f"layer %{{y}}, {across} %{{x}}<br>effect %{{z:.4g}}<extra>{metric}</extra>",
        )
        found.add_trace(trace, row=1, col=column)
        found.update_xaxes(title_text=across, type="category", row=1, col=column)
    found.update_yaxes(type="category", autorange="reversed")
    found.update_yaxes(title_text="layer", row=1, col=1)
    found.update_layout(height=160 + 60 * frame["layer"].nunique(), width=120 + 420 * len(metrics))
    return found


def _points(frame: pd.DataFrame, metrics: Sequence[str]) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    found = make_subplots(rows=len(metrics), cols=1, shared_xaxes=True, subplot_titles=list(metrics))
    for row, metric in enumerate(metrics, start=1):
        of_metric = frame[frame["metric"] == metric]
        for label, part in of_metric.groupby("checkpoint", dropna=False, sort=False):
            named = isinstance(label, str)
            for drawn, dots in part.groupby(part["draw"].notna(), sort=False):
                found.add_trace(
                    graph_objects.Scatter(
                        x=list(dots["variant"]),
                        y=list(dots["value"]),
                        error_y=None if drawn else _interval(dots),
                        mode="markers",
                        marker={"size": 5, "opacity": 0.4} if drawn else {"size": 9},
                        name=f"{label}{', each draw' if drawn else ''}" if named else str(metric),
                        showlegend=named and row == 1,
                    ),
                    row=row,
                    col=1,
                )
            unedited = float(part["baseline"].iloc[0])
            if unedited == unedited:
                text = f"{label}, unedited" if named else "unedited"
                found.add_hline(y=unedited, line_dash="dash", annotation_text=text, row=row, col=1)
    found.update_xaxes(type="category")
    found.update_layout(height=140 + 260 * len(metrics))
    return found


def _interval(dots: pd.DataFrame) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": list(dots["ci_high"] - dots["value"]),
        "arrayminus": list(dots["value"] - dots["ci_low"]),
    }
