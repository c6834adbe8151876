"""Draws spectra, active frequencies, clusters of neurons, cosines of logits and modular sums."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.figures.layout import draw
from circuits.figures.panels import Series, bars, heat, scatter, spectrum


def spectrum_bars(
    labels: Sequence[Any], share: Tensor, keys: Collection[Any], unit: str, title: str | None
) -> Any:
    """Draws a bar per frequency, its share of the variance [label]; `keys` are marked."""
    if unknown := [key for key in keys if key not in labels]:
        raise CircuitsError(
            f"plots.spectrum: {unknown[0]!r} is no frequency here; they go from {labels[0]} to {labels[-1]}"
        )
    panel = spectrum(labels, (100 * share.cpu()).tolist(), keys, x=unit, height=290)
    return draw(
        [panel], title or "Spectrum", "All features together; the constant has no share.", barmode="overlay"
    )


def spectrum_map(share: Tensor, axes: Sequence[str], sizes: Sequence[int], title: str | None) -> Any:
    """Draws the share of the variance [k₁ k₂] of the products of waves of two coordinates, as a heatmap."""
    down, across = (
        f"frequency in {name} (cycles per {size})" for name, size in zip(axes, sizes, strict=True)
    )
    panel = heat(
        100 * share.cpu().numpy(),
        unit="share of variance (%)",
        across=across,
        down=down,
        numbers=False,
        row=12,
    )
    subtitle = "Products of waves of two coordinates; all features together."
    return draw([panel], title or "Spectrum", subtitle)


def active_figure(shares: Mapping[str, Tensor], bound: float, counts: Tensor, draws: int) -> Any:
    """Draws shares of the variance by frequency with the bound, and below how many features have n active frequencies.

    Args:
        shares: coordinate -> [frequency from 1], all features together.
        bound: the largest share under any of `draws` relabellings.
        counts: [feature], the number of active frequencies of each.
    """
    by_name = {
        name: Series(list(range(1, len(share) + 1)), (100 * share).tolist()) for name, share in shares.items()
    }
    number = counts.bincount().tolist()
    panels = [
        bars(by_name, x="frequency", y="share of variance (%)", lines=[{"y": 100 * bound}]),
        bars(
            {"features": Series(list(range(len(number))), number)},
            x="active frequencies of a feature",
            y="features",
        ),
    ]
    subtitle = f"Above: all features together; dashed: the largest share under {draws} relabellings."
    return draw(panels, "Active frequencies", subtitle, barmode="group")


def clusters_figure(frame: pd.DataFrame, labels: Sequence[Any], threshold: float) -> Any:
    """Draws a point per neuron: its first frequency (axis in the order of `labels`) and the share of its variance."""
    frame = frame.dropna(subset="frequency")
    series = {}
    for assigned, name in ((True, "in a cluster"), (False, "in none")):
        rows = frame[frame["assigned"] == assigned]
        values = [str(one) for one in rows["frequency"]], (100 * rows["share"]).tolist()
        style = {"marker": {"size": 6, "opacity": 0.6}}
        series[f"{name} ({len(rows)} neurons)"] = Series(
            *values, hover=[f"neuron {number}" for number in rows["neuron"]], style=style
        )
    used = set(frame["frequency"])
    panel = scatter(
        series,
        x="first frequency",
        y="share of the neuron's variance (%)",
        height=320,
        lines=[{"y": 100 * threshold}],
    )
    figure = draw([panel], "Neurons by frequency", "A point per neuron; dashed: the threshold of a cluster.")
    order = [str(label) for label in labels if label in used]
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)


def cosines_figure(coefficients: Tensor, period: int, keys: Iterable[int]) -> Any:
    """Draws the coefficient of each frequency [frequency from 0] as bars; `keys` are marked."""
    panel = spectrum(
        list(range(1, len(coefficients))),
        coefficients.tolist()[1:],
        list(keys),
        x=f"frequency (cycles per {period})",
        y="coefficient (logits)",
    )
    return draw([panel], "Logits as cosines of the difference from the answer", barmode="overlay")


def sum_figure(coordinates: Tensor, remainders: Tensor, coefficients: Sequence[int], period: int) -> Any:
    """Draws sums modulo `period`: as a grid for two coordinates, else as the number of inputs that have each sum.

    Args:
        coordinates: [input coordinate].
        remainders: [input].
        coefficients: the factor of each coordinate in the sum.
    """
    terms = " + ".join(f"{m}·x{index}" if m != 1 else f"x{index}" for index, m in enumerate(coefficients))
    if len(coefficients) == 2:
        rows, columns = coordinates.cpu().numpy().astype(int).T
        # Cells without an input stay blank.
        grid = np.full((rows.max() + 1, columns.max() + 1), np.nan)
        grid[rows, columns] = remainders.cpu().numpy()
        panel = heat(grid, unit="sum", across="x1", down="x0", end=period - 1, row=8, width=320)
    else:
        counts = remainders.bincount(minlength=period).tolist()
        panel = bars({"inputs": Series(list(range(period)), counts)}, x="sum", y="inputs")
    return draw([panel], f"{terms} modulo {period}")
