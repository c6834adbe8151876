"""Measures neurons and attention weights over the complete grid of two input digits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from interp_tasks.errors import UserError
from interp_tasks.measurement.activations import grid_of, recorded
from interp_tasks.measurement.options import THRESHOLD
from interp_tasks.measurement.subjects import LoadedCheckpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from circuits.fourier import Clusters, Grid, Spectrum
    from tasks import GridAxis

#: Standard deviations above the mean: of the code, which drew the figure, and of the text.
DEVIATIONS = (1, 2)
#: Fewer time points have no spread to speak of.
MIN_CHECKPOINTS = 3


def amplitudes(arranged: Tensor) -> NDArray[np.float64]:
    """Returns amplitudes [frequency feature] of activations [p p feature]: the mean over the first axis of |rfft2|,
    without row and column 0.

    Frequency 0 is among them, and the FFT is of length p − 1, both as in their code.
    """
    import torch

    spectrum = torch.fft.rfft2(arranged[1:, 1:].double(), dim=(0, 1)).abs()
    mean_spectrum: NDArray[np.float64] = spectrum.mean(0).cpu().numpy()
    return mean_spectrum


def active_counts(over_time: NDArray[np.float64], deviations: int) -> NDArray[np.int64]:
    """Counts the frequencies that are active, [time feature], of amplitudes [time frequency feature].

    Each frequency is divided by its sum over the times; active is what lies above mean + deviations · s.d. of all
    frequencies and times of the feature. The numbers depend on which times there are.
    """
    import numpy as np

    sums = over_time.sum(0)
    shares = np.divide(over_time, sums, out=np.zeros_like(over_time), where=sums > 0)
    level = shares.mean((0, 1)) + deviations * shares.std((0, 1))
    counts: NDArray[np.int64] = (shares > level).sum(1)
    return counts


def of_equal_size(over_time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divides amplitudes [time frequency feature] by their sum over the frequencies other than 0, at each time.

    Frequency 0 stays among them, as in the published count.

    A feature that only grows and shrinks has all its frequencies above the mean at once, and none otherwise; the count
    of these tells that from a change of its frequencies.
    """
    import numpy as np

    sums = over_time[:, 1:].sum(1, keepdims=True)
    return np.divide(over_time, sums, out=np.zeros_like(over_time), where=sums > 0)


@dataclass(frozen=True)
class Features:
    """Activations at one site on the complete grid, ``values [cell feature]``, and the names of the features."""

    label: str
    site: str
    layer: int
    position: int
    names: tuple[str, ...]
    heads: tuple[int | None, ...]
    values: Tensor
    grid: Grid


@dataclass(frozen=True)
class MeasuredFeatures:
    """The measures of every feature of a tensor, each ``[feature]``.

    Attributes:
        clusters: each feature with its first frequency, which explains ``clusters.share`` of its variance.
        first: of this, what cos and sin of one coordinate alone explain: the degree-1 part.
        one: what any function of one coordinate alone explains, of the coordinate that explains more.
        active, active_together: the number of active frequencies, and that of all features together.
        pairs, pairs_relabelled: pairs of frequencies that together have half of the variance, the largest first, and
            the same after one relabelling of the digits; NaN for a feature that does not vary.
    """

    features: Features
    spectrum: Spectrum
    clusters: Clusters
    active: Tensor
    active_together: int
    first: Tensor
    one: Tensor
    pairs: Tensor
    pairs_relabelled: Tensor


def input_axes(subject: LoadedCheckpoint) -> tuple[GridAxis, GridAxis]:
    """Returns the two digits of a checkpoint's task.

    Raises:
        UserError: for no task, or one whose inputs make no grid of two coordinates.
    """
    task = subject.task
    axes = () if task is None else task.grid_axes()
    if len(axes) != 2 or any(axis.position is None for axis in axes) or not hasattr(task, "input_grid"):
        raise UserError(
            "neurons needs a task with a grid of two input digits (grid_axes with positions, and input_grid()); "
            "interp-run fourier also takes grids of positions"
        )
    return axes[0], axes[1]


def features_at(subject: LoadedCheckpoint, axes: tuple[GridAxis, GridAxis], kind: str) -> Iterator[Features]:
    """Yields the features of each layer and read position over the complete grid, a few examples at a time."""
    from circuits.fourier import Grid

    task: Any = subject.task
    tokens = task.input_grid().tokens.to(subject.tokens.device)
    grid = grid_of(axes, tokens)
    # Inputs with a digit that is on no axis, such as 0 where digits are multiplied, are no cells.
    tokens, grid = tokens[list(grid.rows or ())], Grid(grid.axes)
    keys = [int(axis.position or 0) for axis in axes]
    for layer in range(subject.model.cfg.n_layers):
        site = f"{kind}.{layer}"
        for position in task.read_positions:

            def read(seen: Tensor, at: int = position) -> Tensor:
                return (seen[:, :, at, keys].flatten(1) if kind == "pattern" else seen[:, at]).cpu()

            values = recorded(subject.model, tokens, [site], read)[site]
            heads: list[int | None] = [None] * values.shape[1]
            names = [f"neuron {at}" for at in range(values.shape[1])]
            if kind == "pattern":
                heads = [head for head in range(values.shape[1] // 2) for _ in axes]
                names = [f"{layer}.{head} to {axis.name}" for head in heads[::2] for axis in axes]
            label = f"{site}, position {position}" if len(task.read_positions) > 1 else site
            yield Features(label, kind, layer, position, tuple(names), tuple(heads), values, grid)


def measured(features: Features, draws: int, seed: int) -> MeasuredFeatures:
    """Measures the features of one site: clusters, active frequencies and explained variance."""
    import torch

    from circuits.fourier import clusters, spectrum
    from interp_tasks.papers.miiii.relabelled import active, relabelling

    grid = features.grid
    partition = spectrum(features.values, grid)
    share = partition.share
    grouped = clusters(partition, THRESHOLD)
    # By frequency, what its cos and sin in one coordinate alone explain.
    linear = share.new_zeros(max(share.shape[:2]), share.shape[2])
    linear[1 : share.shape[0]] += share[1:, 0]
    linear[1 : share.shape[1]] += share[0, 1:]
    # `best` counts the frequencies that are in the spectrum, which are 1, 2, ...
    first = linear.gather(0, (grouped.best + 1).clamp(min=0)[None])[0]
    names = relabelling(grid, seed)
    renamed = grid.arrange(features.values)[names[0]][:, names[1]].flatten(0, 1)
    return MeasuredFeatures(
        features,
        partition,
        grouped,
        *active(features.values, grid, draws, seed),
        torch.where(grouped.best < 0, 0.0, first),
        torch.maximum(share[1:, 0].sum(0), share[0, 1:].sum(0)),
        pairs_for_half(share),
        pairs_for_half(spectrum(renamed, grid.axes).share),
    )


def pairs_for_half(share: Tensor) -> Tensor:
    """Counts the largest pairs of frequencies that together make one half, of shares [k_a k_b feature]; NaN if all make
    no more than half.
    """
    import torch

    sums = share.flatten(0, 1).sort(0, descending=True).values.cumsum(0)
    counts = (sums < 0.5).sum(0) + 1.0
    return torch.where(sums[-1] > 0.5, counts, math.nan)
