"""Figures of ``neurons``: images over the grid with their spectra, and what changes over training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, SEQUENTIAL, SYMBOLS, template
from interp_tasks.experiments._neurons.active_counts import DEVIATIONS
from interp_tasks.experiments._neurons.table import (
    ACTIVE,
    ACTIVE_EACH,
    ALL,
    CLUSTERED,
    CLUSTERS,
    IN_CLUSTERS,
    SECOND,
    SIZE,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import plotly.graph_objects

#: Heights in pixels: of a panel, between panels with their titles, above and below all.
PANEL, GAP, AROUND = 300, 100, 110
#: Highest frequencies that ticks tell apart.
TICKS = 6


def images_figure(
    axes: tuple[str, str], images: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> plotly.graph_objects.Figure:
    """Draws a row per image: the values on the left, the shares of pairs of frequencies on the right.

    Args:
        axes: names of the two coordinates.
        images: title -> values ``[a b]``, and shares of their variance ``[k_a k_b]``.
    """
    from plotly.subplots import make_subplots

    first, second = axes
    total_height = PANEL * len(images) + GAP * (len(images) - 1)
    figure = make_subplots(
        rows=len(images),
        cols=2,
        horizontal_spacing=0.26,
        vertical_spacing=GAP / total_height if len(images) > 1 else 0,
        subplot_titles=[title for name in images for title in (name, "its spectrum")],
    )
    for row, (values, shares) in enumerate(images.values(), start=1):
        middle = 1 - (PANEL / 2 + (row - 1) * (PANEL + GAP)) / total_height
        for column, (table, says, unit) in enumerate(
            ((values, "%{z:.3g}", ""), (100 * shares, "%{z:.3g}% of the variance", "%")), start=1
        ):
            figure.add_trace(
                {
                    "type": "heatmap",
                    "z": table.tolist(),
                    # Both ends or neither counts; a neuron that is nowhere active has no share above 0.
                    **({} if column == 1 else {"zmin": 0, "zmax": float(table.max()) or 100}),
                    "colorscale": SEQUENTIAL,
                    "colorbar": {
                        "len": PANEL / total_height,
                        "y": middle,
                        "x": 0.43 if column == 1 else 1.02,
                        "thickness": 12,
                        "ticksuffix": unit,
                        "title": {
                            "text": ("value", "share of<br>variance")[column - 1],
                            "font": {"size": 12},
                        },
                    },
                    "hovertemplate": f"{first} %{{y}}, {second} %{{x}}<br>{says}<extra></extra>",
                },
                row=row,
                col=column,
            )
            of = "" if column == 1 else "frequency in "
            ticks = {"tick0": 0, "dtick": max(1, table.shape[0] // TICKS), "showgrid": False}
            figure.update_xaxes(title_text=f"{of}{second}", constrain="domain", row=row, col=column, **ticks)
            figure.update_yaxes(title_text=f"{of}{first}", autorange="reversed", row=row, col=column, **ticks)
    return figure.update_layout(
        height=total_height + AROUND, margin={"t": 60, "b": 50}, template=template("light")
    )


def steps_figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws numbers of active frequencies and shares in two panels, a line per run, tensor and quantity."""
    from plotly.subplots import make_subplots

    single = next((str(name) for name in frame["variant"] if str(name).startswith("neuron ")), ALL)
    counted = [
        (ALL, ACTIVE, "all together"),
        (ALL, ACTIVE_EACH, "per neuron"),
        (IN_CLUSTERS, CLUSTERS, CLUSTERS),
    ]
    for end in (*(f"{deviations} sd" for deviations in DEVIATIONS), f"{DEVIATIONS[0]} sd{SIZE}"):
        metric = f"{ACTIVE}, mean + {end}"
        counted += [(variant, metric, f"mean + {end}, {variant}") for variant in (single, ALL)]
    shares = [(IN_CLUSTERS, CLUSTERED, "neurons in clusters"), (ALL, SECOND, "variance explained, degree 2")]
    total_height = 2 * PANEL + GAP
    figure = make_subplots(
        rows=2, cols=1, vertical_spacing=GAP / total_height, subplot_titles=["Frequencies", "Shares"]
    )
    tensors = list(frame.groupby(["run", "intervention"], sort=False, dropna=False))
    for panel, wanted in enumerate((counted, shares), start=1):
        index = 0
        for variant, metric, name in dict.fromkeys(wanted):
            for (run, tensor), part in tensors:
                points = part[(part["variant"] == variant) & (part["metric"] == metric)].sort_values("step")
                if points.empty:
                    continue
                curve_name = name if len(tensors) == 1 else f"{name}, {tensor} of {run}"
                trace = line(curve_name, points["step"].tolist(), points["value"].tolist(), index)
                # Each panel has its legend beside it.
                legend = "legend" if panel == 1 else "legend2"
                figure.add_trace({**trace, "legend": legend}, row=panel, col=1)
                index += 1
    legend_place = {"orientation": "v", "x": 1.02, "yanchor": "top", "font": {"size": 12}}
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="number", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="share", range=[0, 1.03], row=2, col=1)
    return figure.update_layout(
        height=total_height + AROUND + 60,
        margin={"t": 70, "b": 50},
        legend={**legend_place, "y": 1, "title": {"text": "number of"}},
        legend2={**legend_place, "y": PANEL / total_height, "title": {"text": "share of"}},
        template=template("light"),
    )


def line(name: str, steps: list[int], values: list[float], index: int) -> dict[str, Any]:
    colours = COLOURS["light"]
    colour = colours[index % len(colours)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": steps,
        "y": values,
        "line": {"color": colour, "dash": ("solid", "dash", "dot")[index // len(colours) % 3]},
        "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "color": colour},
    }
