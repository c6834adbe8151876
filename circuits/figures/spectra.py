"""Draws spectra, active frequencies and clusters of neurons."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished

#: With at most this many bars, each has a tick label.
LABELLED = 20


def spectrum_bars(
    labels: Sequence[Any], share: Tensor, keys: Collection[Any], unit: str, title: str | None
) -> Any:
    """Draws a bar per frequency, its share of the variance [label]; `keys` are marked."""
    from plotly import graph_objects

    shares = (100 * share.cpu()).tolist()
    if unknown := [key for key in keys if key not in labels]:
        raise CircuitsError(
            f"plots.spectrum: {unknown[0]!r} is no frequency here; they go from {labels[0]} to {labels[-1]}"
        )
    are_integers = all(isinstance(label, int) for label in labels)
    figure = graph_objects.Figure()
    for key in (False, True) if keys else (False,):
        shown = [index for index, label in enumerate(labels) if (label in keys) == key]
        figure.add_bar(
            x=[labels[index] if are_integers else str(labels[index]) for index in shown],
            y=[shares[index] for index in shown],
            marker_color=COLOURS["light"][1 if key else 0],
            name="key frequency" if key else "other",
            showlegend=bool(keys),
            hovertemplate="frequency %{x}<br>%{y:.3g}% of the variance<extra></extra>",
        )
    ticks = {"dtick": 1} if are_integers and len(labels) <= LABELLED else {}
    category_order = (
        {} if are_integers else {"categoryorder": "array", "categoryarray": list(map(str, labels))}
    )
    figure.update_xaxes(title_text=unit, showgrid=False, **ticks, **category_order)
    figure.update_yaxes(title_text="share of variance (%)", rangemode="tozero")
    figure.update_layout(height=360, margin={"t": 40 if keys else 20, "b": 60}, bargap=0.3, barmode="overlay")
    return finished(figure, title or "Spectrum", "All features together; the constant has no share.")


def spectrum_map(share: Tensor, axes: Sequence[str], sizes: Sequence[int], title: str | None) -> Any:
    """Draws the share of the variance [k₁ k₂] of the products of waves of two coordinates, as a heatmap."""
    from plotly import graph_objects

    figure = graph_objects.Figure(
        graph_objects.Heatmap(
            z=(100 * share.cpu()).tolist(),
            colorscale="Cividis",
            zmin=0,
            colorbar={"title": "share of<br>variance (%)"},
            hovertemplate="frequencies (%{y}, %{x})<br>%{z:.3g}% of the variance<extra></extra>",
        )
    )
    for update, name, size in zip((figure.update_yaxes, figure.update_xaxes), axes, sizes, strict=True):
        ticks = {"tick0": 0, "dtick": max(1, size // 12)}
        update(title_text=f"frequency in {name} (cycles per {size})", showgrid=False, zeroline=False, **ticks)
    figure.update_yaxes(scaleanchor="x", constrain="domain")
    figure.update_xaxes(constrain="domain")
    figure.update_layout(height=560, width=660, margin={"t": 20, "b": 60})
    return finished(
        figure, title or "Spectrum", "Products of waves of two coordinates; all features together."
    )


def active_figure(shares: Mapping[str, Tensor], bound: float, counts: Tensor, draws: int) -> Any:
    """Draws shares of the variance by frequency with the bound, and below how many features have n active frequencies.

    Args:
        shares: coordinate -> [frequency from 1], all features together.
        bound: the largest share under any of `draws` relabellings.
        counts: [feature], the number of active frequencies of each.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.26)
    colours = COLOURS["light"]
    for index, (name, share) in enumerate(shares.items()):
        figure.add_bar(
            x=list(range(1, len(share) + 1)),
            y=(100 * share).tolist(),
            name=name,
            marker_color=colours[index % len(colours)],
            hovertemplate=f"frequency %{{x}} of {name}<br>%{{y:.3g}}% of the variance<extra></extra>",
            row=1,
            col=1,
        )
    figure.add_hline(y=100 * bound, line_dash="dash", row=1, col=1)
    counts_by_number = counts.bincount()
    figure.add_bar(
        x=list(range(len(counts_by_number))),
        y=counts_by_number.tolist(),
        marker_color=colours[0],
        showlegend=False,
        hovertemplate="%{x} active frequencies<br>%{y:,} features<extra></extra>",
        row=2,
        col=1,
    )
    figure.update_xaxes(title_text="frequency", showgrid=False, row=1, col=1)
    figure.update_yaxes(title_text="share of variance (%)", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title_text="active frequencies of a feature", showgrid=False, row=2, col=1)
    figure.update_yaxes(title_text="features", rangemode="tozero", row=2, col=1)
    figure.update_layout(height=620, margin={"t": 50, "b": 60}, barmode="group", bargap=0.3)
    subtitle = f"Above: all features together; dashed: the largest share under {draws} relabellings."
    return finished(figure, "Active frequencies", subtitle)


def clusters_figure(frame: pd.DataFrame, labels: Sequence[Any], threshold: float) -> Any:
    """Draws a point per neuron: its first frequency (axis in the order of `labels`) and the share of its variance."""
    from plotly import graph_objects

    frame = frame.dropna(subset="frequency")
    figure = graph_objects.Figure()
    for assigned, name in ((True, "in a cluster"), (False, "in none")):
        rows = frame[frame["assigned"] == assigned]
        figure.add_trace(
            graph_objects.Scatter(
                x=[str(one) for one in rows["frequency"]],
                y=(100 * rows["share"]).tolist(),
                customdata=rows["neuron"].tolist(),
                mode="markers",
                marker={
                    "size": 6,
                    "opacity": 0.6,
                    "symbol": SYMBOLS[0 if assigned else 4],
                    "color": COLOURS["light"][0 if assigned else 1],
                },
                name=f"{name} ({len(rows)} neurons)",
                hovertemplate="neuron %{customdata}<br>frequency %{x}<br>%{y:.3g}% of its variance<extra></extra>",
            )
        )
    figure.add_hline(y=100 * threshold, line_dash="dash")
    used = set(frame["frequency"])
    figure.update_xaxes(
        title_text="first frequency",
        type="category",
        categoryorder="array",
        categoryarray=[str(label) for label in labels if label in used],
    )
    figure.update_yaxes(title_text="share of the neuron's variance (%)", range=[0, 103])
    figure.update_layout(height=420, margin={"t": 50, "b": 60})
    return finished(figure, "Neurons by frequency", "A point per neuron; dashed: the threshold of a cluster.")
