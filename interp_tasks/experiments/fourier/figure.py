"""Figures of spectra: bars by frequency, and maps of the combinations over two coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_tasks.pages.palette import COLOURS, template

if TYPE_CHECKING:
    import plotly.graph_objects

    from interp_tasks.experiments.fourier.measure import Whole

#: Heights in pixels: of a panel, and between panels with their titles.
PANEL, GAP = 300, 110
TOP, BOTTOM = 100, 70


def figure(spectra: Mapping[tuple[str, str], Whole]) -> plotly.graph_objects.Figure:
    """A row for each tensor of each checkpoint: bars, and beside them a map where there are two coordinates."""
    from plotly.subplots import make_subplots

    tensors = list(spectra)
    whole = PANEL * len(tensors) + GAP * (len(tensors) - 1)
    maps = any(len(one.spectrum.grid.axes) == 2 for one in spectra.values())
    found = make_subplots(
        rows=len(tensors),
        cols=2 if maps else 1,
        vertical_spacing=GAP / whole if len(tensors) > 1 else 0,
        horizontal_spacing=0.1,
        column_widths=[0.62, 0.38] if maps else None,
        subplot_titles=[
            title
            for (ref, label), one in spectra.items()
            for title in (f"{label}<br>{ref}", map_title(ref, label, one))[: 2 if maps else 1]
        ],
    )
    rest = "not key" if any(one.keys for one in spectra.values()) else "share (no frequency is key)"
    for row, key in enumerate(tensors, start=1):
        one = spectra[key]
        bars(found, row, one, rest)
        if len(one.spectrum.grid.axes) == 2:
            heatmap(found, row, one.spectrum)
        elif maps:
            found.update_xaxes(visible=False, row=row, col=2)
            found.update_yaxes(visible=False, row=row, col=2)
    found.update_layout(
        height=TOP + whole + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        barmode="overlay",
        bargap=0.5,
        showlegend=True,
        legend={"y": 1 + 45 / whole},
        coloraxis={
            # The template's colours, which mean the same in all maps.
            "autocolorscale": True,
            "cmin": 0,
            "colorbar": {
                "title": "share of<br>variance<br>(%)",
                "len": PANEL / whole,
                "y": 1,
                "yanchor": "top",
            },
        },
        template=template("light"),
    )
    found.update_annotations(font_size=13, xanchor="left", align="left")
    for note in found.layout.annotations:
        note.x = found.layout.xaxis2.domain[0] if note.x > 0.5 else 0
    return found


def map_title(ref: str, label: str, one: Whole) -> str:
    """Nothing where there is no map."""
    return f"{label}: pairs of frequencies<br>{ref}" if len(one.spectrum.grid.axes) == 2 else ""


def bars(found: Any, row: int, one: Whole, rest: str) -> None:
    """``rest``: what the legend calls bars that are not of key frequencies."""
    bands = one.spectrum.bands(one.by)
    labels = [str(label) for label in bands.labels]
    shares = (100 * bands.share).tolist()
    drawn = {trace.name for trace in found.data}
    for key in (False, True):
        chosen = [place for place, label in enumerate(bands.labels) if (label in one.keys) == key]
        name = "key frequency" if key else rest
        if chosen:
            found.add_trace(
                {
                    "type": "bar",
                    "x": [labels[place] for place in chosen],
                    "y": [shares[place] for place in chosen],
                    "marker": {"color": COLOURS["light"][1 if key else 0]},
                    "name": name,
                    "legendgroup": name,
                    "showlegend": name not in drawn,
                    "hovertemplate": "frequency %{x}<br>%{y:.3g}% of the variance<extra></extra>",
                },
                row=row,
                col=1,
            )
    found.add_trace(
        {
            "type": "scatter",
            "mode": "markers",
            "x": labels,
            "y": [100 * degrees / (one.spectrum.grid.cells - 1) for degrees in bands.degrees],
            "marker": {
                "symbol": "line-ew-open",
                "size": min(44, max(7, 420 // len(labels))),
                "line": {"width": 2},
                "color": COLOURS["light"][2],
            },
            "name": "white noise",
            "legendgroup": "white noise",
            "showlegend": "white noise" not in drawn,
            "hovertemplate": "frequency %{x}<br>white noise: %{y:.3g}%<extra></extra>",
        },
        row=row,
        col=1,
    )
    names = ", ".join(one.spectrum.grid.axes)
    found.update_xaxes(
        title_text=f"frequencies ({names})" if one.by == "component" else "frequency",
        type="category",
        categoryorder="array",
        categoryarray=labels,
        tickmode="array",
        tickvals=labels[:: max(1, len(labels) // 14)],
        tickangle=0,
        row=row,
        col=1,
    )
    found.update_yaxes(title_text="share of variance (%)", rangemode="tozero", row=row, col=1)


def heatmap(found: Any, row: int, spectrum: Any) -> None:
    first, second = spectrum.grid.axes
    found.add_trace(
        {
            "type": "heatmap",
            "z": (100 * spectrum.share).tolist(),
            "coloraxis": "coloraxis",
            "hovertemplate": f"{first} %{{y}}, {second} %{{x}}<br>%{{z:.3g}}% of the variance<extra></extra>",
        },
        row=row,
        col=2,
    )
    for update, name, size in (
        (found.update_xaxes, second, spectrum.power.shape[1]),
        (found.update_yaxes, first, spectrum.power.shape[0]),
    ):
        ticks = {"tick0": 0, "dtick": max(1, size // 6)}
        update(title_text=f"frequency in {name}", showgrid=False, zeroline=False, row=row, col=2, **ticks)
