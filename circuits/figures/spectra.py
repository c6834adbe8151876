"""Figures of spectra and clusters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished

#: Up to so many bars each has its label.
LABELLED = 20


def spectrum_bars(
    labels: Sequence[Any], share: Tensor, keys: Collection[Any], unit: str, title: str | None
) -> Any:
    """A bar per frequency: the share of the variance [label]. `keys` are marked."""
    from plotly import graph_objects

    shares = (100 * share.cpu()).tolist()
    if unknown := [key for key in keys if key not in labels]:
        raise CircuitsError(
            f"plots.spectrum: {unknown[0]!r} is no frequency here; they go from {labels[0]} to {labels[-1]}"
        )
    whole = all(isinstance(label, int) for label in labels)
    found = graph_objects.Figure()
    for key in (False, True) if keys else (False,):
        held = [place for place, label in enumerate(labels) if (label in keys) == key]
        found.add_bar(
            x=[labels[place] if whole else str(labels[place]) for place in held],
            y=[shares[place] for place in held],
            marker_color=COLOURS["light"][1 if key else 0],
            name="key frequency" if key else "other",
            showlegend=bool(keys),
            hovertemplate="frequency %{x}<br>%{y:.3g}% of the variance<extra></extra>",
        )
    every = {"dtick": 1} if whole and len(labels) <= LABELLED else {}
    order = {} if whole else {"categoryorder": "array", "categoryarray": list(map(str, labels))}
    found.update_xaxes(title_text=unit, showgrid=False, **every, **order)
    found.update_yaxes(title_text="share of variance (%)", rangemode="tozero")
    found.update_layout(height=360, margin={"t": 40 if keys else 20, "b": 60}, bargap=0.3, barmode="overlay")
    return finished(found, title or "Spectrum", "All features together; the constant has no share.")


def spectrum_map(share: Tensor, axes: Sequence[str], sizes: Sequence[int], title: str | None) -> Any:
    """The share of the variance [k₁ k₂] of the products of waves of two coordinates, as a heatmap."""
    from plotly import graph_objects

    found = graph_objects.Figure(
        graph_objects.Heatmap(
            z=(100 * share.cpu()).tolist(),
            colorscale="Cividis",
            zmin=0,
            colorbar={"title": "share of<br>variance (%)"},
            hovertemplate="frequencies (%{y}, %{x})<br>%{z:.3g}% of the variance<extra></extra>",
        )
    )
    for update, name, size in zip((found.update_yaxes, found.update_xaxes), axes, sizes, strict=True):
        ticks = {"tick0": 0, "dtick": max(1, size // 12)}
        update(title_text=f"frequency in {name} (cycles per {size})", showgrid=False, zeroline=False, **ticks)
    found.update_yaxes(scaleanchor="x", constrain="domain")
    found.update_xaxes(constrain="domain")
    found.update_layout(height=560, width=660, margin={"t": 20, "b": 60})
    return finished(
        found, title or "Spectrum", "Products of waves of two coordinates; all features together."
    )


def active_figure(shares: Mapping[str, Tensor], bound: float, counts: Tensor, draws: int) -> Any:
    """Two panels: shares of the variance by frequency beside the bound, and active frequencies of a feature.

    Args:
        shares: [frequency from 1], by coordinate, all features together.
        bound: the largest share under any of `draws` relabellings.
        counts: [feature].
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
    features = counts.bincount()
    figure.add_bar(
        x=list(range(len(features))),
        y=features.tolist(),
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
    said = f"Above: all features together; dashed: the largest share under {draws} relabellings."
    return finished(figure, "Active frequencies", said)


def clusters_figure(frame: pd.DataFrame, labels: Sequence[Any], threshold: float) -> Any:
    """A point per neuron: its first frequency, of `labels` in their order, and the share of its variance."""
    from plotly import graph_objects

    frame = frame.dropna(subset="frequency")
    found = graph_objects.Figure()
    for assigned, name in ((True, "in a cluster"), (False, "in none")):
        part = frame[frame["assigned"] == assigned]
        found.add_trace(
            graph_objects.Scatter(
                x=[str(one) for one in part["frequency"]],
                y=(100 * part["share"]).tolist(),
                customdata=part["neuron"].tolist(),
                mode="markers",
                marker={
                    "size": 6,
                    "opacity": 0.6,
                    "symbol": SYMBOLS[0 if assigned else 4],
                    "color": COLOURS["light"][0 if assigned else 1],
                },
                name=f"{name} ({len(part)} neurons)",
                hovertemplate="neuron %{customdata}<br>frequency %{x}<br>%{y:.3g}% of its variance<extra></extra>",
            )
        )
    found.add_hline(y=100 * threshold, line_dash="dash")
    used = set(frame["frequency"])
    found.update_xaxes(
        title_text="first frequency",
        type="category",
        categoryorder="array",
        categoryarray=[str(label) for label in labels if label in used],
    )
    found.update_yaxes(title_text="share of the neuron's variance (%)", range=[0, 103])
    found.update_layout(height=420, margin={"t": 50, "b": 60})
    return finished(found, "Neurons by frequency", "A point per neuron; dashed: the threshold of a cluster.")
