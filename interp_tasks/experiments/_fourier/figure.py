"""Figures of spectra: bars by frequency, and maps of the combinations over two coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, template

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a panel, and between panels with their titles.
PANEL, GAP = 300, 110
TOP, BOTTOM = 100, 70


def figure(
    spectra: Mapping[tuple[str, str], pandas.DataFrame], maps: Mapping[tuple[str, str], pandas.DataFrame]
) -> plotly.graph_objects.Figure:
    """Draws a row for each tensor of each checkpoint: bars, and beside them a map where there are two coordinates.

    Args:
        spectra: (REF, tensor) -> a row per frequency, whose label is the index and whose kind the index' name, with
            columns ``share`` of the variance, share of ``noise`` that it would have of white noise, and ``key``.
        maps: (REF, tensor) -> shares of pairs of frequencies; index and columns are named as the coordinates.
    """
    from plotly.subplots import make_subplots

    tensors = list(spectra)
    total_height = PANEL * len(tensors) + GAP * (len(tensors) - 1)
    figure = make_subplots(
        rows=len(tensors),
        cols=2 if maps else 1,
        vertical_spacing=GAP / total_height if len(tensors) > 1 else 0,
        horizontal_spacing=0.1,
        column_widths=[0.62, 0.38] if maps else None,
        subplot_titles=[
            title
            for ref, label in spectra
            for title in (
                f"{label}<br>{ref}",
                f"{label}: pairs of frequencies<br>{ref}" if (ref, label) in maps else "",
            )[: 2 if maps else 1]
        ],
    )
    first = next((row for row, key in enumerate(tensors) if key in maps), 0)
    rest = "other" if any(one["key"].any() for one in spectra.values()) else "share (no frequency is key)"
    for row, key in enumerate(tensors, start=1):
        bars(figure, row, spectra[key], rest)
        if key in maps:
            heatmap(figure, row, maps[key])
        elif maps:
            figure.update_xaxes(visible=False, row=row, col=2)
            figure.update_yaxes(visible=False, row=row, col=2)
    figure.update_layout(
        height=TOP + total_height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        barmode="overlay",
        bargap=0.5,
        showlegend=True,
        legend={"y": 1 + 45 / total_height},
        coloraxis={
            # The template's colours, which mean the same in all maps.
            "autocolorscale": True,
            "cmin": 0,
            "colorbar": {
                "title": "share of<br>variance<br>(%)",
                "len": PANEL / total_height,
                # Beside the first map.
                "y": 1 - (first * (PANEL + GAP) + PANEL / 2) / total_height,
            },
        },
        template=template("light"),
    )
    figure.update_annotations(font_size=13, xanchor="left", align="left")
    for note in figure.layout.annotations:
        note.x = figure.layout.xaxis2.domain[0] if note.x > 0.5 else 0
    return figure


def bars(figure: Any, row: int, spectrum: pandas.DataFrame, rest: str) -> None:
    """Adds a bar per frequency; ``rest`` names, in the legend, the frequencies that are not key."""
    labels = spectrum.index.tolist()
    shares = (100 * spectrum["share"]).tolist()
    legend_names = {trace.name for trace in figure.data}
    for key in (False, True):
        chosen = [index for index, is_key in enumerate(spectrum["key"]) if is_key == key]
        name = "key frequency" if key else rest
        if chosen:
            figure.add_trace(
                {
                    "type": "bar",
                    "x": [labels[index] for index in chosen],
                    "y": [shares[index] for index in chosen],
                    "marker": {"color": COLOURS["light"][1 if key else 0]},
                    "name": name,
                    "legendgroup": name,
                    "showlegend": name not in legend_names,
                    "hovertemplate": "frequency %{x}<br>%{y:.3g}% of the variance<extra></extra>",
                },
                row=row,
                col=1,
            )
    figure.add_trace(
        {
            "type": "scatter",
            "mode": "markers",
            "x": labels,
            "y": (100 * spectrum["noise"]).tolist(),
            "marker": {
                "symbol": "line-ew-open",
                "size": min(44, max(7, 420 // len(labels))),
                "line": {"width": 2},
                "color": COLOURS["light"][2],
            },
            "name": "white noise",
            "legendgroup": "white noise",
            "showlegend": "white noise" not in legend_names,
            "hovertemplate": "frequency %{x}<br>white noise: %{y:.3g}%<extra></extra>",
        },
        row=row,
        col=1,
    )
    figure.update_xaxes(
        title_text=spectrum.index.name,
        type="category",
        categoryorder="array",
        categoryarray=labels,
        tickmode="array",
        tickvals=(ticks := labels[:: max(1, len(labels) // 7)]),
        # Pairs would run into each other on a narrow page.
        tickangle=0 if sum(map(len, ticks)) < 24 else None,
        row=row,
        col=1,
    )
    figure.update_yaxes(title_text="share of variance (%)", rangemode="tozero", row=row, col=1)


def heatmap(figure: Any, row: int, shares: pandas.DataFrame) -> None:
    """Adds a map of the shares of pairs of frequencies."""
    first, second = shares.index.name, shares.columns.name
    figure.add_trace(
        {
            "type": "heatmap",
            "z": (100 * shares.to_numpy()).tolist(),
            "coloraxis": "coloraxis",
            "hovertemplate": f"{first} %{{y}}, {second} %{{x}}<br>%{{z:.3g}}% of the variance<extra></extra>",
        },
        row=row,
        col=2,
    )
    for update, name, size in (
        (figure.update_xaxes, second, shares.shape[1]),
        (figure.update_yaxes, first, shares.shape[0]),
    ):
        ticks = {"tick0": 0, "dtick": max(1, size // 6)}
        update(title_text=f"frequency in {name}", showgrid=False, zeroline=False, row=row, col=2, **ticks)
