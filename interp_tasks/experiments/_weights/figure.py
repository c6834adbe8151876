"""Figures of ``weights``: embeddings as tables, and every weight as a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.layout import Panel, draw
from circuits.figures.panels import Series, bars, curve, heat, scatter

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray

    from interp_tasks.experiments._weights.tensors import TableView

#: Singular vectors that are drawn, and steps of a map's scale on either side of 0: whole numbers of a byte.
VECTORS, STEPS = 4, 127
GREY = 6


def overview(
    tables: Sequence[TableView], compared: Mapping[str, tuple[Any, Any]]
) -> plotly.graph_objects.Figure:
    """Draws for each table singular values and vectors and its spectrum; last the positions.

    Args:
        compared: name -> the two rows of W_pos that are compared.
    """
    panels: list[Panel] = []
    for table in tables:
        panels.append(values_panel(table))
        if table.axis is not None:
            panels += [vectors_panel(table), spectrum_panel(table)]
    panels += [positions_panel(name, one, other) for name, (one, other) in compared.items()]
    return draw(panels, barmode="overlay")


def values_panel(table: TableView) -> Panel:
    """Returns the singular values of a table and of untrained ones, and how many make up 50% and 90% of the sum."""
    sizes = table.singular.values
    places = list(range(1, len(sizes) + 1))
    series = {"singular values": Series(places, sizes.tolist(), style={"mode": "lines"}, look=0)}
    if table.beside is not None:
        style: dict[str, Any] = {"mode": "lines", "line": {"dash": "dot"}}
        series["untrained, mean"] = Series(places, table.beside.tolist(), style=style, look=GREY)
    for share, symbol in ((0.5, "diamond"), (0.9, "square")):
        if at := table.singular.needed(share):
            style = {"mode": "markers", "marker": {"symbol": symbol, "size": 11}}
            series[f"{share:.0%} of ΣS"] = Series([at], [float(sizes[at - 1])], style=style, look=1)
    return curve(series, f"singular values of {table.label}", x="number of the singular value", y="size")


def vectors_panel(table: TableView) -> Panel:
    """Returns the first singular vectors, one above the other so that lines do not cross."""
    import numpy as np

    from interp_tasks.experiments._weights.singular_vectors import periodicity

    vectors = table.singular.vectors[:, :VECTORS]
    about = periodicity(vectors)
    apart = 2.2 * float(np.abs(vectors).max() or 1.0)
    series = {}
    for k in range(vectors.shape[1]):
        style: dict[str, Any] = {"mode": "lines", "showlegend": False, "line": {"width": 1.2}}
        hover = [f"vector {k + 1}, {table.axis} {at}: {value:.3g}" for at, value in enumerate(vectors[:, k])]
        rows = list(range(len(vectors))), (vectors[:, k] - k * apart).tolist()
        series[f"vector {k + 1}"] = Series(*rows, hover=hover, style=style, look=0)
    ticks = {
        "tickmode": "array",
        "tickvals": [-k * apart for k in range(len(series))],
        "ticktext": [f"{k + 1} ({about.frequency[k]})" for k in range(len(series))],
        "zeroline": False,
    }
    title = f"leading singular vectors of {table.label} (frequency)"
    return curve(series, title, x=str(table.axis), y="vector", y_axis=ticks)


def spectrum_panel(table: TableView) -> Panel:
    """Returns the norm of each frequency of a table, with the bounds that tell it from chance."""
    frequencies = table.frequencies
    assert frequencies is not None
    norms, significant = frequencies.norms, frequencies.significant
    series = {}
    for look, (name, chosen) in enumerate(
        (("norm: not significant", ~significant), ("norm: above relabelled digits", significant))
    ):
        if chosen.any():
            series[name] = Series((chosen.nonzero()[0] + 1).tolist(), norms[chosen].tolist(), look=look)
    places = list(range(1, len(norms) + 1))
    bounds = [("threshold by relabelled digits", [frequencies.threshold] * len(norms), 1, "dash")]
    if table.above_mean is not None:
        bounds.append(("threshold mean + 1 sd", table.above_mean.tolist(), 2, "dashdot"))
    if table.norms_beside is not None:
        bounds.append(("untrained, mean", table.norms_beside.tolist(), GREY, "dot"))
    lines = {
        name: Series(places, values, style={"mode": "lines", "line": {"dash": dash}}, look=look)
        for name, values, look, dash in bounds
    }
    drawn = bars(series, f"Fourier norms of {table.label}", x="frequency", y="norm of cos and sin")
    traces = [{**trace, "offsetgroup": "norm"} for trace in drawn.traces]
    return Panel([*traces, *curve(lines).traces], drawn.title, drawn.x, drawn.y, 260)


def positions_panel(name: str, one: Any, other: Any) -> Panel:
    """Returns two rows of the position embedding against each other, a point per dimension."""
    from interp_tasks.experiments._weights.position_similarity import PUBLISHED_DIMENSIONS

    parts = {
        f"dimensions 0–{PUBLISHED_DIMENSIONS - 1}": (slice(PUBLISHED_DIMENSIONS), 1),
        "other dimensions": (slice(PUBLISHED_DIMENSIONS, None), 0),
    }
    series = {
        label: Series(one[part].tolist(), other[part].tolist(), look=look)
        for label, (part, look) in parts.items()
        if len(one[part])
    }
    axes: dict[str, Any] = {"x": "W_pos at the first position", "y": "at the second position"}
    return scatter(series, f"W_pos, {name}: a point per dimension", height=300, **axes)


def heatmaps(weights: Mapping[str, NDArray[np.float32]]) -> plotly.graph_objects.Figure:
    """Draws a map of each tensor, each in the colours of its own largest entry."""
    import numpy as np

    panels = []
    for name, values in weights.items():
        largest = float(np.abs(values).max())
        # Bytes, which plotly writes as they are: a model has millions of weights.
        levels = np.round(values / largest * STEPS).astype(np.int8)
        title = f"{name} {' × '.join(map(str, values.shape))}, ±{largest:.3g}"
        axes: dict[str, Any] = {"across": "column", "down": "row", "numbers": False, "row": 6}
        drawn = heat(levels, title, unit="of the largest", signed=True, end=float(STEPS), **axes)
        hover = f"[%{{y}}, %{{x}}]: %{{z}} / {STEPS} of {largest:.3g}<extra></extra>"
        scale: dict[str, Any] = {"tickvals": [-STEPS, 0, STEPS], "ticktext": ["−1", "0", "1"]}
        bar = drawn.traces[0]["colorbar"] | scale
        trace = {**drawn.traces[0], "hovertemplate": hover, "colorbar": bar}
        panels.append(Panel([trace], title, drawn.x, drawn.y, drawn.height, drawn.width, bar=True))
    return draw(panels)
