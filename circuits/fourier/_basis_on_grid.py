"""Grids of coordinates, and the orthonormal real Fourier basis along their axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from torch import Tensor

from circuits.arguments import is_whole, parse_frequencies, parse_token_tensor, stringify_keys
from circuits.errors import CircuitsError, format_value
from circuits.fourier_waves import cos_sin, wave_products
from circuits.frozen_tensors_and_positions import parse_numbers, to_tensor_if_array


def basis(period: int) -> Float[Tensor, "period period"]:
    """Returns the basis functions const, cos 1, sin 1, cos 2, ... of x = 0..p-1 as rows, orthonormal, float64.

    cos k and sin k are √(2/p) cos(2πkx/p) and √(2/p) sin(2πkx/p), k = 1..(p-1)/2. An even period ends with the
    alternating cos(πx)/√p. This is the basis of Nanda et al. 2023 (arXiv:2301.05217).
    """
    if not is_whole(period, 1):
        raise CircuitsError(f"fourier: period={period!r}; give a whole number of at least 1")
    period = int(period)
    x = torch.arange(period)
    rows = [torch.ones(period, 1, dtype=torch.float64)]
    rows += [cos_sin(x, k, period) for k in range(1, period // 2 + 1)]
    return torch.cat(rows, 1).T / math.sqrt(period)


def frequencies(period: int) -> Int[Tensor, " period"]:
    """Returns the frequency of each row of the basis: 0, 1, 1, 2, 2, ..."""
    return (torch.arange(int(period)) + 1) // 2


def transform(x: ArrayLike, axes: int | Sequence[int] = 0) -> Float[Tensor, "*shape"]:
    """Returns the coefficients of x in the basis along each axis, in the shape of x, float64.

    The length of an axis is its period. For a p × p grid with axes (0, 1), entry (i, j) belongs to the product of row i
    of the basis in the first coordinate and row j in the second. The sum of squares is unchanged (Parseval), and x is
    `basis(period).T @ coefficients`.
    """
    values = parse_finite_float64(x)
    for axis in (axes,) if isinstance(axes, int) else axes:
        index = parse_axis(axis, values)
        functions = basis(values.shape[index]).to(values.device)
        values = torch.tensordot(functions, values, dims=([1], [index])).movedim(0, index)
    return values


def parse_finite_float64(x: Any) -> Tensor:
    """Returns the numbers as a float64 tensor on their device, with gradients; refuses values that are not finite."""
    values = parse_numbers(x, "fourier")
    if not values.ndim or not values.numel() or values.is_complex() or not bool(values.isfinite().all()):
        raise CircuitsError(
            f"fourier: a spectrum needs real, finite numbers along an axis; got {format_value(values.dtype)} "
            f"{list(values.shape)}, {int((~values.isfinite()).sum())} infinite or NaN"
        )
    return values.double()


def parse_axis(axis: Any, values: Tensor) -> int:
    """Returns the axis as an index from 0."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -values.ndim <= axis < values.ndim:
        raise CircuitsError(f"fourier: no axis {axis!r} in {list(values.shape)}")
    return axis % values.ndim


