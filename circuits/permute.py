"""Positional permutation: permutes the position embeddings while the tokens keep their positions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.arguments import is_whole, parse_seed
from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import to_tensor_if_array
from circuits.interventions.base import HookContext, Replacement
from circuits.interventions.clean_passes_and_edit_hooks import find_nontoken_argument
from circuits.interventions.places_and_edits import Edit, Place
from circuits.interventions.variant_grids_and_draws import Draws
from circuits.interventions.variant_grids_and_draws import draws as draw_variants
from circuits.model.sites import Site
from circuits.model.types import IndicesLike

__all__ = ["draws", "positions", "slices", "within"]
__dir__ = __all__.copy

CALLER = "permute.positions"


@dataclass(frozen=True)
class PermutedPositionTable(Replacement):
    """Permutes rows of the position table: by a random order of those in use, from a seed, or by a given order."""

    seed: int | None
    order: tuple[int, ...] | None

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns position embeddings with their rows permuted; refuses runs that read other rows than the first."""
        length = current.shape[1]
        order = self.order if self.order is not None else random_order(length, self.seed or 0)
        if max(order) >= length:
            raise CircuitsError(
                f"{context.write.label}: the permutation has {len(order)} rows, the run {length} positions; "
                f"give one of 0-{length - 1}"
            )
        other_rows = (
            "padding" if context.token_mask is not None else find_nontoken_argument(context.run.given)
        )
        if other_rows is None and bool((current != current[:1]).any()):
            other_rows = "examples that read different rows"
        if other_rows is not None:
            raise CircuitsError(
                f"{context.write.label}: with {other_rows} the model reads other rows of its position table than the "
                f"first {length}; run it without, on examples of one length"
            )
        rows = torch.tensor([*order, *range(len(order), length)], device=current.device)
        return current[:, rows]

    def describe(self) -> dict[str, Any]:
        given = {"seed": self.seed} if self.order is None else {"permutation": list(self.order)}
        return {"value": "permuted", **given}


def positions(permutation_or_seed: IndicesLike) -> Edit:
    """Permutes position embeddings: position i reads row perm[i] of the table; the input is unchanged.

    Args:
        permutation_or_seed: a permutation of 0..n-1, n at most the length of the run (later positions keep their rows),
            or a seed, from which one permutation of the rows in use is drawn, uniform among all of them (the identity
            included). Only these rows of the trained table are read. With a seed this is the positional permutation of
            Gopalani et al. 2024 (arXiv:2410.22244, section 3.2.1).

    Rotary models and models without a position table are refused, and so is a run that does not read the first rows
    of the table in order (padding, position_ids, a key-value cache).
    """
    given = permutation_or_seed
    if is_whole(given):
        return _position_edit(parse_seed(given, CALLER), None)
    given = to_tensor_if_array(given, CALLER)
    given = given.tolist() if isinstance(given, Tensor) else given
    order = tuple(given) if isinstance(given, Iterable) else ()
    if not order or not all(map(is_whole, order)) or sorted(order) != list(range(len(order))):
        raise CircuitsError(f"{CALLER}: {given!r} is neither a seed nor a permutation of 0..n-1")
    return _position_edit(None, map(int, order))


def draws(count: int, seed: int = 0) -> Draws:
    """Returns `count` random permutations as one variant of a sweep, which reports each draw, their mean and spread."""
    return draw_variants(positions, count, seed)


def slices(shape: Sequence[int], axis: int, seed: int = 0) -> Edit:
    """Permutes whole slices of a grid of positions: for a matrix its rows (axis 0) or its columns (axis 1).

    Args:
        shape: the shape of the grid, whose last axis varies fastest over positions; later positions keep their rows.
        axis: the axis along which slices are counted.
        seed: draws one permutation of the slices, uniform among all (the identity included).

    Where permuting the rows of the data leaves its distribution unchanged, and every position sees every other, this is
    equivalent to giving the model another example of the data: its expected error stays the same.
    """
    grid_positions, axis = _position_grid(shape, axis, "permute.slices")
    order = random_order(grid_positions.shape[axis], parse_seed(seed, "permute.slices"))
    return _position_edit(None, np.take(grid_positions, order, axis).flatten().tolist())


def within(shape: Sequence[int], axis: int, seed: int = 0) -> Edit:
    """Permutes positions within each slice of a grid: for a matrix within each row (axis 0) or column (axis 1).

    Args:
        shape: the shape of the grid, whose last axis varies fastest over positions.
        axis: the axis along which slices are counted.
        seed: draws a permutation for each slice.
    """
    caller = "permute.within"
    grid_positions, axis = _position_grid(shape, axis, caller)
    generator = torch.Generator().manual_seed(parse_seed(seed, caller))
    slices_first = np.moveaxis(grid_positions, axis, 0).copy()
    for index in range(len(slices_first)):
        order = torch.randperm(slices_first[index].size, generator=generator).numpy()
        slices_first[index] = slices_first[index].flatten()[order].reshape(slices_first[index].shape)
    return _position_edit(None, np.moveaxis(slices_first, 0, axis).flatten().tolist())


def _position_grid(shape: Any, axis: Any, caller: str) -> tuple[np.ndarray, int]:
    """Returns the positions of a grid, in its shape, and the axis."""
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if not sizes or not all(is_whole(size, 1) for size in sizes):
        raise CircuitsError(f"{caller}: shape is that of a grid of positions, such as (4, 4); got {shape!r}")
    if not is_whole(axis) or not 0 <= axis < len(sizes):
        raise CircuitsError(f"{caller}: axis={axis!r}; the grid has axes 0-{len(sizes) - 1}")
    return np.arange(math.prod(sizes)).reshape(sizes), int(axis)


def random_order(length: int, seed: int) -> tuple[int, ...]:
    """Draws a permutation of `length` rows, uniform among all, from its own generator."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randperm(length, generator=generator).tolist())


def _position_edit(seed: int | None, order: Iterable[int] | None) -> Edit:
    replacement = PermutedPositionTable(seed, None if order is None else tuple(order))
    return Edit(CALLER, (Place(Site("pos_embed")),), replacement)
