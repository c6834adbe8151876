"""Draws tests of circuits: faithfulness beside random circuits, completeness, and each member's own share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished, interval

#: Pixels that a row of a figure takes.
ROW = 26


def faithfulness_figure(frame: pd.DataFrame, metric: str) -> Any:
    """Draws a row per circuit: its faithfulness with the interval, and the range of random circuits of its size.

    Args:
        frame: the rows of one metric.
    """
    from plotly import graph_objects

    names = list(frame["circuit"])
    figure = graph_objects.Figure()
    drawn = frame[frame["random_low"].notna()]
    # A row each, broken by gaps: one trace, and one entry of the legend.
    figure.add_scatter(
        x=[
            end
            for low, high in zip(drawn["random_low"], drawn["random_high"], strict=True)
            for end in (low, high, None)
        ],
        y=[name for name in drawn["circuit"] for _ in range(3)],
        mode="lines",
        line={"color": "#a0a6ad", "width": 7},
        name="random circuits of its size",
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=list(frame["faithfulness"]),
        y=names,
        error_x=interval(frame["faithfulness"], frame["faithfulness_ci_low"], frame["faithfulness_ci_high"]),
        mode="markers",
        marker={"color": COLOURS["light"][0], "size": 9},
        name="the circuit",
        customdata=list(frame["size"]),
        hovertemplate="%{y}, %{customdata} members<br>faithfulness %{x:.4g}<extra></extra>",
    )
    figure.add_vline(x=1, line={"dash": "dash", "color": "#808080"})
    figure.update_xaxes(title_text="faithfulness")
    _rows(figure, names)
    return finished(
        figure,
        f"Faithfulness: {metric}",
        "0: as the source run, 1 (dashed): as the whole model, with 95% intervals over examples.",
    )


def completeness_figure(completeness: pd.DataFrame, metric: str) -> Any:
    """Draws a point per subset K: faithfulness of the circuit without K against that of the model without K.

    Args:
        completeness: the rows of one metric.
    """
    from plotly import graph_objects

    both = completeness[["model_without", "without"]].to_numpy(dtype=float)
    ends = [np.nanmin(both), np.nanmax(both)] if np.isfinite(both).any() else [0.0, 1.0]
    figure = graph_objects.Figure()
    figure.add_scatter(
        x=ends,
        y=ends,
        mode="lines",
        line={"dash": "dash", "color": "#808080"},
        hoverinfo="skip",
        showlegend=False,
    )
    groups = completeness.groupby(["circuit", "subset"], sort=False)
    circuits, subsets = (
        list(dict.fromkeys(completeness["circuit"])),
        list(dict.fromkeys(completeness["subset"])),
    )
    for (circuit, subset), rows in groups:
        figure.add_scatter(
            x=list(rows["model_without"]),
            y=list(rows["without"]),
            mode="markers",
            marker={
                "color": COLOURS["light"][circuits.index(circuit) % len(COLOURS["light"])],
                "symbol": SYMBOLS[subsets.index(subset) % len(SYMBOLS)],
                "size": 8,
            },
            name=f"{circuit}, {subset}",
            text=list(rows["removed"]),
            hovertemplate="without %{text}<br>the model %{x:.4g}<br>the circuit %{y:.4g}<extra></extra>",
        )
    figure.update_xaxes(title_text="faithfulness of the whole model without K")
    figure.update_yaxes(title_text="of the circuit without K")
    figure.update_layout(height=430, margin={"t": 50, "b": 60})
    return finished(
        figure,
        f"Completeness: {metric}",
        "A point per set K of members that is taken out; dashed: where a circuit that has all there is lies.",
    )


def minimality_figure(minimality: pd.DataFrame, metric: str) -> Any:
    """Draws a row per member of each circuit: the share of faithfulness that is lost without it, with its interval.

    Args:
        minimality: the rows of one metric.
    """
    from plotly import graph_objects

    several = minimality["circuit"].nunique() > 1
    figure = graph_objects.Figure()
    for index, (circuit, rows) in enumerate(minimality.groupby("circuit", sort=False)):
        figure.add_scatter(
            x=list(rows["share"]),
            y=list(rows["member"]),
            error_x=interval(rows["share"], rows["share_ci_low"], rows["share_ci_high"]),
            mode="markers",
            marker={
                "color": COLOURS["light"][index % len(COLOURS["light"])],
                "symbol": SYMBOLS[index % len(SYMBOLS)],
                "size": 8,
            },
            name=circuit,
            showlegend=several,
            customdata=list(rows["p_adjusted"]),
            hovertemplate="%{y}<br>%{x:.4g} less without it<br>p %{customdata:.3g} (Holm)<extra>"
            f"{circuit}</extra>",
        )
    figure.add_vline(x=0, line={"color": "#808080"})
    figure.update_xaxes(title_text="faithfulness less that without the member")
    _rows(figure, list(dict.fromkeys(minimality["member"])))
    return finished(
        figure, f"Minimality: {metric}", "Each member taken out by itself; 95% intervals over examples."
    )


def _rows(figure: Any, names: list[str]) -> None:
    """Lays out a category per row, the first one on top."""
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=names[::-1],
        automargin=True,
        range=[-0.6, len(names) - 0.4],
    )
    figure.update_layout(height=110 + ROW * len(names), margin={"t": 50, "b": 60})
