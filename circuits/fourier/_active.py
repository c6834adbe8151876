"""Finds active frequencies: those whose share of variance no frequency has when coordinates are relabelled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._basis import read_axis, read_values
from circuits.fourier._grid import Grid, read_grid
from circuits.fourier._spectrum import Bands
from circuits.validate import is_whole

#: With 19 relabellings the chance of a false frequency is 1 / 20.
DRAWS = 19
#: The number of features whose products of pairs are in memory at once.
FEATURES = 256
#: Shares that differ by less are equal: a feature that is not 0 in one cell alone has the same share at all frequencies
#: in any order.
TIE = 1e-9


@dataclass(frozen=True)
class Active:
    """Shares of variance of the frequencies along each coordinate, and the largest shares under relabelling.

    Attributes:
        share: coordinate -> [frequency feature], k = 1, 2, ...: the share of the feature's variance in all products of
            cos k or sin k of this coordinate with any functions of the others.
        bound: [feature], the largest share of any frequency of any coordinate under any of the relabellings.
        together: coordinate -> [frequency], the share of the variance of all features together.
        together_bound: the bound on `together`, a number.
    """

    share: Mapping[str, Float[Tensor, "frequency feature"]]
    bound: Float[Tensor, " feature"]
    together: Mapping[str, Float[Tensor, " frequency"]]
    together_bound: float
    draws: int

    @property
    def each(self) -> Bool[Tensor, "frequency feature"]:
        """Marks the frequencies of each feature that are active along some coordinate."""
        return _any([_exceeds(share, self.bound) for share in self.share.values()])

    @property
    def counts(self) -> Int[Tensor, " feature"]:
        """Returns the number of active frequencies of each feature."""
        return self.each.sum(0)

    @property
    def keys(self) -> tuple[int, ...]:
        """Returns the frequencies that are active in all features together."""
        active_in_any = _any(
            [_exceeds(share[:, None], self.together_bound) for share in self.together.values()]
        )
        return tuple((active_in_any.flatten().nonzero().flatten() + 1).tolist())

    def plot(self) -> Any:
        """Returns a plotly figure of each frequency's share, with the bound, and of active frequencies per feature."""
        from circuits.figures.spectra import active_figure

        return active_figure(self.together, self.together_bound, self.counts, self.draws)

    @property
    def statement(self) -> str:
        """States the rule with its number, in one sentence."""
        return (
            f"active: a larger share of the variance than any frequency has under any of {self.draws} random "
            f"relabellings of the coordinates; by chance one of {self.draws + 1} has such a frequency"
        )


def active(x: Any, grid: Any, axis: int = 0, draws: int = DRAWS, seed: int = 0) -> Active:
    """Finds the frequencies that activations over a grid have because of the order of its coordinates.

    A relabelling permutes the values of a coordinate at random, with the same permutation for coordinates of equal
    size. Activations that depend on the coordinates in any way but their order (noise, or a sum of arbitrary functions
    of each) are as likely before as after it; so a feature without periodicity has an active frequency with
    probability 1 / (draws + 1) at most, all frequencies and coordinates taken together.

    Args:
        x: activations; their `axis` unfolds into the grid, and the other axes are features, flattened into one.
        grid: as in `spectrum`, with at least 3 values per coordinate.
    """
    if not is_whole(draws, 1):
        raise CircuitsError(f"fourier.active: draws={draws!r}; give a whole number of at least 1")
    values = read_values(x).detach()
    layout = read_grid(grid, values.shape[read_axis(axis, values)])
    if min(layout.sizes) < 3:
        raise CircuitsError(
            f"fourier.active: needs coordinates of at least 3 values; got sides {list(layout.sizes)}"
        )
    arranged = layout.arrange(values, axis).reshape(*layout.sizes, -1)
    flat = arranged.flatten(0, -2)
    constant, variance = flat.mean(0).square(), flat.var(0, correction=0)
    # The mean is taken off first, because for a constant feature only rounding is then left.
    arranged = arranged - flat.mean(0)
    relabellings = [None, *(relabelling(layout, seed, draw) for draw in range(draws))]
    power_chunks = [_powers(part, relabellings) for part in arranged.split(FEATURES, -1)]
    # Indexed by draw and coordinate, each [frequency feature]; draw 0 is the data as given.
    powers = [
        [torch.cat(chunks, 1) for chunks in zip(*each, strict=True)]
        for each in zip(*power_chunks, strict=True)
    ]
    shares = [[_share(power, variance, constant) for power in each] for each in powers]
    pooled_shares = [
        [_share(power.sum(1), variance.sum(), constant.sum()) for power in each] for each in powers
    ]
    return Active(
        dict(zip(layout.axes, shares[0], strict=True)),
        torch.stack([torch.cat(each).amax(0) for each in shares[1:]]).amax(0),
        dict(zip(layout.axes, pooled_shares[0], strict=True)),
        max(float(torch.cat(each).max()) for each in pooled_shares[1:]),
        int(draws),
    )


