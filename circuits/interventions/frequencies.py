"""Removes or keeps Fourier components of an activation over a grid of inputs, fitted once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.harmonics import products
from circuits.interventions.base import (
    ActivationEdit,
    HookContext,
    Replacement,
    RunContext,
    refuse_padded_run,
)
from circuits.interventions.reference_runs import Reduction, Reference
from circuits.model.prompts import Prompts
from circuits.model.sites import SiteKind
from circuits.tensors import Positions, Snapshot

_CALLER = "ablate.frequencies"
#: Choices for the components of a frequency.
DIRECTIONS = ("all", "sum")


@dataclass(frozen=True)
class FourierComponents:
    """Fourier functions of the coordinates at some frequencies, orthonormal on the complete grid.

    Attributes:
        coords: the token positions whose ids, 0..period-1, are the coordinates x_1..x_m of an example.
        keys: frequencies k, 1 <= k <= period/2.
        directions: "all": for each k the products over coordinates of {1, cos(w x), sin(w x)}, w = 2πk/period, but for
            the constant (8 for two coordinates); "sum": cos and sin of w(x_1 + ... + x_m).
    """

    coords: Positions
    period: int
    keys: tuple[int, ...]
    directions: str

    def at(self, tokens: Tensor) -> Tensor:
        """Returns the functions at the tokens' coordinates, [batch function], float64, scaled to mean square 1 over the
        grid.
        """
        x = tokens[:, list(self.coords)].cpu().long()
        x = x.sum(1, keepdim=True) if self.directions == "sum" else x
        return torch.cat([products(x, key, self.period) for key in self.keys], 1)

    def places(self, tokens: Tensor) -> Tensor:
        """Returns the index of each example on the grid [batch], the last coordinate varying fastest."""
        sizes = [self.period**power for power in reversed(range(len(self.coords)))]
        return (tokens[:, list(self.coords)].long() * torch.tensor(sizes, device=tokens.device)).sum(1)


@dataclass(frozen=True)
class Coefficients(Reduction):
    """The mean of activation × function over the complete grid, for the constant and each component, [function ...]."""

    waves: FourierComponents

    def piece(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        functions = _with_constant(self.waves.at(prompts.tokens)).to(activation.device)
        # A masked score is minus infinity in every example, and so has no Fourier component.
        activation = activation.double().masked_fill(activation.isneginf(), 0.0)
        return (functions.T @ activation.flatten(1)).reshape(-1, *activation.shape[1:])

    def finish(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        return total / len(prompts)


@dataclass(frozen=True)
class RemoveFrequencies(Replacement):
    """The activation minus its projection on some components; with `keep`, the constant plus that projection alone."""

    waves: FourierComponents
    keep: bool
    grid: Snapshot

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        grid = Prompts(self.grid.tensor)
        return {"coefficients": Reference(grid, write.hook, write.kind, Coefficients(self.waves))}

    def prepare(self, run: RunContext) -> Tensor | None:
        """Returns the components at the coordinates of the run's examples, [batch function]."""
        tokens = run.tokens
        refuse_padded_run(run, _CALLER)
        return None if tokens is None else run.once(id(self), lambda: self._waves_at(tokens))

    def _waves_at(self, tokens: Tensor) -> Tensor:
        check_coordinates(tokens, self.waves, _CALLER)
        grid = self.grid.tensor.to(tokens.device)
        if grid.shape[1] == tokens.shape[1]:
            rows = grid[self.waves.places(grid).argsort()][self.waves.places(tokens)]
            other = (rows != tokens).any(1)
            if bool(other.any()):
                raise CircuitsError(
                    f"{_CALLER}: example {int(other.nonzero()[0])} is not on the grid: with its coordinates the grid "
                    f"has other tokens at positions that are no coordinates"
                )
        return self.waves.at(tokens)

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns the activation without its part at the frequencies, or with that part alone."""
        label = context.write.label
        if context.prepared is None:
            raise CircuitsError(
                f"{label}: call the whole model with a tensor of tokens, the coordinates are read from them"
            )
        coefficients = context.references["coefficients"].to(current.device)
        if coefficients.shape[1:] != current.shape[1:]:
            raise CircuitsError(
                f"{label}: on the grid {context.write.hook} is [example, {', '.join(map(str, coefficients.shape[1:]))}]"
                f", in the run {list(current.shape)}"
            )
        functions = context.prepared.to(current.device)
        share = (functions @ coefficients[1:].flatten(1)).reshape(current.shape)
        new = coefficients[:1] + share if self.keep else current.double() - share
        return torch.where(current.isneginf(), current, new.to(current.dtype))

    def describe(self) -> dict[str, Any]:
        return {
            "value": "frequencies",
            "keys": list(self.waves.keys),
            "period": self.waves.period,
            "coords": list(self.waves.coords),
            "directions": self.waves.directions,
            "keep": self.keep,
            "grid": self.grid.describe(),
        }


def check_coordinates(tokens: Tensor, waves: FourierComponents, label: str) -> None:
    """Refuses tokens that are no coordinates of the period, or positions that the run does not have."""
    length = tokens.shape[1]
    wrong = [position for position in waves.coords if not -length <= position < length]
    if wrong:
        raise CircuitsError(f"{label}: no position {wrong[0]}: the run has positions 0-{length - 1}")
    values = tokens[:, list(waves.coords)]
    if tokens.ndim != 2 or tokens.is_complex() or bool((values != values.round()).any()):
        raise CircuitsError(
            f"{label}: coordinates are token ids [batch pos], the inputs are {list(tokens.shape)}"
        )
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= waves.period:
        raise CircuitsError(
            f"{label}: coordinates {low}-{high} at positions {list(waves.coords)}; they "
            f"must lie in 0-{waves.period - 1} for period {waves.period}"
        )


def check_grid(grid: Tensor, waves: FourierComponents, label: str) -> None:
    """Refuses a grid that does not hold every combination of coordinates exactly once, as orthonormality needs."""
    check_coordinates(grid, waves, f"{label}, grid")
    size, different = waves.period ** len(waves.coords), len(grid[:, list(waves.coords)].unique(dim=0))
    if len(grid) != size or different != size:
        raise CircuitsError(
            f"{label}: grid must hold each of the {waves.period}^{len(waves.coords)} = {size} combinations of "
            f"coordinates once; it has {len(grid)} examples, {different} of them different"
        )


def _with_constant(functions: Tensor) -> Tensor:
    return torch.cat([torch.ones(len(functions), 1, dtype=functions.dtype), functions], 1)
