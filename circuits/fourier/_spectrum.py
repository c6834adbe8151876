"""Computes spectra: the share of the variance over a grid that each frequency carries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._basis import frequencies, read_axis, read_values, transform
from circuits.fourier._grid import Grid, read_grid
from circuits.tables import short_table
from circuits.validate import read_choice

#: A power below this share of the mean square is a rounding error.
ROUNDING = 1e-20

Label = int | tuple[int, ...]


@dataclass(frozen=True)
class Bands:
    """A spectrum summed by frequency.

    Attributes:
        labels: frequencies k, or their combinations (k₁, k₂, ...).
        power: [band *features], the variance that each band carries.
        degrees: the number of basis functions in each band.
        constant: [*features], the squared mean over the grid.
        variance: [*features], the variance over the grid.
    """

    labels: tuple[Label, ...]
    power: Float[Tensor, " band *features"]
    degrees: tuple[int, ...]
    constant: Float[Tensor, "*features"]
    variance: Float[Tensor, "*features"]

    @property
    def share(self) -> Float[Tensor, " band *features"]:
        """Returns each band's share of each feature's variance; 0 where there is none."""
        return _share(self.power, self.variance, self.constant)

    def total(self) -> Bands:
        """Returns the bands of all features together."""
        bands, variance = len(self.labels), self.variance
        return replace(
            self,
            power=self.power.reshape(bands, -1).sum(1),
            constant=self.constant.sum(),
            variance=variance.sum(),
        )

    def plot(self, keys: Iterable[Label] = (), *, title: str | None = None) -> Any:
        """Returns a plotly figure with a bar for each frequency's share; `keys` (key frequencies) are marked."""
        from circuits.figures.spectra import spectrum_bars

        return spectrum_bars(self.labels, self.total().share, list(keys), "frequency", title)


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The power of each combination of frequencies over a grid.

    Attributes:
        power: [k₁ ... k_m *features], k_i = 0..size_i/2: the sum of squared coefficients of the products of {cos,
            sin}(2πk₁x₁/p) and so on, per cell of the grid. All entries add up to the mean square of the feature
            (Parseval), all but the one at 0 to its variance. Units: those of the activation, squared.
    """

    grid: Grid
    power: Float[Tensor, "*shape"]

    def __repr__(self) -> str:
        return short_table(self.frame, [*self.grid.axes, "share", "norm"])

    @property
    def variance(self) -> Tensor:
        """Returns the variance over the grid, [*features]."""
        flat = self.power.flatten(0, len(self.grid.sizes) - 1)
        return flat[1:].sum(0)

    @property
    def share(self) -> Tensor:
        """Returns each entry's share of each feature's variance, shaped as `power`; that of the constant is 0."""
        constant = self.power[(0,) * len(self.grid.sizes)]
        shares = _share(self.power, self.variance, constant).clone()
        shares[(0,) * len(self.grid.sizes)] = 0
        return shares

    def total(self) -> Spectrum:
        """Returns the spectrum of all features together."""
        axes = len(self.grid.sizes)
        return replace(self, power=self.power.reshape(*self.power.shape[:axes], -1).sum(-1))

    def bands(self, by: str = "block") -> Bands:
        """Sums the power by frequency.

        Args:
            by: "block", for each k ≥ 1 all products of {1, cos k, sin k} over the coordinates, without the constant
                (for two the 3 × 3 block of Nanda et al. 2023; products of different frequencies are in no band);
                "component", each combination (k₁, k₂); the name of a coordinate, all products with its frequency k ≥ 1.
        """
        axes, sizes = len(self.grid.sizes), self.power.shape
        read_choice(by, (*_GROUPS, *self.grid.axes), "fourier", "by")
        combinations = list(itertools.product(*(range(size) for size in sizes[:axes])))[1:]
        label = _GROUPS.get(by)
        if label is None:
            index = list(self.grid.axes).index(by)

            def label(at: tuple[int, ...]) -> Label | None:
                return at[index] or None

        return self._grouped(combinations, label)

    def _grouped(self, combinations: list[tuple[int, ...]], label: Callable[[tuple[int, ...]], Any]) -> Bands:
        """Returns the power summed over bands; `label` names a combination's band, `None` where it is in none."""
        axes = len(self.grid.sizes)
        label_of_each = [label(at) for at in combinations]
        labels = sorted({name for name in label_of_each if name is not None})
        if not labels:
            raise CircuitsError("fourier: a coordinate of one value has no frequency; give at least two rows")
        # Combinations in no band are summed into an extra last one, which is dropped.
        band_of = {name: index for index, name in enumerate(labels)} | {None: len(labels)}
        index = torch.tensor([band_of[name] for name in label_of_each])
        flat = self.power.flatten(0, axes - 1)
        power = flat.new_zeros(len(labels) + 1, *flat.shape[1:])
        power.index_add_(0, index.to(flat.device), flat[1:])
        degrees = torch.zeros(len(labels) + 1, dtype=torch.long)
        degrees.index_add_(0, index, torch.tensor([self._degrees(at) for at in combinations]))
        return Bands(tuple(labels), power[:-1], tuple(degrees[:-1].tolist()), flat[0], flat[1:].sum(0))

    def _degrees(self, at: tuple[int, ...]) -> int:
        """Counts a combination's basis functions: 2 per coordinate, but 1 at 0 and at half an even period."""
        return int(np.prod([1 if k in (0, n / 2) else 2 for k, n in zip(at, self.grid.sizes, strict=True)]))

    @property
    def frame(self) -> pd.DataFrame:
        """Returns a row per combination of frequencies, all features together.

        The columns are each coordinate's frequency, then `power`, `share` of the variance, and `norm`, the root of
        power · cells.
        """
        total = self.total()
        k = np.indices(tuple(total.power.shape)).reshape(len(self.grid.axes), -1)
        power = total.power.flatten().cpu().numpy()
        columns: dict[str, Any] = {name: k[index] for index, name in enumerate(self.grid.axes)}
        return pd.DataFrame(
            {
                **columns,
                "power": power,
                "share": total.share.flatten().cpu().numpy(),
                "norm": np.sqrt(power * self.grid.cells),
            }
        )

    def plot(self, keys: Iterable[Label] = (), *, by: str | None = None, title: str | None = None) -> Any:
        """Returns a plotly figure of the share of each frequency: bars for one coordinate, a heatmap for two.

        Args:
            keys: frequencies to mark, such as those of `key_frequencies`; two coordinates then get bars, too.
            by: the bars, "block", "component" or a coordinate, see `bands`.
        """
        from circuits.figures.spectra import spectrum_bars, spectrum_map

        keys, axes = list(keys), len(self.grid.axes)
        if by is None and not keys and axes == 2:
            return spectrum_map(self.total().share, list(self.grid.axes), self.grid.sizes, title)
        if by is None and not keys and axes > 2:
            raise CircuitsError(
                f"plot: a spectrum over 1 or 2 coordinates can be drawn; this has {axes}; choose bars with by="
            )
        sizes = set(self.grid.sizes)
        unit = f"frequency (cycles per {sizes.pop()})" if len(sizes) == 1 else "frequency"
        bands = self.bands(by or "block")
        return spectrum_bars(bands.labels, bands.total().share, keys, unit, title)


