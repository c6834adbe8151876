"""Figures of what components contribute: direct contributions, shares of variance, cosines of logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from circuits.figures.palette import COLOURS
from circuits.figures.style import finished


def lens_figure(
    contributions: Mapping[str, Tensor], readouts: Mapping[str, Tensor], output: Tensor, positions: Any
) -> Any:
    """Two panels: each component's direct contribution, and each read-out's distance from the output.

    All tensors are [batch pos output]; drawn are root mean squares at `positions` (None: all).
    """
    from plotly.subplots import make_subplots

    at = slice(None) if positions is None else positions

    def size(values: Any) -> float:
        chosen = values[:, at]
        # A bias that rules an output out is infinite, and of no component.
        return float(chosen[chosen.isfinite()].double().square().mean().sqrt())

    found = make_subplots(rows=2, cols=1, vertical_spacing=0.24)
    parts = {name: size(part) for name, part in contributions.items()}
    found.add_bar(x=list(parts), y=list(parts.values()), marker_color=COLOURS["light"][0], row=1, col=1)
    away = {name: size(readout - output) for name, readout in readouts.items()}
    found.add_bar(x=list(away), y=list(away.values()), marker_color=COLOURS["light"][1], row=2, col=1)
    found.update_xaxes(type="category")
    for row, across, down in (
        (1, "component", "contribution"),
        (2, "residual stream read out after", "distance from output"),
    ):
        found.update_xaxes(title_text=across, row=row, col=1)
        found.update_yaxes(title_text=down, rangemode="tozero", row=row, col=1)
    found.update_layout(height=620, margin={"t": 20, "b": 60}, showlegend=False)
    said = "Root mean squares over examples, positions and outputs, in units of the output."
    return finished(found, "Direct contributions and read-outs", said)


def partition_figure(names: Sequence[str], alone: Tensor, unique: Tensor, together: float) -> Any:
    """Bars: the share of variance that each kind of classes explains alone and beyond the others.

    Args:
        alone, unique: [kind *features].
        together: the share that all explain.
    """
    from plotly import graph_objects

    found = graph_objects.Figure()
    shares = (("alone", alone), ("beyond the others", unique))
    for index, (name, share) in enumerate(shares):
        found.add_bar(
            x=list(names),
            y=(100 * share.double().reshape(len(names), -1).mean(1)).tolist(),
            name=name,
            marker_color=COLOURS["light"][index],
        )
    found.update_xaxes(type="category", title_text="classes")
    found.update_yaxes(title_text="share of variance (%)", rangemode="tozero")
    found.update_layout(height=360, margin={"t": 50, "b": 60}, barmode="group")
    said = f"Mean over features; all kinds of classes together explain {100 * together:.3g}%."
    return finished(found, "Variance explained by classes", said)


def cosines_figure(coefficients: Tensor, period: int, keys: Iterable[int]) -> Any:
    """Bars: the coefficient of each frequency, [frequency from 0]; `keys` are marked."""
    from plotly import graph_objects

    marked, sizes = set(keys), coefficients.tolist()
    found = graph_objects.Figure()
    for key in (False, True) if marked else (False,):
        held: Sequence[int] = [k for k in range(1, len(sizes)) if (k in marked) == key]
        found.add_bar(
            x=held,
            y=[sizes[k] for k in held],
            name="key frequency" if key else "other",
            showlegend=bool(marked),
            marker_color=COLOURS["light"][1 if key else 0],
        )
    found.update_xaxes(title_text=f"frequency (cycles per {period})", showgrid=False)
    found.update_yaxes(title_text="coefficient (logits)")
    found.update_layout(height=360, margin={"t": 50 if marked else 20, "b": 60}, barmode="overlay")
    return finished(found, "Logits as cosines of the difference from the answer")


def sum_figure(coordinates: Tensor, remainders: Tensor, coefficients: Sequence[int], period: int) -> Any:
    """Sums modulo `period` over a grid of two coordinates; of more, how many inputs have each sum.

    Args:
        coordinates: [input coordinate].
        remainders: [input].
        coefficients: of each coordinate in the sum.
    """
    import numpy as np
    from plotly import graph_objects

    found, said = graph_objects.Figure(), f"modulo {period}"
    terms = " + ".join(f"{m}·x{place}" if m != 1 else f"x{place}" for place, m in enumerate(coefficients))
    if len(coefficients) == 2:
        rows, columns = coordinates.cpu().numpy().astype(int).T
        # An input that is not among those given is blank.
        grid = np.full((rows.max() + 1, columns.max() + 1), np.nan)
        grid[rows, columns] = remainders.cpu().numpy()
        found.add_heatmap(
            z=grid,
            colorscale="Cividis",
            zmin=0,
            zmax=period - 1,
            colorbar={"title": "sum", "thickness": 12},
            hovertemplate="x0 %{y}, x1 %{x}<br>sum %{z}<extra></extra>",
        )
        found.update_xaxes(title_text="x1", constrain="domain", showgrid=False)
        found.update_yaxes(
            title_text="x0", autorange="reversed", scaleanchor="x", constrain="domain", showgrid=False
        )
        found.update_layout(height=520, width=620, margin={"t": 20, "b": 60})
    else:
        counts = remainders.bincount(minlength=period)
        found.add_bar(x=list(range(period)), y=counts.tolist(), marker_color=COLOURS["light"][0])
        found.update_xaxes(title_text="sum", showgrid=False)
        found.update_yaxes(title_text="inputs", rangemode="tozero")
        found.update_layout(height=360, margin={"t": 20, "b": 60})
    return finished(found, f"{terms} {said}")
