"""Figures of spectra and clusters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from circuits.errors import CircuitsError
from circuits.figures.palette import COLOURS, SYMBOLS
from circuits.figures.style import finished

if TYPE_CHECKING:
    from circuits.fourier._active import Active
    from circuits.fourier._clusters import Clusters
    from circuits.fourier._spectrum import Bands, Spectrum

#: Up to so many bars each has its label.
LABELLED = 20


def spectrum(
    values: Any, keys: Iterable[Any] = (), *, by: str | None = None, title: str | None = None
) -> Any:
    """A plotly figure of the share of the variance that each frequency carries, all features together.

        plots.spectrum(fourier.spectrum(model.W_E[:113]))
        plots.spectrum(found, fourier.key_frequencies(found))
        plots.spectrum(model.W_E[:113])

    Args:
        values: a `Spectrum` or its `Bands`, or weights or activations as `fourier.spectrum` takes them.
        keys: frequencies that are marked, such as the key ones.
        by: bars by "block", "component" or a coordinate, see `Spectrum.bands`; default: a bar per frequency of one
            coordinate, and of two a map, or with keys bars by block.
    """
    from circuits.fourier._spectrum import Bands, Spectrum
    from circuits.fourier._spectrum import spectrum as measured

    if not isinstance(values, Spectrum | Bands):
        values = measured(values)
    keys = list(keys)
    if isinstance(values, Spectrum):
        axes = len(values.grid.axes)
        if by is None and not keys and axes == 2:
            return _map(values, title)
        if by is None and not keys and axes > 2:
            raise CircuitsError(
                f"plot: a spectrum over 1 or 2 coordinates can be drawn; this has {axes}; choose bars with by="
            )
        values, sizes = values.bands(by or "block"), set(values.grid.sizes)
        unit = f"frequency (cycles per {sizes.pop()})" if len(sizes) == 1 else "frequency"
    else:
        unit = "frequency"
    return _bars(values, keys, unit, title)


def _bars(bands: Bands, keys: Collection[Any], unit: str, title: str | None) -> Any:
    from plotly import graph_objects

    shares = (100 * bands.total().share.cpu()).tolist()
    if unknown := [key for key in keys if key not in bands.labels]:
        raise CircuitsError(
            f"plots.spectrum: {unknown[0]!r} is no frequency here; they go from {bands.labels[0]} to {bands.labels[-1]}"
        )
    whole = all(isinstance(label, int) for label in bands.labels)
    found = graph_objects.Figure()
    for key in (False, True) if keys else (False,):
        held = [place for place, label in enumerate(bands.labels) if (label in keys) == key]
        found.add_bar(
            x=[bands.labels[place] if whole else str(bands.labels[place]) for place in held],
            y=[shares[place] for place in held],
            marker_color=COLOURS["light"][1 if key else 0],
            name="key frequency" if key else "other",
            showlegend=bool(keys),
            hovertemplate="frequency %{x}<br>%{y:.3g}% of the variance<extra></extra>",
        )
    every = {"dtick": 1} if whole and len(bands.labels) <= LABELLED else {}
    order = {} if whole else {"categoryorder": "array", "categoryarray": list(map(str, bands.labels))}
    found.update_xaxes(title_text=unit, showgrid=False, **every, **order)
    found.update_yaxes(title_text="share of variance (%)", rangemode="tozero")
    found.update_layout(height=360, margin={"t": 40 if keys else 20, "b": 60}, bargap=0.3, barmode="overlay")
    return finished(found, title or "Spectrum", "All features together; the constant has no share.")


def _map(one: Spectrum, title: str | None) -> Any:
    from plotly import graph_objects

    found = graph_objects.Figure(
        graph_objects.Heatmap(
            z=(100 * one.total().share.cpu()).tolist(),
            colorscale="Cividis",
            zmin=0,
            colorbar={"title": "share of<br>variance (%)"},
            hovertemplate="frequencies (%{y}, %{x})<br>%{z:.3g}% of the variance<extra></extra>",
        )
    )
    for update, name, size in zip(
        (found.update_yaxes, found.update_xaxes), one.grid.axes, one.grid.sizes, strict=True
    ):
        ticks = {"tick0": 0, "dtick": max(1, size // 12)}
        update(title_text=f"frequency in {name} (cycles per {size})", showgrid=False, zeroline=False, **ticks)
    found.update_yaxes(scaleanchor="x", constrain="domain")
    found.update_xaxes(constrain="domain")
    found.update_layout(height=560, width=660, margin={"t": 20, "b": 60})
    return finished(
        found, title or "Spectrum", "Products of waves of two coordinates; all features together."
    )


def active_figure(found: Active) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.26)
    colours = COLOURS["light"]
    for index, (name, share) in enumerate(found.together.items()):
        figure.add_bar(
            x=list(range(1, len(share) + 1)),
            y=(100 * share).tolist(),
            name=name,
            marker_color=colours[index % len(colours)],
            hovertemplate=f"frequency %{{x}} of {name}<br>%{{y:.3g}}% of the variance<extra></extra>",
            row=1,
            col=1,
        )
    figure.add_hline(y=100 * found.together_bound, line_dash="dash", row=1, col=1)
    counts = found.counts.bincount()
    figure.add_bar(
        x=list(range(len(counts))),
        y=counts.tolist(),
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
    said = f"Above: all features together; dashed: the largest share under {found.draws} relabellings."
    return finished(figure, "Active frequencies", said)


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
    found.add_hline(y=100 * clusters.threshold, line_dash="dash")
    used = set(frame["frequency"])
    found.update_xaxes(
        title_text="first frequency",
        type="category",
        categoryorder="array",
        categoryarray=[str(label) for label in clusters.labels if label in used],
    )
    found.update_yaxes(title_text="share of the neuron's variance (%)", range=[0, 103])
    found.update_layout(height=420, margin={"t": 50, "b": 60})
    return finished(found, "Neurons by frequency", "A point per neuron; dashed: the threshold of a cluster.")
