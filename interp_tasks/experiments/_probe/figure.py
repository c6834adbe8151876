"""The figure of ``probe``: checkpoints beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(tables: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """Returns a row of panels per target, one panel per metric."""
    import pandas

    from circuits.figures.results import probe_figure

    rows = pandas.concat([table.assign(ref=ref) for ref, table in tables.items()], ignore_index=True)
    drawn: plotly.graph_objects.Figure = probe_figure(rows, by="ref")
    return drawn
