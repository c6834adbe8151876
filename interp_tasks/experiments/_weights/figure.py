"""Figures of embeddings as tables: positions, singular values and vectors, spectra; and every weight as a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS, template

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects
    from numpy.typing import NDArray

    from interp_tasks.experiments._weights.tensors import TableView

PANEL, GAP, TOP, BOTTOM = 260, 105, 110, 60
#: Of the figure with a legend of several lines: above the panels, and of the legend below them.
ABOVE, KEY = 50, 100
#: Singular vectors that are drawn.
VECTORS = 4
#: Steps of a heat map's scale on either side of 0: whole numbers of a byte.
STEPS = 127


def overview(
    tables: Sequence[TableView], compared: Mapping[str, tuple[Any, Any]]
) -> plotly.graph_objects.Figure:
    """Draws for each table a row of singular values and vectors, and one of its spectrum; last the positions.

    Args:
        compared: name -> the two rows of W_pos that are compared.
    """
    from plotly.subplots import make_subplots

    specs: list[list[Any]] = []
    titles: list[str] = []
    for table in tables:
        if table.axis is None:
            specs.append([{"colspan": 2}, None])
            titles.append(f"singular values of {table.label}")
        else:
            specs += [[{}, {}], [{"colspan": 2}, None]]
            titles += [f"singular values of {table.label}", "leading singular vectors (frequency)"]
            titles.append(f"Fourier norms of {table.label}")
    for name in compared:
        specs.append([{"colspan": 2}, None])
        titles.append(f"W_pos, {name}: a point per dimension")
    total_height = PANEL * len(specs) + GAP * (len(specs) - 1)
    figure = make_subplots(
        rows=len(specs),
        cols=2,
        specs=specs,
        subplot_titles=titles,
        vertical_spacing=GAP / total_height if len(specs) > 1 else 0,
        horizontal_spacing=0.11,
    )
    row = 0
    for table in tables:
        row += 1
        add_values(figure, row, table)
        if table.axis is not None:
            add_vectors(figure, row, table)
            row += 1
            add_spectrum(figure, row, table)
    for one, other in compared.values():
        row += 1
        add_positions(figure, row, one, other)
    figure.update_layout(
        height=ABOVE + total_height + BOTTOM + KEY,
        margin={"t": ABOVE, "b": BOTTOM + KEY},
        bargap=0.4,
        # Below: above all panels its several lines would reach into the title.
        legend={"y": -60 / total_height, "yanchor": "top"},
        template=template("light"),
    )
    figure.update_annotations(font_size=13)
    return figure


def named(figure: Any, name: str) -> dict[str, Any]:
    """Returns the name and group of a trace, so that all traces of a name share one entry in the legend."""
    return {
        "name": name,
        "legendgroup": name,
        "showlegend": name not in {trace.name for trace in figure.data},
    }


def add_values(figure: Any, row: int, table: TableView) -> None:
    """Draws the singular values of a table and of untrained ones, and how many make up 50% and 90% of the sum."""
    sizes = table.singular.values
    places = list(range(1, len(sizes) + 1))
    for name, values, colour, dash in (
        ("untrained, mean", table.beside, COLOURS["light"][6], "dot"),
        ("singular values", sizes, COLOURS["light"][0], "solid"),
    ):
        if values is not None:
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": places,
                    "y": values.tolist(),
                    "line": {"color": colour, "dash": dash},
                    "hovertemplate": "value %{x}: %{y:.3g}<extra></extra>",
                    **named(figure, name),
                },
                row=row,
                col=1,
            )
    for share, symbol in ((0.5, "diamond"), (0.9, "square")):
        at = table.singular.needed(share)
        if at:
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [at],
                    "y": [float(sizes[at - 1])],
                    "marker": {"symbol": symbol, "size": 11, "color": COLOURS["light"][1]},
                    "hovertemplate": f"{share:.0%} of the sum with %{{x}}<extra></extra>",
                    **named(figure, f"singular values: {share:.0%} of ΣS"),
                },
                row=row,
                col=1,
            )
    figure.update_xaxes(title_text="number of the singular value", row=row, col=1)
    figure.update_yaxes(title_text="size", rangemode="tozero", row=row, col=1)


def add_vectors(figure: Any, row: int, table: TableView) -> None:
    """Draws the first singular vectors, one above the other so that lines do not cross."""
    import numpy as np

    from interp_tasks.experiments._weights.singular_vectors import periodicity

    vectors = table.singular.vectors[:, :VECTORS]
    about = periodicity(vectors)
    step = 2.2 * float(np.abs(vectors).max() or 1.0)
    ticks = []
    for k in range(vectors.shape[1]):
        ticks.append(f"{k + 1} ({about.frequency[k]})")
        figure.add_trace(
            {
                "type": "scatter",
                "mode": "lines",
                "x": list(range(len(vectors))),
                "y": (vectors[:, k] - k * step).tolist(),
                "text": [f"{value:.3g}" for value in vectors[:, k]],
                "line": {"color": COLOURS["light"][0], "width": 1.2},
                "showlegend": False,
                "hovertemplate": f"vector {k + 1}, {table.axis} %{{x}}: %{{text}}<extra></extra>",
            },
            row=row,
            col=2,
        )
    figure.update_xaxes(title_text=table.axis, row=row, col=2)
    figure.update_yaxes(
        tickmode="array",
        tickvals=[-k * step for k in range(len(ticks))],
        ticktext=ticks,
        zeroline=False,
        row=row,
        col=2,
    )


def add_spectrum(figure: Any, row: int, table: TableView) -> None:
    """Draws the norm of each frequency of a table, with the bounds that tell it from chance."""
    frequencies = table.frequencies
    assert frequencies is not None
    norms, significant = frequencies.norms, frequencies.significant
    for name, chosen, colour in (
        ("norm: not significant", ~significant, COLOURS["light"][0]),
        ("norm: above relabelled digits", significant, COLOURS["light"][1]),
    ):
        indices = chosen.nonzero()[0]
        if len(indices):
            figure.add_trace(
                {
                    "type": "bar",
                    "x": (indices + 1).tolist(),
                    "y": norms[indices].tolist(),
                    "marker": {"color": colour},
                    "hovertemplate": "frequency %{x}: %{y:.3g}<extra></extra>",
                    **named(figure, name),
                },
                row=row,
                col=1,
            )
    places = list(range(1, len(norms) + 1))
    lines: list[tuple[str, list[float], str, str]] = [
        (
            "norm: threshold by relabelled digits",
            [frequencies.threshold] * len(norms),
            COLOURS["light"][1],
            "dash",
        ),
    ]
    if table.above_mean is not None:
        threshold = table.above_mean.tolist()
        lines.append(("norm: threshold mean + 1 sd", threshold, COLOURS["light"][2], "dashdot"))
    if table.norms_beside is not None:
        lines.append(("untrained, mean", table.norms_beside.tolist(), COLOURS["light"][6], "dot"))
    for name, values, colour, dash in lines:
        figure.add_trace(
            {
                "type": "scatter",
                "mode": "lines",
                "x": places,
                "y": values,
                "line": {"color": colour, "dash": dash, "width": 1.5},
                "hoverinfo": "name",
                **named(figure, name),
            },
            row=row,
            col=1,
        )
    figure.update_xaxes(title_text="frequency", row=row, col=1)
    figure.update_yaxes(title_text="norm of cos and sin", rangemode="tozero", row=row, col=1)


def add_positions(figure: Any, row: int, one: Any, other: Any) -> None:
    """Draws two rows of the position embedding against each other, dimension by dimension."""
    from interp_tasks.experiments._weights.position_similarity import PUBLISHED_DIMENSIONS

    for name, part, colour, symbol in (
        (f"W_pos: dimensions 0–{PUBLISHED_DIMENSIONS - 1}", slice(PUBLISHED_DIMENSIONS), 1, "diamond"),
        ("W_pos: other dimensions", slice(PUBLISHED_DIMENSIONS, None), 0, "circle"),
    ):
        if len(one[part]):
            figure.add_trace(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": one[part].tolist(),
                    "y": other[part].tolist(),
                    "marker": {"color": COLOURS["light"][colour], "symbol": symbol, "size": 6},
                    "hovertemplate": "(%{x:.3g}, %{y:.3g})<extra></extra>",
                    **named(figure, name),
                },
                row=row,
                col=1,
            )
    figure.update_xaxes(title_text="W_pos at the first position", row=row, col=1)
    figure.update_yaxes(title_text="at the second position", row=row, col=1)


def heatmaps(weights: Mapping[str, NDArray[np.float32]]) -> plotly.graph_objects.Figure:
    """Draws a map of each tensor; wide ones take a whole row."""
    import numpy as np
    from plotly.subplots import make_subplots

    panels = list(weights.items())
    heights = [min(PANEL, max(40, 2 * len(values))) for _, values in panels]
    total_height = sum(heights) + GAP * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        row_heights=[height / sum(heights) for height in heights],
        vertical_spacing=GAP / total_height if len(panels) > 1 else 0,
        subplot_titles=[
            f"{name} {' × '.join(map(str, values.shape))}, ±{np.abs(values).max():.3g}"
            for name, values in panels
        ],
    )
    for row, (_, values) in enumerate(panels, start=1):
        largest = float(np.abs(values).max())
        figure.add_trace(
            {
                "type": "heatmap",
                # Bytes, which plotly writes as they are: a model has millions of weights.
                "z": np.round(values / largest * STEPS).astype(np.int8),
                "coloraxis": "coloraxis",
                "hovertemplate": f"[%{{y}}, %{{x}}]: %{{z}} / {STEPS} of {largest:.3g}<extra></extra>",
            },
            row=row,
            col=1,
        )
        figure.update_yaxes(autorange="reversed", showgrid=False, zeroline=False, nticks=4, row=row, col=1)
        figure.update_yaxes(title_text="row", row=row, col=1)
        figure.update_xaxes(
            title={"text": "column", "standoff": 4}, showgrid=False, zeroline=False, row=row, col=1
        )
    figure.update_layout(
        height=TOP + total_height + BOTTOM,
        margin={"t": TOP, "b": BOTTOM},
        template=template("light"),
        coloraxis={
            "autocolorscale": True,
            "cmin": -STEPS,
            "cmax": STEPS,
            "colorbar": {
                "title": "of the<br>largest",
                "len": min(1.0, 300 / total_height),
                "y": 1,
                "yanchor": "top",
                "tickvals": [-STEPS, 0, STEPS],
                "ticktext": ["−1", "0", "1"],
            },
        },
    )
    figure.update_annotations(font_size=13)
    return figure
