"""Figures of spectra: bars by frequency, and maps of the combinations over two coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from circuits.figures.layout import draw
from circuits.figures.panels import heat, spectrum

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(
    spectra: Mapping[tuple[str, str], pandas.DataFrame], maps: Mapping[tuple[str, str], pandas.DataFrame]
) -> plotly.graph_objects.Figure:
    """Draws for each tensor of each checkpoint bars by frequency, and below them a map of pairs of frequencies.

    Args:
        spectra: (REF, tensor) -> a row per frequency, whose label is the index and whose kind the index' name, with
            columns ``share`` of the variance, share of ``noise`` that it would have of white noise, and ``key``.
        maps: (REF, tensor) -> shares of pairs of frequencies; index and columns are named as the coordinates.
    """
    panels = []
    for (ref, label), table in spectra.items():
        shares, noise = (100 * table["share"]).tolist(), (100 * table["noise"]).tolist()
        keys = table.index[table["key"].astype(bool)].tolist()
        title = f"{label}<br>{ref}"
        panels.append(
            spectrum(table.index.tolist(), shares, keys, title, x=str(table.index.name), noise=noise)
        )
        if (pairs := maps.get((ref, label))) is not None:
            down, across = (f"frequency in {name}" for name in (pairs.index.name, pairs.columns.name))
            title = f"{label}: pairs of frequencies<br>{ref}"
            unit = "share of variance (%)"
            panels.append(heat(100 * pairs, title, unit=unit, across=across, down=down, numbers=False, row=6))
    return draw(panels, barmode="overlay")