def spectrum(x: Any, grid: Any = None, axis: int = 0) -> Spectrum:
    """Computes the spectrum of weights or activations x along one of their axes.

        spectrum(model.W_E[:113])                                     # embeddings of digits
        spectrum(model.W_out[0] @ model.W_U[:, :113], axis=1)         # the logits' axis of W_L
        spectrum(post[:, -1], Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=113))
        spectrum(model.W_pos[:49], {"row": 7, "column": 7})

    Args:
        grid: what the axis unfolds into: a `Grid`, the names and sizes of its coordinates, or sizes; None: the axis is
            one coordinate. The other axes are features, each with its own spectrum.
    """
    values = read_values(x).detach()
    layout = read_grid(grid, values.shape[read_axis(axis, values)])
    power = transform(layout.arrange(values, axis), range(len(layout.sizes))).square() / layout.cells
    for index, size in enumerate(layout.sizes):
        shape = [size // 2 + 1 if other == index else length for other, length in enumerate(power.shape)]
        power = power.new_zeros(shape).index_add_(index, frequencies(size).to(power.device), power)
    return Spectrum(layout, power)


def gini(values: Any) -> float:
    """Returns the Gini coefficient of absolute values: 0 if all are equal, near 1 if one dominates.

    The formula is that of Hurley and Rickard 2009. Nanda et al. 2023 apply it to the norms of Fourier components:
    `gini(transform(W_E[:p]).norm(dim=1))`.
    """
    ascending = read_values(x=values).flatten().abs().sort().values
    n = len(ascending)
    weights = n - torch.arange(1, n + 1, dtype=torch.float64, device=ascending.device) + 0.5
    total = ascending.sum()
    return float(1 - 2 * (ascending / total * weights).sum() / n) if bool(total > 0) else 0.0


def _share(power: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    # A feature that is constant over the grid (a dead neuron) has nothing but rounding errors as power.
    above_rounding = power > ROUNDING * (constant + variance)
    return torch.where(above_rounding, power / torch.where(variance > 0, variance, 1.0), 0.0)


def _block(at: tuple[int, ...]) -> Label | None:
    present = set(at) - {0}
    return present.pop() if len(present) == 1 else None


def _component(at: tuple[int, ...]) -> Label | None:
    return at[0] if len(at) == 1 else at


_GROUPS: dict[str, Callable[[tuple[int, ...]], Label | None]] = {"block": _block, "component": _component}
