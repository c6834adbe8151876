"""Draws direct contributions and their shares of a metric, variance explained, cosines of logits and modular sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from circuits.figures.palette import COLOURS
from circuits.figures.style import finished, interval


def lens_figure(
    contributions: Mapping[str, Tensor],
    readouts: Mapping[str, Tensor],
    output: Tensor,
    kept: Tensor,
    where: str,
) -> Any:
    """Draws each component's direct contribution, and below it each read-out's distance from the output, as bars.

    All tensors are [batch pos output]; a bar is a root mean square over the entries that are kept.

    Args:
        kept: bool [batch pos].
        where: the names of the positions, if only some are kept.
    """
    from plotly.subplots import make_subplots

    def size(values: Any) -> float:
        chosen = values.expand_as(output)[kept.to(values.device)]
        # A bias of minus infinity rules an output out; it belongs to no component.
        return float(chosen[chosen.isfinite()].double().square().mean().sqrt())

    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.24)
    part_sizes = {name: size(part) for name, part in contributions.items()}
    figure.add_bar(
        x=list(part_sizes), y=list(part_sizes.values()), marker_color=COLOURS["light"][0], row=1, col=1
    )
    distances = {name: size(readout - output) for name, readout in readouts.items()}
    figure.add_bar(
        x=list(distances), y=list(distances.values()), marker_color=COLOURS["light"][1], row=2, col=1
    )
    figure.update_xaxes(type="category")
    for row, across, down in (
        (1, "component", "contribution"),
        (2, "residual stream read out after", "distance from output"),
    ):
        figure.update_xaxes(title_text=across, row=row, col=1)
        figure.update_yaxes(title_text=down, rangemode="tozero", row=row, col=1)
    figure.update_layout(height=620, margin={"t": 20, "b": 60}, showlegend=False)
    subtitle = "Root mean squares over examples, positions and outputs, in units of the output."
    subtitle += f" Positions: {where}." if where else ""
    return finished(figure, "Direct contributions and read-outs", subtitle)


def shares_figure(layers: pd.DataFrame, components: pd.DataFrame, metric: str) -> Any:
    """Draws the shares of attention and MLP of each layer as bars with intervals, and below them each head's as a map.

    Args:
        layers, components: rows with `component`, `layer`, `head`, `share`, `share_ci_low`, `share_ci_high`.
    """
    from plotly.subplots import make_subplots

    heads = components[components["head"].notna()].pivot(index="layer", columns="head", values="share")
    across, down = [str(head) for head in heads.columns], [str(layer) for layer in heads.index]
    bars, cells = 260, max(100, 26 * len(down))
    gap = 120 / (bars + cells + 120)
    figure = make_subplots(rows=2, cols=1, row_heights=[bars, cells], vertical_spacing=gap)
    figure.add_bar(
        x=list(layers["component"]),
        y=list(layers["share"]),
        error_y=interval(layers["share"], layers["share_ci_low"], layers["share_ci_high"]),
        marker_color=COLOURS["light"][0],
        row=1,
        col=1,
    )
    largest = float(heads.abs().to_numpy(dtype=float).max()) or 1.0
    figure.add_heatmap(
        x=across,
        y=down,
        z=heads.to_numpy(dtype=float),
        autocolorscale=True,
        zmin=-largest,
        zmax=largest,
        colorbar={
            "title": "share",
            "thickness": 12,
            "len": 1.1 * figure.layout.yaxis2.domain[1],
            "y": 0,
            "yanchor": "bottom",
        },
        xgap=1,
        ygap=1,
        hovertemplate="head %{y}.%{x}<br>share %{z:.4g}<extra></extra>",
        row=2,
        col=1,
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_xaxes(title_text="head", row=2, col=1)
    figure.update_yaxes(title_text=f"share of {metric}", row=1, col=1)
    figure.update_yaxes(
        title_text="layer", type="category", autorange="reversed", showgrid=False, row=2, col=1
    )
    figure.update_layout(height=bars + cells + 120 + 80, margin={"t": 20, "b": 60}, showlegend=False)
    subtitle = (
        "What each part adds to the metric directly, with the 95% interval over examples; below, each head."
    )
    return finished(figure, f"Direct attribution of {metric}", subtitle)


def partition_figure(names: Sequence[str], alone: Tensor, unique: Tensor, together: float) -> Any:
    """Draws as bars the share of variance that each set of classes explains alone and beyond the others.

    Args:
        alone, unique: [kind *features].
        together: the share that all sets explain together.
    """
    from plotly import graph_objects

    figure = graph_objects.Figure()
    shares = (("alone", alone), ("beyond the others", unique))
    for index, (name, share) in enumerate(shares):
        figure.add_bar(
            x=list(names),
            y=(100 * share.double().reshape(len(names), -1).mean(1)).tolist(),
            name=name,
            marker_color=COLOURS["light"][index],
        )
    figure.update_xaxes(type="category", title_text="classes")
    figure.update_yaxes(title_text="share of variance (%)", rangemode="tozero")
    figure.update_layout(height=360, margin={"t": 50, "b": 60}, barmode="group")
    subtitle = f"Mean over features; all kinds of classes together explain {100 * together:.3g}%."
    return finished(figure, "Variance explained by classes", subtitle)


def cosines_figure(coefficients: Tensor, period: int, keys: Iterable[int]) -> Any:
    """Draws the coefficient of each frequency [frequency from 0] as bars; `keys` are marked."""
    from plotly import graph_objects

    key_set, values = set(keys), coefficients.tolist()
    figure = graph_objects.Figure()
    for is_key in (False, True) if key_set else (False,):
        shown: Sequence[int] = [k for k in range(1, len(values)) if (k in key_set) == is_key]
        figure.add_bar(
            x=shown,
            y=[values[k] for k in shown],
            name="key frequency" if is_key else "other",
            showlegend=bool(key_set),
            marker_color=COLOURS["light"][1 if is_key else 0],
        )
    figure.update_xaxes(title_text=f"frequency (cycles per {period})", showgrid=False)
    figure.update_yaxes(title_text="coefficient (logits)")
    figure.update_layout(height=360, margin={"t": 50 if key_set else 20, "b": 60}, barmode="overlay")
    return finished(figure, "Logits as cosines of the difference from the answer")


def sum_figure(coordinates: Tensor, remainders: Tensor, coefficients: Sequence[int], period: int) -> Any:
    """Draws sums modulo `period`: as a grid for two coordinates, else as the number of inputs that have each sum.

    Args:
        coordinates: [input coordinate].
        remainders: [input].
        coefficients: the factor of each coordinate in the sum.
    """
    import numpy as np
    from plotly import graph_objects

    figure, modulus = graph_objects.Figure(), f"modulo {period}"
    terms = " + ".join(f"{m}·x{index}" if m != 1 else f"x{index}" for index, m in enumerate(coefficients))
    if len(coefficients) == 2:
        rows, columns = coordinates.cpu().numpy().astype(int).T
        # Cells without an input stay blank.
        grid = np.full((rows.max() + 1, columns.max() + 1), np.nan)
        grid[rows, columns] = remainders.cpu().numpy()
        figure.add_heatmap(
            z=grid,
            colorscale="Cividis",
            zmin=0,
            zmax=period - 1,
            colorbar={"title": "sum", "thickness": 12},
            hovertemplate="x0 %{y}, x1 %{x}<br>sum %{z}<extra></extra>",
        )
        figure.update_xaxes(title_text="x1", constrain="domain", showgrid=False)
        figure.update_yaxes(
            title_text="x0", autorange="reversed", scaleanchor="x", constrain="domain", showgrid=False
        )
        figure.update_layout(height=520, width=620, margin={"t": 20, "b": 60})
    else:
        counts = remainders.bincount(minlength=period)
        figure.add_bar(x=list(range(period)), y=counts.tolist(), marker_color=COLOURS["light"][0])
        figure.update_xaxes(title_text="sum", showgrid=False)
        figure.update_yaxes(title_text="inputs", rangemode="tozero")
        figure.update_layout(height=360, margin={"t": 20, "b": 60})
    return finished(figure, f"{terms} {modulus}")
