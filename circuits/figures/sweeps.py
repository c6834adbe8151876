"""Draws a sweep's table, as heatmaps of effects or as points with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.head_maps import Panel, maps
from circuits.figures.names import spelled
from circuits.figures.palette import mark
from circuits.figures.style import finished, interval

KINDS = ("auto", "points", "heatmap")


def figure(frame: pd.DataFrame, metrics: Sequence[str], kind: str, words: Sequence[str] | None = None) -> Any:
    """Draws heatmaps, one per metric and site, where the variants form a grid over layers or heads, else points; `kind`
    can force either.

    Args:
        words: by position, its name (default: its number).
    """
    if kind not in KINDS:
        raise CircuitsError(f"plot: kind={kind!r}; choose from {', '.join(KINDS)}")
    axes = _axes(frame)
    if kind == "heatmap" and axes is None:
        raise CircuitsError(
            "plot: a heatmap needs a grid, one variant per layer and head, per layer and position or per head and "
            "position of each site, of one checkpoint"
        )
    if kind != "points" and axes is not None:
        return _heatmaps(frame, metrics, axes, words)
    return _points(frame, metrics)


def _axes(frame: pd.DataFrame) -> tuple[list[str], str] | None:
    """Returns the columns that identify every variant of a site: those of the rows of a heatmap and that across it;
    None if no such columns do.
    """
    variants = frame.drop_duplicates(["variant", "checkpoint", "draw"])
    if len(variants) < 4:
        return None
    for down, across in ((["layer"], "head"), (["layer"], "position"), (["layer", "head"], "position")):
        columns = [*down, across]
        if variants[columns].notna().all(axis=None) and not variants.duplicated(["site", *columns]).any():
            return down, across
    return None


def _heatmaps(
    frame: pd.DataFrame, metrics: Sequence[str], axes: tuple[list[str], str], words: Sequence[str] | None
) -> Any:
    columns, across = axes
    down = columns[-1]
    panels = []
    sites = list(dict.fromkeys(frame["site"]))
    for metric, site in product(metrics, sites):
        of_metric = frame[frame["metric"] == metric]
        grid = of_metric[of_metric["site"] == site].pivot(index=columns, columns=across, values="effect")
        grid.index = pd.Index([".".join(map(str, row if len(columns) > 1 else (row,))) for row in grid.index])
        if across == "position" and words is not None:
            grid.columns = [spelled(words[at]) if 0 <= at < len(words) else str(at) for at in grid.columns]
        title = str(metric) if len(sites) == 1 else f"{metric}: {site}"
        # Effects at several sites are compared by their colours.
        end = float(of_metric["effect"].abs().max())
        bar = site == sites[-1]
        panels.append(Panel(title, grid, "effect", True, across, down, end=end, bar=bar))
    label = frame["checkpoint"].iloc[0]
    name = f", {label}" if isinstance(label, str) else ""
    subtitle = (
        f"Metric under the edit less that of the unedited model{name}; each metric has colours of its own."
    )
    return maps(panels, f"Effect by {down} and {across}", subtitle)


def _points(frame: pd.DataFrame, metrics: Sequence[str]) -> Any:
    """Draws each variant's value with its interval, one panel per metric, beside a line for the unedited model."""
    from plotly.subplots import make_subplots

    panels = make_subplots(rows=len(metrics), cols=1, shared_xaxes=True, vertical_spacing=0.16 / len(metrics))
    has_draws = False
    for row, metric in enumerate(metrics, start=1):
        metric_rows = frame[frame["metric"] == metric]
        by_checkpoint = metric_rows.groupby("checkpoint", dropna=False, sort=False)
        for index, (label, checkpoint_rows) in enumerate(by_checkpoint):
            is_named, (colour, symbol) = isinstance(label, str), mark(index)
            for is_draw, points in checkpoint_rows.groupby(checkpoint_rows["draw"].notna(), sort=False):
                has_draws |= bool(is_draw)
                panels.add_scatter(
                    x=list(points["variant"]),
                    y=list(points["value"]),
                    error_y=None
                    if is_draw
                    else interval(points["value"], points["value_ci_low"], points["value_ci_high"]),
                    mode="markers",
                    # Single draws are placed beside the point that pools them, and checkpoints beside each other.
                    offsetgroup=f"{label}, draws" if is_draw else str(label),
                    marker={
                        "size": 5 if is_draw else 9,
                        "opacity": 0.5 if is_draw else 1,
                        "symbol": symbol,
                        "color": colour,
                    },
                    name=f"{label}{', each draw' if is_draw else ''}" if is_named else str(metric),
                    showlegend=is_named and row == 1,
                    row=row,
                    col=1,
                )
            unedited = float(checkpoint_rows["baseline"].iloc[0])
            if unedited == unedited:
                style = {"line_dash": "dash", "line_color": colour, "line_width": 1.5}
                # Lines of several checkpoints are told by colour, because their names would overlap.
                annotation = (
                    {} if is_named else {"annotation_text": "unedited", "annotation_position": "right"}
                )
                panels.add_hline(y=unedited, row=row, col=1, **style, **annotation)
        panels.update_yaxes(title_text=str(metric), row=row, col=1)
    panels.update_xaxes(type="category")
    panels.update_xaxes(title_text="variant", row=len(metrics), col=1)
    has_legend = frame["checkpoint"].notna().any()
    panels.update_layout(
        height=110 + 230 * len(metrics) + 30 * bool(has_legend),
        margin={"t": 50 if has_legend else 20, "b": 70, "r": 20 if has_legend else 80},
        scattermode="group",
        scattergap=0.5,
        legend={"y": 1 + 12 / (230 * len(metrics))},
    )
    # That an interval meets the dashes is no sign of no effect: the examples are the same ones.
    subtitle = (
        "Points: under the edit, with the 95% interval over examples. Dashed: the unedited model. "
        "Intervals of effects are paired: see the table."
    )
    return finished(
        panels, "Metrics under each edit", subtitle + (" Small: single draws." if has_draws else "")
    )
