"""Power of Fourier components: spectra, which frequencies are key, and what follows which frequency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from circuits.arguments import parse_choice
from circuits.errors import CircuitsError
from circuits.figures.panel_grid import Figure, draw_panels
from circuits.figures.panel_kinds import heatmap
from circuits.figures.panel_kinds import spectrum as bars_of_spectrum
from circuits.fourier._basis_on_grid import (
    Grid,
    frequencies,
    parse_axis,
    parse_finite_float64,
    parse_grid,
    transform,
)
from circuits.table_printing import short_table_text

#: A power below this share of the mean square is a rounding error.
ROUNDING = 1e-20


@dataclass(frozen=True)
class Bands:
    """A spectrum summed by frequency.

    Attributes:
        labels: frequencies k.
        power: [band *features], the variance that each band carries.
        degrees: the number of basis functions in each band.
        constant: [*features], the squared mean over the grid.
        variance: [*features], the variance over the grid.
    """

    labels: tuple[int, ...]
    power: Float[Tensor, " band *features"]
    degrees: tuple[int, ...]
    constant: Float[Tensor, "*features"]
    variance: Float[Tensor, "*features"]

    @property
    def share(self) -> Float[Tensor, " band *features"]:
        """Returns each band's share of each feature's variance; 0 where there is none."""
        return _share_of_variance(self.power, self.variance, self.constant)

    def total(self) -> Bands:
        """Returns the bands of all features together."""
        power = self.power.reshape(len(self.labels), -1).sum(1)
        return replace(self, power=power, constant=self.constant.sum(), variance=self.variance.sum())

    def plot(self, keys: Iterable[int] = (), *, title: str | None = None) -> Figure:
        """Returns a plotly figure with a bar for each frequency's share; `keys` (key frequencies) are marked."""
        return _draw_bars(self.total(), [keys] if isinstance(keys, int) else list(keys), "frequency", title)


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
        return short_table_text(self.frame, [*self.grid.axes, "share", "norm"])

    @property
    def variance(self) -> Tensor:
        """Returns the variance over the grid, [*features]."""
        flat = self.power.flatten(0, len(self.grid.sizes) - 1)
        return flat[1:].sum(0)

    @property
    def share(self) -> Tensor:
        """Returns each entry's share of each feature's variance, shaped as `power`; that of the constant is 0."""
        constant = self.power[(0,) * len(self.grid.sizes)]
        shares = _share_of_variance(self.power, self.variance, constant).clone()
        shares[(0,) * len(self.grid.sizes)] = 0
        return shares

    def total(self) -> Spectrum:
        """Returns the spectrum of all features together."""
        axes = len(self.grid.sizes)
        return replace(self, power=self.power.reshape(*self.power.shape[:axes], -1).sum(-1))

    def bands(self) -> Bands:
        """Sums the power by frequency: for each k ≥ 1 all products of {1, cos k, sin k} over the coordinates, without
        the constant (for two the 3 × 3 block of Nanda et al. 2023). Products of different frequencies are in no band.
        """
        sizes = self.grid.sizes
        if max(sizes) < 2:
            raise CircuitsError("fourier: a coordinate of one value has no frequency; give at least two rows")
        labels = tuple(range(1, max(sizes) // 2 + 1))
        combinations = list(itertools.product(*(range(size // 2 + 1) for size in sizes)))
        # The constant and products of different frequencies are summed into a first band, which is dropped.
        index = torch.tensor([max(at) if len({*at} - {0}) == 1 else 0 for at in combinations])
        flat = self.power.flatten(0, len(sizes) - 1)
        power = flat.new_zeros(len(labels) + 1, *flat.shape[1:]).index_add_(0, index.to(flat.device), flat)
        # A combination has 2 basis functions per coordinate, but 1 at 0 and at half an even period.
        functions = [
            math.prod(1 if k in (0, n / 2) else 2 for k, n in zip(at, sizes, strict=True))
            for at in combinations
        ]
        degrees = index.bincount(torch.tensor(functions))[1:].int().tolist()
        return Bands(labels, power[1:], tuple(degrees), flat[0], flat[1:].sum(0))

    @property
    def frame(self) -> pd.DataFrame:
        """Returns a row per combination of frequencies, all features together.

        The columns are each coordinate's frequency, then `power`, `share` of the variance, and `norm`, the root of
        power · cells.
        """
        total = self.total()
        k = np.indices(tuple(total.power.shape)).reshape(len(self.grid.axes), -1)
        power, share = (x.flatten().cpu().numpy() for x in (total.power, total.share))
        columns = dict(zip(self.grid.axes, k, strict=True))
        return pd.DataFrame(columns).assign(power=power, share=share, norm=np.sqrt(power * self.grid.cells))

    def plot(self, keys: Iterable[int] = (), *, title: str | None = None) -> Figure:
        """Returns a plotly figure of the share of each frequency: a heatmap for two coordinates, else bars by block.

        Args:
            keys: frequencies to mark, such as those of `key_frequencies`; two coordinates then get bars, too.
        """
        keys = [keys] if isinstance(keys, int) else list(keys)
        if not keys and len(self.grid.axes) == 2:
            down, across = (f"frequency in {name} (cycles per {n})" for name, n in self.grid.axes.items())
            shares, unit = 100 * self.total().share.cpu().numpy(), "share of variance (%)"
            row = max(12, 250 // len(shares))  # no lower than the title of its axis is long
            panel = heatmap(shares, unit=unit, down=down, across=across, numbers=False, row=row)
            subtitle = "Products of Fourier components of two coordinates; all features together."
            return draw_panels([panel], title or "Spectrum", subtitle)
        sizes = {*self.grid.sizes}
        unit = f"frequency (cycles per {sizes.pop()})" if len(sizes) == 1 else "frequency"
        return _draw_bars(self.bands().total(), keys, unit, title)


def _draw_bars(total: Bands, keys: Sequence[int], unit: str, title: str | None) -> Figure:
    if unknown := [key for key in keys if key not in total.labels]:
        raise CircuitsError(
            f"plots.spectrum: {unknown[0]!r} is no frequency here; they go from {total.labels[0]} to {total.labels[-1]}"
        )
    panel = bars_of_spectrum(total.labels, (100 * total.share.cpu()).tolist(), keys, x=unit, height=290)
    return draw_panels([panel], title or "Spectrum", "All features together; the constant has no share.")


def spectrum(
    x: ArrayLike, grid: Grid | Mapping[str, int] | Sequence[int] | None = None, axis: int = 0
) -> Spectrum:
    """Computes the spectrum of weights or activations x along one of their axes.

        spectrum(model.W_E[:113])                                     # embeddings of digits
        spectrum(model.W_out[0] @ model.W_U[:, :113], axis=1)         # the logits' axis of W_L
        spectrum(post[:, -1], Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=113))
        spectrum(model.W_pos[:49], {"row": 7, "column": 7})

    Args:
        grid: what the axis unfolds into: a `Grid`, the names and sizes of its coordinates, or sizes; None: the axis is
            one coordinate. The other axes are features, each with its own spectrum.
    """
    values = parse_finite_float64(x).detach()
    layout = parse_grid(grid, values.shape[parse_axis(axis, values)])
    power = transform(layout.arrange(values, axis), range(len(layout.sizes))).square() / layout.cells
    for index, size in enumerate(layout.sizes):
        shape = [size // 2 + 1 if other == index else length for other, length in enumerate(power.shape)]
        power = power.new_zeros(shape).index_add_(index, frequencies(size).to(power.device), power)
    return Spectrum(layout, power)


def gini(values: ArrayLike) -> float:
    """Returns the Gini coefficient of absolute values: 0 if all are equal, near 1 if one dominates.

    The formula is that of Hurley and Rickard 2009. Nanda et al. 2023 apply it to the norms of Fourier components:
    `gini(transform(W_E[:p]).norm(dim=1))`.
    """
    ascending = parse_finite_float64(x=values).flatten().abs().sort().values
    n = len(ascending)
    weights = n - torch.arange(1, n + 1, dtype=torch.float64, device=ascending.device) + 0.5
    total = ascending.sum()
    return float(1 - 2 * (ascending / total * weights).sum() / n) if bool(total > 0) else 0.0


def _share_of_variance(power: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    # A feature that is constant over the grid (a dead neuron) has nothing but rounding errors as power.
    above_rounding = power > ROUNDING * (constant + variance)
    return torch.where(above_rounding, power / torch.where(variance > 0, variance, 1.0), 0.0)


def _above_noise(bands: Bands, level: float | int) -> Tensor:
    # The noise level is that of the median frequency; a power of ν basis functions of it is χ² of ν degrees.
    power = bands.total().power.cpu()
    degrees = torch.tensor(bands.degrees, dtype=torch.float64)
    noise = (power / _median_of_chi_squared(degrees)).median()
    tail = torch.special.gammaincc(degrees / 2, power / (2 * noise.clamp(min=1e-300)))
    return tail * len(power) <= level


def _near_largest(bands: Bands, least_share: float | int) -> Tensor:
    norms = bands.total().power.cpu().sqrt()
    return norms > least_share * norms.max()


def _above_mean(bands: Bands, deviations: float | int) -> Tensor:
    total = bands.total()
    # A wave has a coefficient in each of its basis functions, so its power is divided by their number.
    power = total.power / torch.tensor(total.degrees, device=total.power.device)
    sizes = torch.cat([total.constant[None], power]).cpu().sqrt()
    return (sizes > sizes.mean() + deviations * sizes.std(correction=0))[1:]


def _largest_in_some_feature(bands: Bands, least_share: float | int) -> Tensor:
    best = bands.share.reshape(len(bands.labels), -1).cpu().max(0)
    preferred = torch.zeros(len(bands.labels), dtype=torch.bool)
    preferred[best.indices[(best.values > 0) & (best.values >= least_share)]] = True
    return preferred


class _KeyFrequencyRule(NamedTuple):
    """A rule for key frequencies: its usual number, what marks the key bands, bool [band], and a sentence."""

    number: float
    marks: Callable[[Bands, float | int], Tensor]
    says: str


RULES = {
    "noise": _KeyFrequencyRule(
        0.05,
        _above_noise,
        "key: more power than the strongest of as many frequencies of white noise at the level of the median one "
        "would have with probability {:g} (χ², Bonferroni)",
    ),
    "of-largest": _KeyFrequencyRule(0.25, _near_largest, "key: a norm above {:g} of the largest"),
    "above-mean": _KeyFrequencyRule(
        1.0,
        _above_mean,
        "key: an amplitude above the mean over frequencies, with 0, by {:g} standard deviations",
    ),
    "preferred": _KeyFrequencyRule(
        0.0,
        _largest_in_some_feature,
        "key: the first frequency of at least one neuron, with at least {:g} of its variance",
    ),
}


@dataclass(frozen=True)
class KeyFrequencies:
    """The frequencies selected by a rule, and the rule in words."""

    keys: tuple[int, ...]
    rule: str

    def __iter__(self) -> Any:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def key_frequencies(
    spectrum: Spectrum, rule: str = "noise", number: float | int | None = None
) -> KeyFrequencies:
    """Selects the key frequencies of a spectrum, over all its features together, under a stated rule.

    Args:
        rule: "noise": more power than the strongest frequency would have in white noise, but for a chance of `number`
            (0.05), at the noise level of the median frequency. The χ² of it, at `number` divided by the number of
            frequencies (Bonferroni), is that of one feature, or of copies of one; where features differ, or half of the
            frequencies are signal, the rule selects too few rather than too many. But the median of few frequencies
            tells the noise level badly (docs/circuits/fourier.md). It tests whether a frequency is present, however
            small its share, not whether the model needs it.
            "of-largest": a norm above this share (1/4) of the largest: the rule of TransformerLens' grokking demo for
            W_E, which takes the norms of cos and sin separately; here a norm is over both.
            "above-mean": an amplitude |Σ x exp(−2πikj/p)| above the mean over all frequencies, 0 included, by this many
            standard deviations (1; n in the denominator): Syrkis & Søgaard 2024 (MIIII) use 1 in their code for W_E;
            their text says 2 for active frequencies.
            "preferred": the first frequency of some neuron, with at least this share (0) of its variance: with 0 the
            rule of Nanda et al.'s released code, but for the highest frequency, which that leaves out.
        number: another number for the rule, from 0.
    """
    made = RULES[parse_choice(rule, RULES, "fourier.key_frequencies", "rule")]
    number = made.number if number is None else number
    if isinstance(number, bool) or not 0 <= number < 1e9:
        raise CircuitsError(f"fourier.key_frequencies: number={number!r}; give a number from 0")
    bands = _bands_of_spectrum(spectrum, "fourier.key_frequencies")
    chosen = made.marks(bands, number) & (bands.total().share > 0).cpu()
    keys = tuple(label for label, key in zip(bands.labels, chosen.tolist(), strict=True) if key)
    return KeyFrequencies(keys, made.says.format(number))


def _bands_of_spectrum(spectrum: Any, caller: str) -> Bands:
    if not isinstance(spectrum, Spectrum):
        raise CircuitsError(f"{caller}: give a spectrum, fourier.spectrum(x); got {type(spectrum).__name__}")
    return spectrum.bands()


def _median_of_chi_squared(degrees: Tensor) -> Tensor:
    """Returns the median of χ² with these degrees of freedom, by bisection to float64's precision."""
    low, high = torch.zeros_like(degrees), degrees + 10
    for _ in range(80):
        middle = (low + high) / 2
        below = torch.special.gammainc(degrees / 2, middle / 2) < 0.5
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


#: The threshold in the code of Nanda et al. 2023.
THRESHOLD = 0.85


@dataclass(frozen=True, repr=False)
class Clusters:
    """Neurons, each with the frequency that explains most of its variance.

    Attributes:
        labels: the frequencies.
        best: the index in `labels` of the frequency that explains most, -1 for a neuron that does not vary.
        share: the share of the neuron's variance that this frequency explains.
        threshold: a neuron with a share up to this is in no cluster.
    """

    labels: tuple[int, ...]
    best: Int[Tensor, " neuron"]
    share: Float[Tensor, " neuron"]
    threshold: float

    def __repr__(self) -> str:
        return f"Clusters({self.sizes} of {len(self.best)} neurons, threshold {self.threshold:g})"

    @property
    def assigned(self) -> Int[Tensor, " neuron"]:
        """Returns the index in `labels` of each neuron's frequency, -1 for a neuron in no cluster."""
        return torch.where(self.share > self.threshold, self.best, -1)

    @property
    def sizes(self) -> dict[int, int]:
        """Returns the number of neurons of each frequency that has any."""
        counts = torch.bincount(self.assigned[self.assigned >= 0], minlength=len(self.labels)).tolist()
        return {label: count for label, count in zip(self.labels, counts, strict=True) if count}

    def neurons(self, label: int) -> Tensor:
        """Returns the neurons of one frequency, as `ablate.neurons` takes them."""
        if label not in self.labels:
            raise CircuitsError(f"fourier: no frequency {label!r} in these clusters; got {self.labels}")
        return (self.assigned == self.labels.index(label)).nonzero().flatten()

    @property
    def frame(self) -> pd.DataFrame:
        """Returns a row per neuron: `neuron`, its first `frequency` (None if it does not vary), `share`, `assigned`."""
        first = [None if at < 0 else self.labels[at] for at in self.best.tolist()]
        frame = pd.DataFrame({"neuron": range(len(first)), "frequency": pd.Series(first, dtype=object)})
        return frame.assign(share=self.share.tolist(), assigned=(self.assigned >= 0).tolist())


def clusters(spectrum: Spectrum, threshold: float | int = THRESHOLD) -> Clusters:
    """Clusters neurons by the frequency that explains most of their variance over the grid.

    Args:
        spectrum: that of activations with one feature axis, the neurons.
        threshold: a share of its variance that a neuron's frequency exceeds; 0.85 is of Nanda et al. 2023 (code),
            whose search leaves out the highest frequency. A tie goes to the lower frequency.
    """
    bands = _bands_of_spectrum(spectrum, "fourier.clusters")
    if bands.power.ndim != 2:
        shape = list(bands.power.shape[1:])
        raise CircuitsError(f"fourier.clusters: needs one axis of neurons and those of the grid; got {shape}")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise CircuitsError(f"fourier.clusters: threshold={threshold!r}; give a share from 0 to 1")
    best = bands.share.cpu().max(0)
    of_neuron = torch.where(best.values > 0, best.indices, -1)
    return Clusters(bands.labels, of_neuron, best.values, float(threshold))
