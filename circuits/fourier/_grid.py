"""Grids of coordinates, which the examples of a batch or the positions of a sequence stand on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier._basis import read_axis
from circuits.harmonics import cos_sin, products
from circuits.validate import read_run_tokens


@dataclass(frozen=True)
class Grid:
    """A grid that one axis of a tensor unfolds into.

        Grid({"row": 7, "column": 7})                                  # positions of a matrix, row by row
        Grid.of_inputs(tokens, {"a": 0, "b": 1}, values=113)           # examples, by two of their tokens

    Attributes:
        axes: the name and size of each coordinate; the last varies fastest.
        rows: where along the tensor's axis each cell is found, in the order of the cells; None: in that order already.
        length: the tensor's axis must be this long; None: as long as there are cells.
    """

    axes: Mapping[str, int]
    rows: tuple[int, ...] | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        given = dict(self.axes) if isinstance(self.axes, Mapping) else {}
        sizes = given.values()
        if not given or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise CircuitsError(
                f'Grid: axes are names and sizes, such as {{"row": 7, "column": 7}}; got {self.axes!r}'
            )
        object.__setattr__(self, "axes", given)

    @classmethod
    def of_inputs(
        cls,
        tokens: Any,
        coords: Mapping[str, int],
        values: int | Sequence[Sequence[int]],
    ) -> Grid:
        """Examples by their coordinates: the token ids at some positions.

        Args:
            tokens: [example pos].
            coords: name -> position.
            values: the period, for ids 0..period-1; or for each coordinate its ids in the order in which they are a
                cycle. Examples with other ids are left out; every combination must be there once.
        """
        tokens = read_run_tokens(tokens, "Grid.of_inputs")
        if isinstance(values, int):
            values = [range(values)] * len(coords)
        lists = [list(map(int, each)) for each in values]
        outside = [at for at in coords.values() if not -tokens.shape[1] <= at < tokens.shape[1]]
        if len(lists) != len(coords) or outside or any(len(set(one)) < len(one) for one in lists):
            raise CircuitsError(
                f"Grid.of_inputs: coords name positions 0-{tokens.shape[1] - 1} of the tokens, with a list of "
                f"different ids for each; got {dict(coords)} and {len(lists)} lists"
            )
        index = torch.zeros(len(tokens), dtype=torch.long)
        there = torch.ones(len(tokens), dtype=torch.bool)
        for position, ids in zip(coords.values(), lists, strict=True):
            match = tokens[:, position].cpu()[:, None] == torch.tensor(ids)
            there &= match.any(1)
            index = index * len(ids) + match.long().argmax(1)
        cells = math.prod(map(len, lists))
        rows = there.nonzero().flatten()
        different = len(index[rows].unique())
        if len(rows) != cells or different != cells:
            raise CircuitsError(
                f"Grid.of_inputs: tokens must hold each of the {cells} combinations of {', '.join(coords)} once; "
                f"{len(rows)} of {len(tokens)} examples are on the grid, {different} of them different"
            )
        order = rows[index[rows].argsort()]
        return cls(dict(zip(coords, map(len, lists), strict=True)), tuple(order.tolist()), len(tokens))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def cells(self) -> int:
        return math.prod(self.sizes)

    def arrange(self, x: Any, axis: int = 0) -> Tensor:
        """[cells ...] -> [*sizes ...]: the axis of the cells, unfolded, comes first; the others follow in order."""
        x = torch.as_tensor(x)
        moved = x.movedim(read_axis(axis, x), 0)
        length = self.cells if self.length is None else self.length
        if len(moved) != length:
            raise CircuitsError(
                f"Grid: axis {axis} of {list(x.shape)} has {len(moved)} entries, the grid "
                f"{' × '.join(map(str, self.sizes))} is of {length}"
            )
        if self.rows is not None:
            moved = moved[torch.tensor(self.rows, device=moved.device)]
        return moved.unflatten(0, self.sizes)

    def coordinates(self) -> Tensor:
        """The coordinates of each cell, whole numbers [cells axes]."""
        return torch.stack(torch.meshgrid(*map(torch.arange, self.sizes), indexing="ij"), -1).flatten(0, -2)


def components(
    grid: Grid, keys: Sequence[int], along: Sequence[int] | None = None
) -> Float[Tensor, "cells function"]:
    """The functions of the grid that belong to some frequencies, orthonormal: `F.T @ F` is 1, F [cells function].

    `F @ (F.T @ x)` is the part of x [cells ...] (in the order of the cells) that they carry. All sides of the grid
    are the same period.

    Args:
        along: None: the products over the coordinates of {1, cos(w x), sin(w x)}, without the constant, w = 2πk/p (8
            per key of two coordinates; the blocks of `Spectrum.bands`). Whole numbers m, one of them ±1: only cos and
            sin of w(m₁x₁ + m₂x₂ + ...), as (1, 1) for a sum, (1, -1) for a difference.
    """
    period = grid.sizes[0]
    keys = list(dict.fromkeys(keys))
    if set(grid.sizes) != {period} or not keys or not all(1 <= key <= period // 2 for key in keys):
        raise CircuitsError(
            f"fourier.components: needs a grid with equal sides and keys from 1 to half a side; got sides "
            f"{list(grid.sizes)}, keys {keys}"
        )
    x = grid.coordinates()
    if along is None:
        found = [products(x, int(key), period) for key in keys]
    else:
        if len(along) != x.shape[1] or not {1, -1} & set(along):
            raise CircuitsError(
                f"fourier.components: along has a whole number for each of {x.shape[1]} coordinates, one of them 1 "
                f"or -1; got {tuple(along)}"
            )
        summed = (x * torch.tensor([int(m) for m in along])).sum(1)
        found = [cos_sin(summed, int(key), period) for key in keys]
    return torch.cat(found, 1) / math.sqrt(grid.cells)


def read_grid(grid: Any, length: int) -> Grid:
    """A grid, its axes, or its sizes; None: the axis itself."""
    if isinstance(grid, Grid):
        return grid
    if grid is None:
        return Grid({"x": length})
    if isinstance(grid, Sequence | np.ndarray | torch.Size) and not isinstance(grid, str):
        grid = {f"x{place}": int(size) for place, size in enumerate(grid)}
    return Grid(grid)