@dataclass(frozen=True)
class Grid:
    """A grid of coordinates, into which one axis of a tensor unfolds.

        Grid({"row": 7, "column": 7})                                  # positions of a matrix, row by row
        Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=113)           # examples, by two of their tokens

    Attributes:
        axes: the name and size of each coordinate; the last varies fastest.
        rows: the index along the tensor's axis of each cell, in the order of the cells; None: 0, 1, 2, ....
        length: the length that the tensor's axis must have; None: the number of cells.
    """

    axes: Mapping[str, int]
    rows: tuple[int, ...] | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        axes = dict(self.axes) if isinstance(self.axes, Mapping) else {}
        sizes = axes.values()
        if not axes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise CircuitsError(f'Grid: axes are names and sizes, {{"row": 7, "col": 7}}; got {self.axes!r}')
        stringify_keys(axes, "Grid", "coordinates")
        object.__setattr__(self, "axes", axes)

    @classmethod
    def of_inputs(
        cls, tokens: Tensor, coords: Mapping[str, int], values: int | Sequence[Sequence[int]]
    ) -> Grid:
        """Returns the grid of examples whose coordinates are the token ids at some positions.

        Args:
            tokens: [example pos].
            coords: name -> position.
            values: the period, for ids 0..period-1; or for each coordinate its ids in cyclic order. Examples with other
                ids are left out; every combination must occur once.
        """
        label = "Grid.of_inputs: tokens"
        tokens = parse_token_tensor(parse_numbers(tokens, label), label)
        named = stringify_keys(coords, "Grid", "coordinates") if isinstance(coords, Mapping) else {}
        given: Any = values
        # Of more ids than examples some would be missing.
        is_period = is_whole(given, 1) and given <= len(tokens)
        lists = [list(range(given))] * len(named) if is_period else [*map(_as_list, _as_list(given))]
        fits = [is_whole(each, -tokens.shape[1]) and each < tokens.shape[1] for each in named.values()]
        fits += [
            all(is_whole(each) and abs(each) < 2**63 for each in one) and 0 < len(one) == len({*one})
            for one in lists
        ]
        if not named or not all(fits) or len(lists) != len(named) or tokens.ndim > 2:
            raise CircuitsError(
                "Grid.of_inputs: coords name positions, as in {'a': 0, 'b': 1}; values are the period, or a list of "
                f"different ids for each; got {coords}, {format_value(values)} for tokens {list(tokens.shape)}"
            )
        index = torch.zeros(len(tokens), dtype=torch.long)
        on_grid = torch.ones(len(tokens), dtype=torch.bool)
        for position, ids in zip(named.values(), lists, strict=True):
            match = tokens[:, position].cpu()[:, None] == torch.tensor(ids)
            on_grid &= match.any(1)
            index = index * len(ids) + match.long().argmax(1)
        cells = math.prod(map(len, lists))
        examples = on_grid.nonzero().flatten()
        n_distinct = len(index[examples].unique())
        if len(examples) != cells or n_distinct != cells:
            raise CircuitsError(
                f"Grid.of_inputs: tokens must hold each of the {cells} combinations of {', '.join(named)} once; "
                f"{len(examples)} of {len(tokens)} examples are on the grid, {n_distinct} of them different"
            )
        order = examples[index[examples].argsort()]
        return cls(dict(zip(coords, map(len, lists), strict=True)), tuple(order.tolist()), len(tokens))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def cells(self) -> int:
        return math.prod(self.sizes)

    def arrange(self, x: ArrayLike, axis: int = 0) -> Tensor:
        """Unfolds the axis of the cells into the grid, [*sizes ...]; the other axes follow in their order."""
        x = torch.as_tensor(to_tensor_if_array(x, "Grid"))
        cells_first = x.movedim(parse_axis(axis, x), 0)
        length = self.cells if self.length is None else self.length
        if len(cells_first) != length:
            raise CircuitsError(
                f"Grid: axis {axis} of {list(x.shape)} has {len(cells_first)} entries, the grid "
                f"{' × '.join(map(str, self.sizes))} is of {length}"
            )
        if self.rows is not None:
            cells_first = cells_first[torch.tensor(self.rows, device=cells_first.device)]
        return cells_first.unflatten(0, self.sizes)

    def coordinates(self) -> Tensor:
        """Returns the coordinates of each cell, whole numbers [cells axes]."""
        return torch.stack(torch.meshgrid(*map(torch.arange, self.sizes), indexing="ij"), -1).flatten(0, -2)


def _as_list(given: Any) -> list[Any]:
    """Returns the entries of a sequence, array or tensor; none of anything else."""
    given = to_tensor_if_array(given, "Grid.of_inputs: values")
    given = given.tolist() if isinstance(given, Tensor) else given
    return list(given) if isinstance(given, Sequence) else []


def components(grid: Grid, keys: Sequence[int]) -> Float[Tensor, "cells function"]:
    """Returns an orthonormal basis F [cells function] of the functions on the grid at some frequencies.

    These are the products over the coordinates of {1, cos(w x), sin(w x)}, without the constant, w = 2πk/p (8 per key
    of two coordinates; the blocks of `Spectrum.bands`). `F @ (F.T @ x)` is the part of x [cells ...] (in the order of
    the cells) at these frequencies; `fourier.share(x, F)` is the same for x on any device, as F is on the CPU. All
    sides of the grid must have the same length, the period.
    """
    period = grid.sizes[0]
    if set(grid.sizes) != {period}:
        raise CircuitsError(f"fourier.components: needs a grid with equal sides; got {list(grid.sizes)}")
    chosen = parse_frequencies(keys, period, "fourier.components")
    functions = [wave_products(grid.coordinates(), key, period) for key in chosen]
    return torch.cat(functions, 1) / math.sqrt(grid.cells)


def parse_grid(grid: Any, default_length: int) -> Grid:
    """Reads a grid, its axes or its sizes; None is a grid of one coordinate."""
    if isinstance(grid, Grid):
        return grid
    if grid is None:
        return Grid({"x": default_length})
    if isinstance(grid, Sequence | np.ndarray | torch.Size) and not isinstance(grid, str):
        grid = {f"x{place}": int(size) for place, size in enumerate(grid)}
    return Grid(grid)
