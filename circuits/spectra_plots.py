"""Figures of spectra and clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuits.errors import CircuitsError

if TYPE_CHECKING:
    from circuits.clustering import Clusters
    from circuits.spectra import Spectrum


def spectrum_figure(spectrum: Spectrum) -> Any:
    from plotly import graph_objects

    share = spectrum.total().share.cpu()
    names = list(spectrum.grid.axes)
    if share.ndim > 2:
        raise CircuitsError(f"plot: a spectrum over 1 or 2 coordinates can be drawn; this has {share.ndim}")
    if share.ndim == 1:
        bars = graph_objects.Bar(
            x=list(range(1, len(share))),
            y=(100 * share[1:]).tolist(),
            hovertemplate="frequency %{x}<br>%{y:.3g}% of the variance<extra></extra>",
        )
        found = graph_objects.Figure(bars)
        found.update_xaxes(title_text=f"frequency in {names[0]} (cycles per {spectrum.grid.sizes[0]})")
        found.update_yaxes(title_text="share of variance (%)")
        return found.update_layout(title_text="Spectrum", height=360)
    found = graph_objects.Figure(
        graph_objects.Heatmap(
            z=(100 * share).tolist(),
            colorscale="Cividis",
            zmin=0,
            colorbar={"title": "share of<br>variance (%)"},
            hovertemplate="frequencies (%{y}, %{x})<br>%{z:.3g}% of the variance<extra></extra>",
        )
    )
    for update, name, size in zip(
        (found.update_yaxes, found.update_xaxes), names, spectrum.grid.sizes, strict=True
    ):
        update(title_text=f"frequency in {name} (cycles per {size})")
    found.update_yaxes(scaleanchor="x", constrain="domain")
    found.update_xaxes(constrain="domain")
    return found.update_layout(title_text="Spectrum", height=560, width=660)


def clusters_figure(clusters: Clusters) -> Any:
    from plotly import graph_objects

    frame = clusters.frame.dropna(subset="frequency")
    found = graph_objects.Figure()
    for assigned, name in ((True, "in a cluster"), (False, "in none")):
        part = frame[frame["assigned"] == assigned]
        found.add_trace(
            graph_objects.Scatter(
                x=[str(one) for one in part["frequency"]],
                y=(100 * part["share"]).tolist(),
                customdata=part["neuron"].tolist(),
                mode="markers",
                marker={"size": 6, "opacity": 0.6, "symbol": "circle" if assigned else "x"},
                name=f"{name} ({len(part)} neurons)",
                hovertemplate="neuron %{customdata}<br>frequency %{x}<br>%{y:.3g}% of its variance<extra></extra>",
            )
        )
    found.add_hline(y=100 * clusters.threshold, line_dash="dash")
    used = set(frame["frequency"])
    found.update_xaxes(
        title_text="first frequency",
        type="category",
        categoryorder="array",
        categoryarray=[str(label) for label in clusters.labels if label in used],
    )
    found.update_yaxes(title_text="share of the neuron's variance (%)", range=[0, 103])
    return found.update_layout(title_text="Neurons by frequency", height=420)