def relabelling(grid: Grid, seed: int, draw: int = 0) -> list[Tensor]:
    """Draws a permutation of each coordinate's values, the same for coordinates of equal size."""
    generator = torch.Generator().manual_seed(int(seed) * 1_000_003 + draw)
    permutations: dict[int, Tensor] = {}
    for size in grid.sizes:
        if size not in permutations:
            permutations[size] = torch.randperm(size, generator=generator)
    return [permutations[size] for size in grid.sizes]


def _powers(arranged: Tensor, relabellings: list[list[Tensor] | None]) -> list[list[Tensor]]:
    """Returns the power of each frequency [frequency feature] by draw and coordinate.

    |Σ_x v_x e^(−2πikx/n)|² is a sum over pairs of v_x v_y cos(2πk(x − y)/n). The products of pairs are computed once;
    a relabelling changes only the distance x − y of a pair.
    """
    axes = arranged.ndim - 1
    powers: list[list[Tensor]] = [[] for _ in relabellings]
    for axis_index in range(axes):
        size = arranged.shape[axis_index]
        rows = arranged.movedim(axis_index, 0).reshape(size, -1, arranged.shape[-1])  # [value others feature]
        products = torch.einsum("x o f, y o f -> x y f", rows, rows)
        first, second = torch.tril_indices(size, size, -1)
        pairs = 2 * products[first, second]
        squares = products.diagonal().sum(1)
        k = torch.arange(1, size // 2 + 1)
        distance = torch.arange(size)
        waves = ((k[:, None] * distance % size).double() * (2 * math.pi / size)).cos().to(pairs.device)
        # The highest frequency of an even period has one basis function, the others two.
        functions = torch.where(2 * k == size, 1.0, 2.0).double().to(pairs.device)
        waves *= functions[:, None] / (size * math.prod(arranged.shape[:-1]))
        for powers_of_draw, permutations in zip(powers, relabellings, strict=True):
            names_of_draw = torch.arange(size) if permutations is None else permutations[axis_index]
            shift = (names_of_draw[first] - names_of_draw[second]) % size
            by_distance = pairs.new_zeros(size, pairs.shape[-1]).index_add_(0, shift.to(pairs.device), pairs)
            by_distance[0] += squares
            powers_of_draw.append((waves @ by_distance).clamp(min=0))
    return powers


def _share(power: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    return Bands(tuple(range(1, len(power) + 1)), power, (), constant, variance).share


def _exceeds(share: Tensor, bound: Tensor | float) -> Tensor:
    return share > bound * (1 + TIE)


def _any(masks: list[Tensor]) -> Tensor:
    """Combines masks [frequency feature] of coordinates by "or", the shorter ones padded at the high frequencies."""
    longest = max(map(len, masks))
    padded = [torch.nn.functional.pad(mask, (0, 0, 0, longest - len(mask))) for mask in masks]
    return torch.stack(padded).any(0)
