"""Counts the frequencies that activations have because of the order of the digits, and not by chance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from circuits.fourier import Grid

#: The number of features whose products of pairs are in memory at once.
FEATURES = 256
#: Shares that differ by less are equal: a feature that is not 0 in one cell alone has the same share at all frequencies
#: in any order.
TIE = 1e-9
#: A power below this share of the mean square is a rounding error.
ROUNDING = 1e-20


def active(values: Tensor, grid: Grid, draws: int, seed: int) -> tuple[Tensor, int]:
    """Returns the number of active frequencies of each feature [feature], and of all features together.

    A frequency is active along a coordinate if its share of the variance, in all products with any functions of the
    other coordinates, exceeds that of every frequency under `draws` relabellings. A relabelling permutes the values of
    a coordinate, with the same permutation for coordinates of equal size. Activations that depend on the coordinates in
    any way but their order (noise, or a sum of arbitrary functions of each) are as likely before as after it; so a
    feature without periodicity has an active frequency with probability 1 / (draws + 1) at most.

    Args:
        values: [cell feature] over the complete grid.
    """
    import torch

    arranged = grid.arrange(values.double())
    flat = arranged.flatten(0, -2)
    mean, variance = flat.mean(0), flat.var(0, correction=0)
    orders = [[torch.arange(size) for size in grid.sizes]]
    orders += [relabelling(grid, seed, draw) for draw in range(draws)]
    # The mean is taken off first, because for a constant feature only rounding is then left.
    parts = [_powers(part, orders) for part in (arranged - mean).split(FEATURES, -1)]
    # By coordinate, [draw frequency feature]; draw 0 is the data as given. The last feature is all of them together.
    powers = [torch.cat(part, -1) for part in zip(*parts, strict=True)]
    powers = [torch.cat([power, power.sum(-1, keepdim=True)], -1) for power in powers]
    total, constant = (torch.cat([x, x.sum()[None]]) for x in (variance, mean.square()))
    shares = [
        torch.where(power > ROUNDING * (constant + total), power / torch.where(total > 0, total, 1.0), 0.0)
        for power in powers
    ]
    bound = torch.cat(shares, 1)[1:].amax((0, 1))
    # Of a shorter coordinate the high frequencies are none.
    padded = torch.nn.utils.rnn.pad_sequence([share[0] for share in shares])
    counts = (padded > bound * (1 + TIE)).any(1).sum(0)
    return counts[:-1], int(counts[-1])


def relabelling(grid: Grid, seed: int, draw: int = 0) -> list[Tensor]:
    """Draws a permutation of each coordinate's values, the same for coordinates of equal size."""
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + draw)
    drawn = {size: torch.randperm(size, generator=generator) for size in dict.fromkeys(grid.sizes)}
    return [drawn[size] for size in grid.sizes]


def _powers(arranged: Tensor, orders: list[list[Tensor]]) -> list[Tensor]:
    """Returns by coordinate the power of each frequency under each relabelling, [order frequency feature].

    |Σ_x v_x e^(−2πikx/n)|² is a sum over pairs of v_x v_y cos(2πk(x − y)/n). The products of pairs are computed once;
    a relabelling changes only the distance x − y of a pair.
    """
    import torch

    powers: list[Tensor] = []
    for axis, size in enumerate(arranged.shape[:-1]):
        rows = arranged.movedim(axis, 0).reshape(size, -1, arranged.shape[-1])  # [value others feature]
        pairs = torch.einsum("x o f, y o f -> x y f", rows, rows).flatten(0, 1)
        k, distance = torch.arange(1, size // 2 + 1), torch.arange(size)
        cosines = ((k[:, None] * distance % size).double() * (2 * math.pi / size)).cos()
        # The highest frequency of an even period has one basis function, the others two.
        functions = torch.where(2 * k == size, 1.0, 2.0).double()[:, None]
        cosines *= functions / (size * math.prod(arranged.shape[:-1]))
        by_order = []
        for order in orders:
            distances = (order[axis][:, None] - order[axis]) % size
            by_distance = pairs.new_zeros(size, pairs.shape[-1]).index_add_(0, distances.flatten(), pairs)
            by_order.append((cosines @ by_distance).clamp(min=0))
        powers.append(torch.stack(by_order))
    return powers
