"""Figures of ``neurons``: images over the grid with their spectra, and what changes over training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import draw
from circuits.figures.panels import Series, curve, heat
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


def images_figure(
    axes: tuple[str, str], images: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> plotly.graph_objects.Figure:
    """Draws a row per image: the values on the left, the shares of pairs of frequencies on the right.

    Args:
        axes: names of the two coordinates.
        images: title -> values ``[a b]``, and shares of their variance ``[k_a k_b]``.
    """
    first, second = axes
    panels = []
    for name, (values, shares) in images.items():
        options: dict[str, Any] = {"numbers": False, "row": max(6, 280 // min(60, len(values))), "width": 230}
        ends: dict[str, Any] = {"start": float(values.min()), "end": float(values.max())}
        panels.append(heat(values, name, across=second, down=first, **ends, **options))
        options |= {"unit": "share of variance (%)", "row": max(6, 280 // min(60, len(shares)))}
        where: dict[str, Any] = {"across": f"frequency in {second}", "down": f"frequency in {first}"}
        # A neuron that is nowhere active has no share above 0.
        panels.append(
            heat(100 * shares, "its spectrum", end=float(100 * shares.max()) or 100, **where, **options)
        )
    return draw(panels, columns=2)


def steps_figure(frame: pandas.DataFrame) -> plotly.graph_objects.Figure:
    """Draws numbers of active frequencies and shares in two panels, a line per run, tensor and quantity."""
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
    tensors = list(frame.groupby(["run", "intervention"], sort=False, dropna=False))
    panels = []
    looks = 0
    for title, wanted, axis in (
        ("Number of frequencies", counted, {"rangemode": "tozero"}),
        ("Share", shares, {"range": [0, 1.03]}),
    ):
        series = {}
        for variant, metric, name in dict.fromkeys(wanted):
            for (run, tensor), rows in tensors:
                part = rows[(rows["variant"] == variant) & (rows["metric"] == metric)].sort_values("step")
                if len(part):
                    called = name if len(tensors) == 1 else f"{name}, {tensor} of {run}"
                    series[called] = Series(part["step"].tolist(), part["value"].tolist(), look=looks)
                    looks += 1
        panels.append(curve(series, title, y=title.lower().partition(" ")[0], y_axis=axis, height=300))
    return draw(panels)
