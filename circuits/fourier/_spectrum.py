"""Spectra: how much of the variance over a grid each frequency carries."""

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
from circuits.validate import read_choice

#: A power below this share of the whole is what rounding leaves.
ROUNDING = 1e-20

Label = int | tuple[int, ...]


@dataclass(frozen=True)
class Bands:
    """The spectrum by frequency.

    Attributes:
        labels: frequencies k, or their combinations (k₁, k₂, ...).
        power: [band *features], the variance each carries.
        degrees: the number of basis functions in each.
        constant: [*features], the squared mean over the grid, and the variance over it.
        variance: see `constant`.
    """

    labels: tuple[Label, ...]
    power: Float[Tensor, " band *features"]
    degrees: tuple[int, ...]
    constant: Float[Tensor, "*features"]
    variance: Float[Tensor, "*features"]

    @property
    def share(self) -> Float[Tensor, " band *features"]:
        """Of each feature's variance; 0 where there is none."""
        return _share(self.power, self.variance, self.constant)

    def total(self) -> Bands:
        """All features together."""
        bands, ones = len(self.labels), self.variance
        return replace(
            self,
            power=self.power.reshape(bands, -1).sum(1),
            constant=self.constant.sum(),
            variance=ones.sum(),
        )

    def plot(self, keys: Iterable[Label] = (), *, title: str | None = None) -> Any:
        """A plotly figure: a bar for the share of each frequency; `keys` are marked, such as `key_frequencies`."""
        from circuits.figures.spectra import spectrum_bars

        return spectrum_bars(self.labels, self.total().share, list(keys), "frequency", title)


