"""Neurons and attention weights as functions on the grid of two digits: variance explained, active frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from circuits.fourier import Clusters, Grid, Spectrum, clusters, spectrum
from interp_tasks.measurement.activations_in_passes import record_in_passes
from interp_tasks.measurement.loaded_checkpoints import LoadedCheckpoint
from interp_tasks.measurement.option_parsing import THRESHOLD
from interp_tasks.papers.input_grid_and_answers import GridInputs

#: The number of features whose products of pairs are in memory at once.
FEATURES = 256
#: Shares that differ by less are equal: a feature that is not 0 in one cell alone has the same share at all frequencies
#: in any order.
TIE = 1e-9
#: A power below this share of the mean square is a rounding error.
ROUNDING = 1e-20


@dataclass(frozen=True)
class LayerFeatures:
    """The features of one layer over the complete grid, ``values [cell feature]``, and their measures ``[feature]``.

    Attributes:
        heads: of attention the head of each.
        clusters: each feature with its first frequency, which explains ``clusters.share`` of its variance.
        first: of this, what cos and sin of one coordinate alone explain: the degree-1 part.
        one: what any function of one coordinate alone explains, of the coordinate that explains more.
        active, active_together: the number of active frequencies, and that of all features together.
        pairs, pairs_relabelled: pairs of frequencies that together have half of the variance, the largest first, and
            the same after one relabelling of the digits; NaN for a feature that does not vary.
    """

    site: str
    layer: int
    position: int
    names: tuple[str, ...]
    heads: tuple[int | None, ...]
    values: Tensor
    grid: Grid
    spectrum: Spectrum
    clusters: Clusters
    first: Tensor
    one: Tensor
    active: Tensor
    active_together: int
    pairs: Tensor
    pairs_relabelled: Tensor

    @property
    def varying(self) -> Tensor:
        """Returns which features vary."""
        return self.clusters.best >= 0

    @property
    def mean_active(self) -> float:
        """Returns the mean number of active frequencies of the features that vary; 0 where none does."""
        counts = self.active[self.varying]
        return float(counts.double().mean()) if len(counts) else 0.0


def features_by_layer(subject: LoadedCheckpoint, site: str, draws: int) -> Iterator[LayerFeatures]:
    """Yields the features of each layer where the task reads: neurons, or attention to each digit (``pattern``).

    Args:
        draws: relabellings of the digits behind the active frequencies.
    """
    inputs = GridInputs.of(subject.task, "neurons", coordinates=2)
    grid, keys, at = inputs.grid, inputs.operand_positions, inputs.task.read_positions[-1]
    for layer in range(subject.model.cfg.n_layers):

        def read_features(seen: Tensor) -> Tensor:
            return (seen[:, :, at, keys].flatten(1) if site == "pattern" else seen[:, at]).cpu()

        hook = f"{site}.{layer}"
        values = record_in_passes(
            subject.model, inputs.tokens.to(subject.tokens.device), [hook], read_features
        )[hook]
        heads: list[int | None] = [None] * values.shape[1]
        names = [f"neuron {neuron}" for neuron in range(values.shape[1])]
        if site == "pattern":
            heads = [head for head in range(values.shape[1] // 2) for _ in keys]
            names = [f"{layer}.{head} to {axis}" for head in heads[::2] for axis in grid.axes]
        partition = spectrum(values, grid)
        share, grouped = partition.share, clusters(partition, THRESHOLD)
        # By frequency, what its cos and sin in one coordinate alone explain.
        linear = share.new_zeros(max(share.shape[:2]), share.shape[2])
        linear[1 : share.shape[0]] += share[1:, 0]
        linear[1 : share.shape[1]] += share[0, 1:]
        # `best` counts the frequencies that are in the spectrum, which are 1, 2, ...
        first = linear.gather(0, (grouped.best + 1).clamp(min=0)[None])[0]
        order = draw_relabelling(grid, subject.seed)
        renamed = grid.arrange(values)[order[0]][:, order[1]].flatten(0, 1)
        counts, together = count_active_against_chance(values, grid, draws, subject.seed)
        yield LayerFeatures(
            *(site, layer, at, tuple(names), tuple(heads), values, grid, partition, grouped),
            first=torch.where(grouped.best < 0, 0.0, first),
            one=torch.maximum(share[1:, 0].sum(0), share[0, 1:].sum(0)),
            active=counts,
            active_together=together,
            pairs=count_pairs_for_half(share),
            pairs_relabelled=count_pairs_for_half(spectrum(renamed, grid.axes).share),
        )


def count_pairs_for_half(share: Tensor) -> Tensor:
    """Counts the largest pairs of frequencies that together make one half, of shares [k_a k_b feature]; NaN if all make
    no more than half.
    """
    sums = share.flatten(0, 1).sort(0, descending=True).values.cumsum(0)
    return torch.where(sums[-1] > 0.5, (sums < 0.5).sum(0) + 1.0, math.nan)


# ---- the published count of active frequencies


def published_amplitudes(arranged: Tensor) -> NDArray[np.float64]:
    """Returns amplitudes [frequency feature] of activations [p p feature]: the mean over the first axis of |rfft2|,
    without row and column 0.

    Frequency 0 is among them, and the FFT is of length p − 1, both as in their code.
    """
    found: NDArray[np.float64] = torch.fft.rfft2(arranged[1:, 1:].double(), dim=(0, 1)).abs().mean(0).numpy()
    return found


def count_active_by_published_rule(over_time: NDArray[np.float64], deviations: int) -> NDArray[np.int64]:
    """Counts the frequencies that are active, [time feature], of amplitudes [time frequency feature].

    Each frequency is divided by its sum over the times; active is what lies above mean + deviations · s.d. of all
    frequencies and times of the feature. The numbers depend on which times there are.
    """
    sums = over_time.sum(0)
    shares = np.divide(over_time, sums, out=np.zeros_like(over_time), where=sums > 0)
    level = shares.mean((0, 1)) + deviations * shares.std((0, 1))
    counts: NDArray[np.int64] = (shares > level).sum(1)
    return counts


def amplitude_shares(over_time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divides amplitudes [time frequency feature] by their sum over the frequencies other than 0, at each time.

    A feature that only grows and shrinks has all its frequencies above the mean at once, and none otherwise; the count
    of these tells that from a change of its frequencies.
    """
    sums = over_time[:, 1:].sum(1, keepdims=True)
    return np.divide(over_time, sums, out=np.zeros_like(over_time), where=sums > 0)


