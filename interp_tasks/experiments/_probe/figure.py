"""The figure of ``probe``, in the palette of the pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


def figure(tables: Mapping[str, pandas.DataFrame]) -> plotly.graph_objects.Figure:
    """Returns a row of panels per target, one panel per metric; checkpoints beside each other in each."""
    import pandas

    from circuits.figures.probes import figure as drawn

    rows = pandas.concat([table.assign(ref=ref) for ref, table in tables.items()], ignore_index=True)
    figure_of_refs: plotly.graph_objects.Figure = drawn(rows, by="ref")
    return figure_of_refs
