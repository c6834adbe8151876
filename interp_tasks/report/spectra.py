"""Spectra of embeddings: singular values, and of tokens that run through a cycle the norm of each frequency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS
from circuits.figures.style import log_axis
from interp_tasks.pages import Beside, Section
from interp_tasks.report.draw import rounded, stepped

if TYPE_CHECKING:
    from interp_tasks.measurement.embeddings.geometry import Array
    from interp_tasks.report.snapshots import View

HEIGHT = 340
#: Singular values below this share of the largest of all are what rounding leaves.
ROUNDING = 1e-7


def spectra_section(views: Sequence[View]) -> Section:
    """Returns the section of frequencies, of token tables that run through a cycle, and of singular values."""
    parts: list[Section] = []
    cyclic = False
    for index in range(max(len(view.snapshots[0].tables) for view in views)):
        for view in views:
            if index < len(view.snapshots[0].tables) and view.snapshots[0].tables[index].axis is not None:
                parts.append(frequencies(view, index))
                cyclic = True
    parts += [singular_values(view) for view in views]
    caption = "Singular values of the tables of embeddings, rows as they are. "
    if cyclic:
        caption += (
            "Frequencies: the norm of the cosine and sine of each over the digits, all dimensions together; dashed: "
            "mean and one standard deviation of all frequencies and the constant, the published bound of key ones. "
        )
    else:
        caption += "No frequencies: the task's tokens run through no cycle. "
    return Beside(parts, "Spectra", caption + "Grey: the last checkpoint shown. Axes stay as they are.")


def frequencies(view: View, index: int) -> Section:
    """Draws the norm of a table at each frequency, with its threshold, at the slider's step and at the last."""
    import numpy as np
    import plotly.graph_objects as go

    tables = [snapshot.tables[index] for snapshot in view.snapshots]
    spectra = [fourier_norms(table.rows) for table in tables]
    norms = np.stack([each for each, _ in spectra])
    bounds = [rounded(bound) for _, bound in spectra]
    count = norms.shape[1]
    x = list(range(1, count + 1))
    figure = go.Figure()
    figure.add_bar(
        x=x,
        y=[],
        name="slider's step",
        marker={"color": COLOURS["light"][0]},
        hovertemplate="frequency %{x}<br>norm %{y:.6g}<extra></extra>",
    )
    figure.add_scatter(
        x=x,
        y=rounded(norms[-1]),
        name="last checkpoint",
        mode="markers",
        marker={"color": COLOURS["light"][6], "symbol": "line-ew-open", "size": 7, "line": {"width": 1.5}},
        hovertemplate="last: %{y:.6g}<extra></extra>",
    )
    figure.add_shape(
        type="line",
        xref="paper",
        x0=0,
        x1=1,
        y0=0,
        y1=0,
        line={"color": COLOURS["light"][1], "dash": "dash", "width": 1.3},
    )
    figure.update_xaxes(title_text=f"frequency of the {tables[0].axis}", range=[0, count + 1])
    figure.update_yaxes(title_text=f"norm in {tables[0].label}", range=[0, 1.05 * float(norms.max() or 1)])
    moves = {
        "data.0.y": [rounded(each) for each in norms],
        "layout.shapes.0.y0": bounds,
        "layout.shapes.0.y1": bounds,
    }
    return finish(view, figure, moves, f"Fourier norms of {tables[0].label}")


def fourier_norms(rows: Array) -> tuple[Array, float]:
    """Returns norms of frequencies 1, 2, ..., and mean + s.d. of those from 0 on (Nanda et al. 2023)."""
    import numpy as np

    from circuits.fourier import spectrum

    norms = np.sqrt(spectrum(rows).total().power.numpy() * len(rows))
    return norms[1:], float(norms.mean() + norms.std())


def singular_values(view: View) -> Section:
    """Draws the singular values of each embedding table at the slider's step, and of the last checkpoint."""
    import numpy as np
    import plotly.graph_objects as go

    from interp_tasks.experiments._weights.singular_vectors import Singular

    figure, moves = go.Figure(), {}
    values_of_table: dict[str, list[Array]] = {
        table.label: [snapshot.tables[index].rows for snapshot in view.snapshots]
        for index, table in enumerate(view.snapshots[0].tables)
    }
    positions = [snapshot.positions for snapshot in view.snapshots if snapshot.positions is not None]
    if positions:
        values_of_table["W_pos"] = positions
    sizes = {
        name: np.stack([Singular.of(rows).values for rows in tables])
        for name, tables in values_of_table.items()
    }
    largest = max(float(each.max()) for each in sizes.values()) or 1.0
    trace_index = 0
    for index, (name, values) in enumerate(sizes.items()):
        # A logarithmic axis has no place for 0.
        shown = np.where(values > ROUNDING * largest, values, np.nan)
        x = list(range(1, values.shape[1] + 1))
        colour = COLOURS["light"][index]
        figure.add_scatter(
            x=x,
            y=rounded(shown[-1]),
            name=f"{name}, last",
            mode="lines",
            line={"color": COLOURS["light"][6], "width": 1.2, "dash": "dot"},
            hoverinfo="skip",
            showlegend=False,
        )
        figure.add_scatter(
            x=x,
            y=[],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 1.5},
            marker={"size": 5, "symbol": ["circle", "diamond", "square"][index % 3]},
            hovertemplate=f"{name}, value %{{x}}: %{{y:.6g}}<extra></extra>",
        )
        moves[f"data.{trace_index + 1}.y"] = [rounded(each) for each in shown]
        trace_index += 2
    known = np.concatenate([each[each > ROUNDING * largest] for each in sizes.values()])
    ends = np.log10([float(known.min()), float(known.max())]) if known.size else np.zeros(2)
    figure.update_xaxes(title_text="rank of the singular value")
    # Many of the smallest values of an untrained table would push the others together.
    low, high = max(float(ends[0]), float(ends[1]) - 4), float(ends[1])
    figure.update_yaxes(
        title_text="singular value", range=[low - 0.1, high + 0.1], **log_axis(10**low, 10**high)
    )
    return finish(view, figure, moves, f"singular values of {', '.join(sizes)}")


def finish(view: View, figure: Any, moves: dict[str, Any], noun: str) -> Section:
    top = 80 if view.beside else 45
    figure.update_layout(margin={"l": 60, "r": 15, "t": top, "b": 45}, legend={"y": 1.02}, bargap=0.25)
    return stepped(view, figure, moves, f"{noun} at the step of the slider", HEIGHT)
