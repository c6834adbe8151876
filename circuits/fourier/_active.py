"""Which frequencies an activation has more of than its own values give when the coordinates are relabelled."""

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
#: Features whose pairs of values are held at once.
FEATURES = 256


@dataclass(frozen=True)
class Active:
    """The shares of the frequencies along each coordinate, and the largest ones under relabelling.

    Attributes:
        share: coordinate -> [frequency feature], k = 1, 2, ...: of the feature's variance, what all products with cos k
            or sin k of this coordinate carry, whatever they are of the others.
        bound: [feature], the largest share of any frequency of any coordinate under any of the relabellings.
        together: the same of all features together, coordinate -> [frequency], and a number.
        together_bound: see `together`.
    """

    share: Mapping[str, Float[Tensor, "frequency feature"]]
    bound: Float[Tensor, " feature"]
    together: Mapping[str, Float[Tensor, " frequency"]]
    together_bound: float
    draws: int

    @property
    def each(self) -> Bool[Tensor, "frequency feature"]:
        """Which frequencies of a feature are active along some coordinate."""
        return _any([share > self.bound for share in self.share.values()])

    @property
    def counts(self) -> Int[Tensor, " feature"]:
        """How many frequencies of each feature are active."""
        return self.each.sum(0)

    @property
    def keys(self) -> tuple[int, ...]:
        """The frequencies that are active in all features together."""
        found = _any([share[:, None] > self.together_bound for share in self.together.values()])
        return tuple((found.flatten().nonzero().flatten() + 1).tolist())

    def plot(self) -> Any:
        """A plotly figure: the share of each frequency beside the bound, and how many are active in each feature."""
        from circuits.figures.spectra import active_figure

        return active_figure(self.together, self.together_bound, self.counts, self.draws)

    @property
    def statement(self) -> str:
        """The rule with its number, in one sentence."""
        return (
            f"active: a larger share of the variance than any frequency has under any of {self.draws} random "
            f"relabellings of the coordinates; by chance one of {self.draws + 1} has such a frequency"
        )


def active(x: Any, grid: Any, axis: int = 0, draws: int = DRAWS, seed: int = 0) -> Active:
    """The frequencies that activations over a grid owe to the order of its coordinates.

    A relabelling gives the values of a coordinate other names by a random permutation, coordinates of equal size the
    same ones. What depends on the coordinates in any way but their order is as likely before as after it, a sum of
    arbitrary functions of each as much as noise; so a feature without periodicity has an active frequency with
    probability 1 / (draws + 1) at most, all frequencies and coordinates taken together.

    Args:
        x: activations, whose `axis` unfolds into the grid; other axes are features, flattened into one.
        grid: as in `spectrum`, of coordinates of 3 values or more.
    """
    if not is_whole(draws, 1):
        raise CircuitsError(f"fourier.active: draws={draws!r}; give a whole number of at least 1")
    values = read_values(x).detach()
    found = read_grid(grid, values.shape[read_axis(axis, values)])
    if min(found.sizes) < 3:
        raise CircuitsError(
            f"fourier.active: needs coordinates of at least 3 values; got sides {list(found.sizes)}"
        )
    arranged = found.arrange(values, axis).reshape(*found.sizes, -1)
    flat = arranged.flatten(0, -2)
    constant, variance = flat.mean(0).square(), flat.var(0, correction=0)
    # Without its mean a feature that does not change leaves nothing but rounding.
    arranged = arranged - flat.mean(0)
    exchanged = [None, *(relabelling(found, seed, draw) for draw in range(draws))]
    parts = [_powers(part, exchanged) for part in arranged.split(FEATURES, -1)]
    # By draw and coordinate, [frequency feature]; draw 0 leaves the names as they are.
    powers = [[torch.cat(of, 1) for of in zip(*each, strict=True)] for each in zip(*parts, strict=True)]
    shares = [[_share(power, variance, constant) for power in each] for each in powers]
    whole = [[_share(power.sum(1), variance.sum(), constant.sum()) for power in each] for each in powers]
    return Active(
        dict(zip(found.axes, shares[0], strict=True)),
        torch.stack([torch.cat(each).amax(0) for each in shares[1:]]).amax(0),
        dict(zip(found.axes, whole[0], strict=True)),
        max(float(torch.cat(each).max()) for each in whole[1:]),
        int(draws),
    )


def relabelling(grid: Grid, seed: int, draw: int = 0) -> list[Tensor]:
    """New names of each coordinate's values, the same for coordinates of equal size."""
    stream = torch.Generator().manual_seed(int(seed) * 1_000_003 + draw)
    drawn: dict[int, Tensor] = {}
    for size in grid.sizes:
        if size not in drawn:
            drawn[size] = torch.randperm(size, generator=stream)
    return [drawn[size] for size in grid.sizes]


def _powers(arranged: Tensor, exchanged: list[list[Tensor] | None]) -> list[list[Tensor]]:
    """By draw and coordinate, the power of each frequency, [frequency feature].

    |Σ_x v_x e^(−2πikx/n)|² is a sum over pairs of v_x v_y cos(2πk(x − y)/n): products of pairs are made once, and a
    relabelling only says at which distance a pair lies.
    """
    axes = arranged.ndim - 1
    found: list[list[Tensor]] = [[] for _ in exchanged]
    for place in range(axes):
        size = arranged.shape[place]
        lines = arranged.movedim(place, 0).flatten(1, -2)  # [value others feature]
        products = torch.einsum("x o f, y o f -> x y f", lines, lines)
        first, second = torch.tril_indices(size, size, -1)
        pairs = 2 * products[first, second]
        alone = products.diagonal().sum(1)
        k = torch.arange(1, size // 2 + 1)
        distance = torch.arange(size)
        waves = ((k[:, None] * distance % size).double() * (2 * math.pi / size)).cos().to(pairs.device)
        # The highest frequency of an even period has one function, the others two.
        functions = torch.where(2 * k == size, 1.0, 2.0).double().to(pairs.device)
        waves *= functions[:, None] / (size * math.prod(arranged.shape[:-1]))
        for into, names in zip(found, exchanged, strict=True):
            mine = torch.arange(size) if names is None else names[place]
            at = (mine[first] - mine[second]) % size
            by_distance = pairs.new_zeros(size, pairs.shape[-1]).index_add_(0, at.to(pairs.device), pairs)
            by_distance[0] += alone
            into.append((waves @ by_distance).clamp(min=0))
    return found


def _share(power: Tensor, variance: Tensor, constant: Tensor) -> Tensor:
    return Bands(tuple(range(1, len(power) + 1)), power, (), constant, variance).share


def _any(found: list[Tensor]) -> Tensor:
    """Along any coordinate; the shorter ones have no high frequencies."""
    longest = max(map(len, found))
    padded = [torch.nn.functional.pad(one, (0, 0, 0, longest - len(one))) for one in found]
    return torch.stack(padded).any(0)