@dataclass(frozen=True)
class Spectrum:
    """The power of each combination of frequencies over a grid.

    Attributes:
        power: [k₁ ... k_m *features], k_i = 0..size_i/2: the sum of squared coefficients of the products of {cos,
            sin}(2πk₁x₁/p) and so on, per cell of the grid. The whole is the mean square of the feature (Parseval), all
            but the entry at 0 its variance. Units: those of the activation, squared.
    """

    grid: Grid
    power: Float[Tensor, "*shape"]

    @property
    def variance(self) -> Tensor:
        """Over the grid, [*features]."""
        flat = self.power.flatten(0, len(self.grid.sizes) - 1)
        return flat[1:].sum(0)

    @property
    def share(self) -> Tensor:
        """Of each feature's variance, shaped as `power`; the constant has none."""
        constant = self.power[(0,) * len(self.grid.sizes)]
        found = _share(self.power, self.variance, constant).clone()
        found[(0,) * len(self.grid.sizes)] = 0
        return found

    def total(self) -> Spectrum:
        """All features together."""
        axes = len(self.grid.sizes)
        return replace(self, power=self.power.reshape(*self.power.shape[:axes], -1).sum(-1))

    def bands(self, by: str = "block") -> Bands:
        """The power by frequency.

        Args:
            by: "block", for each k ≥ 1 all products of {1, cos k, sin k} over the coordinates, without the constant
                (for two the 3 × 3 block of Nanda et al. 2023; what mixes frequencies is in no band); "component", each
                combination (k₁, k₂); the name of a coordinate, all products with its frequency k ≥ 1.
        """
        axes, sizes = len(self.grid.sizes), self.power.shape
        read_choice(by, (*_GROUPS, *self.grid.axes), "fourier", "by")
        every = list(itertools.product(*(range(size) for size in sizes[:axes])))[1:]
        label = _GROUPS.get(by)
        if label is None:
            place = list(self.grid.axes).index(by)

            def label(at: tuple[int, ...]) -> Label | None:
                return at[place] or None

        return self._grouped(every, label)

    def _grouped(self, every: list[tuple[int, ...]], label: Callable[[tuple[int, ...]], Any]) -> Bands:
        axes = len(self.grid.sizes)
        named = [label(at) for at in every]
        labels = sorted({one for one in named if one is not None})
        if not labels:
            raise CircuitsError("fourier: a coordinate of one value has no frequency; give at least two rows")
        # What is in no band goes into a last one, which is dropped.
        place = {one: index for index, one in enumerate(labels)} | {None: len(labels)}
        index = torch.tensor([place[one] for one in named])
        flat = self.power.flatten(0, axes - 1)
        power = flat.new_zeros(len(labels) + 1, *flat.shape[1:])
        power.index_add_(0, index.to(flat.device), flat[1:])
        degrees = torch.zeros(len(labels) + 1, dtype=torch.long)
        degrees.index_add_(0, index, torch.tensor([self._degrees(at) for at in every]))
        return Bands(tuple(labels), power[:-1], tuple(degrees[:-1].tolist()), flat[0], flat[1:].sum(0))

    def _degrees(self, at: tuple[int, ...]) -> int:
        """How many basis functions a combination has: 2 of each coordinate, but 1 at 0 and half an even period."""
        return int(np.prod([1 if k in (0, n / 2) else 2 for k, n in zip(at, self.grid.sizes, strict=True)]))

    @property
    def frame(self) -> pd.DataFrame:
        """A row per combination of frequencies, all features together: one column for each coordinate's frequency,
        then `power`, `share` of the variance, and `norm`, the root of power · cells."""
        whole = self.total()
        at = np.indices(tuple(whole.power.shape)).reshape(len(self.grid.axes), -1)
        power = whole.power.flatten().cpu().numpy()
        columns: dict[str, Any] = {name: at[place] for place, name in enumerate(self.grid.axes)}
        return pd.DataFrame(
            {
                **columns,
                "power": power,
                "share": whole.share.flatten().cpu().numpy(),
                "norm": np.sqrt(power * self.grid.cells),
            }
        )

    def plot(self, keys: Iterable[Label] = (), *, by: str | None = None, title: str | None = None) -> Any:
        """A plotly figure of the share of each frequency: bars for one coordinate, a heatmap for two.

        Args:
            keys: frequencies to mark, such as those of `key_frequencies`; then bars for two coordinates too.
            by: bars by "block", "component" or a coordinate, see `bands`.
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
    """The spectrum of weights or activations x along one of their axes.

        spectrum(model.W_E[:113])                                     # embeddings of digits
        spectrum(model.W_out[0] @ model.W_U[:, :113], axis=1)         # the logits' axis of W_L
        spectrum(post[:, -1], Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=113))
        spectrum(model.W_pos[:49], {"row": 7, "column": 7})

    Args:
        grid: what the axis unfolds into: a `Grid`, the names and sizes of its coordinates, or sizes; None: the axis is
            one coordinate. The other axes are features, each with its own spectrum.
    """
    values = read_values(x).detach()
    found = read_grid(grid, values.shape[read_axis(axis, values)])
    power = transform(found.arrange(values, axis), range(len(found.sizes))).square() / found.cells
    for place, size in enumerate(found.sizes):
        shape = [size // 2 + 1 if at == place else length for at, length in enumerate(power.shape)]
        power = power.new_zeros(shape).index_add_(place, frequencies(size).to(power.device), power)
    return Spectrum(found, power)


def gini(values: Any) -> float:
    """How unequal some non-negative values are: 0 all equal, towards 1 all but one 0 (Hurley and Rickard 2009).

    Nanda et al. 2023 take it of the norms of Fourier components: `gini(transform(W_E[:p]).norm(dim=1))`.
    """
    ascending = read_values(x=values).flatten().abs().sort().values
    n = len(ascending)
    weights = n - torch.arange(1, n + 1, dtype=torch.float64, device=ascending.device) + 0.5
    total = ascending.sum()
    return float(1 - 2 * (ascending / total * weights).sum() / n) if bool(total > 0) else 0.0


def _share(power: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    # Of a feature that does not change over the grid (a dead neuron) there is only what rounding leaves.
    there = power > ROUNDING * (constant + variance)
    return torch.where(there, power / torch.where(variance > 0, variance, 1.0), 0.0)


def _block(at: tuple[int, ...]) -> Label | None:
    present = set(at) - {0}
    return present.pop() if len(present) == 1 else None


def _component(at: tuple[int, ...]) -> Label | None:
    return at[0] if len(at) == 1 else at


_GROUPS: dict[str, Callable[[tuple[int, ...]], Label | None]] = {"block": _block, "component": _component}
