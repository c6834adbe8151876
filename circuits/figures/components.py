"""Figures of what components contribute: direct contributions, shares of variance, cosines of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from circuits.figures.palette import COLOURS
from circuits.figures.style import finished

if TYPE_CHECKING:
    from circuits.fourier._cosine_fit import CosineFit
    from circuits.fourier._modular_sum import ModularSum
    from circuits.logit_lens import Lens
    from circuits.variance import Partition


def lens_figure(lens: Lens, positions: Any) -> Any:
    from plotly.subplots import make_subplots

    at = slice(None) if positions is None else positions

    def size(values: Any) -> float:
        chosen = values[:, at]
        # A bias that rules an output out is infinite, and of no component.
        return float(chosen[chosen.isfinite()].double().square().mean().sqrt())

    found = make_subplots(rows=2, cols=1, vertical_spacing=0.24)
    parts = {name: size(part) for name, part in lens.contributions.items()}
    found.add_bar(x=list(parts), y=list(parts.values()), marker_color=COLOURS["light"][0], row=1, col=1)
    away = {name: size(readout - lens.output) for name, readout in lens.readouts.items()}
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


def partition_figure(partition: Partition) -> Any:
    from plotly import graph_objects

    together = 100 * float(partition.together.double().mean())
    found = graph_objects.Figure()
    shares = (("alone", partition.alone), ("beyond the others", partition.unique))
    for index, (name, share) in enumerate(shares):
        found.add_bar(
            x=list(partition.names),
            y=(100 * share.double().reshape(len(partition.names), -1).mean(1)).tolist(),
            name=name,
            marker_color=COLOURS["light"][index],
        )
    found.update_xaxes(type="category", title_text="classes")
    found.update_yaxes(title_text="share of variance (%)", rangemode="tozero")
    found.update_layout(height=360, margin={"t": 50, "b": 60}, barmode="group")
    said = f"Mean over features; all kinds of classes together explain {together:.3g}%."
    return finished(found, "Variance explained by classes", said)


def cosines_figure(fit: CosineFit, keys: Iterable[int]) -> Any:
    from plotly import graph_objects

    marked, sizes = set(keys), fit.coefficients.tolist()
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
    found.update_xaxes(title_text=f"frequency (cycles per {len(fit.by_difference)})", showgrid=False)
    found.update_yaxes(title_text="coefficient (logits)")
    found.update_layout(height=360, margin={"t": 50 if marked else 20, "b": 60}, barmode="overlay")
    return finished(found, "Logits as cosines of the difference from the answer")


def sum_figure(answer: ModularSum) -> Any:
    import numpy as np
    from plotly import graph_objects

    found, said = graph_objects.Figure(), f"modulo {answer.period}"
    terms = " + ".join(
        f"{m}·x{place}" if m != 1 else f"x{place}" for place, m in enumerate(answer.coefficients)
    )
    if len(answer.coefficients) == 2:
        rows, columns = answer.coordinates.cpu().numpy().astype(int).T
        # An input that is not among those given is blank.
        grid = np.full((rows.max() + 1, columns.max() + 1), np.nan)
        grid[rows, columns] = answer.remainders.cpu().numpy()
        found.add_heatmap(
            z=grid,
            colorscale="Cividis",
            zmin=0,
            zmax=answer.period - 1,
            colorbar={"title": "sum", "thickness": 12},
            hovertemplate="x0 %{y}, x1 %{x}<br>sum %{z}<extra></extra>",
        )
        found.update_xaxes(title_text="x1", constrain="domain", showgrid=False)
        found.update_yaxes(
            title_text="x0", autorange="reversed", scaleanchor="x", constrain="domain", showgrid=False
        )
        found.update_layout(height=520, width=620, margin={"t": 20, "b": 60})
    else:
        counts = answer.remainders.bincount(minlength=answer.period)
        found.add_bar(x=list(range(answer.period)), y=counts.tolist(), marker_color=COLOURS["light"][0])
        found.update_xaxes(title_text="sum", showgrid=False)
        found.update_yaxes(title_text="inputs", rangemode="tozero")
        found.update_layout(height=360, margin={"t": 20, "b": 60})
    return finished(found, f"{terms} {said}")