# ---- frequencies that features have because of the order of the digits, and not by chance


def count_active_against_chance(values: Tensor, grid: Grid, draws: int, seed: int) -> tuple[Tensor, int]:
    """Returns the number of active frequencies of each feature [feature], and of all features together.

    A frequency is active along a coordinate if its share of the variance, in all products with any functions of the
    other coordinates, exceeds that of every frequency under `draws` relabellings. A relabelling permutes the values of
    a coordinate, with the same permutation for coordinates of equal size. Activations that depend on the coordinates in
    any way but their order (noise, or a sum of arbitrary functions of each) are as likely before as after it; so a
    feature without periodicity has an active frequency with probability 1 / (draws + 1) at most.

    Args:
        values: [cell feature] over the complete grid.
    """
    arranged = grid.arrange(values.double())
    flat = arranged.flatten(0, -2)
    mean, variance = flat.mean(0), flat.var(0, correction=0)
    orders = [[torch.arange(size) for size in grid.sizes]]
    orders += [draw_relabelling(grid, seed, draw) for draw in range(draws)]
    total, constant = (torch.cat([x, x.sum()[None]]) for x in (variance, mean.square()))
    shares = []
    for axis, size in enumerate(grid.sizes):
        parts = []
        # The mean is taken off first, because for a constant feature only rounding is then left.
        for part in (arranged - mean).split(FEATURES, -1):
            rows = part.movedim(axis, 0).reshape(size, -1, part.shape[-1])  # [value others feature]
            pairs = torch.einsum("x o f, y o f -> x y f", rows, rows)
            parts.append(relabelled_powers(pairs, [order[axis] for order in orders]) / grid.cells)
        # [draw frequency feature]; draw 0 is the data as given. The last feature is all of them together.
        power = torch.cat(parts, -1)
        power = torch.cat([power, power.sum(-1, keepdim=True)], -1)
        is_power = power > ROUNDING * (constant + total)
        shares.append(torch.where(is_power, power / torch.where(total > 0, total, 1.0), 0.0))
    bound = torch.cat(shares, 1)[1:].amax((0, 1))
    # Of a shorter coordinate the high frequencies are none.
    padded = torch.nn.utils.rnn.pad_sequence([share[0] for share in shares])
    counts = (padded > bound * (1 + TIE)).any(1).sum(0)
    return counts[:-1], int(counts[-1])


def draw_relabelling(grid: Grid, seed: int, draw: int = 0) -> list[Tensor]:
    """Draws a permutation of each coordinate's values, the same for coordinates of equal size."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    drawn = {size: torch.randperm(size, generator=generator) for size in dict.fromkeys(grid.sizes)}
    return [drawn[size] for size in grid.sizes]


def relabelled_powers(pairs: Tensor, orders: Sequence[Tensor]) -> Tensor:
    """Returns the power of each frequency k ≥ 1 of a coordinate under each relabelling, ``[order frequency feature]``.

    |Σ_x v_x e^(−2πikx/n)|² is a sum over pairs of v_x v_y cos(2πk(x − y)/n); a relabelling changes only the distance
    x − y of a pair.

    Args:
        pairs: the products v_x v_y, ``[x y feature]``.
        orders: the value that each is called, ``[x]``.
    """
    size, flat = len(pairs), pairs.flatten(0, 1)
    k, distance = torch.arange(1, size // 2 + 1), torch.arange(size)
    cosines = ((k[:, None] * distance % size).double() * (2 * math.pi / size)).cos()
    # The highest frequency of an even period has one basis function, the others two.
    cosines *= torch.where(2 * k == size, 1.0, 2.0).double()[:, None] / size
    found = []
    for order in orders:
        distances = (order[:, None] - order) % size
        by_distance = flat.new_zeros(size, flat.shape[1]).index_add_(0, distances.flatten(), flat)
        found.append((cosines @ by_distance).clamp(min=0))
    return torch.stack(found)
