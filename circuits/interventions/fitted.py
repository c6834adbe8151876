"""Removes or keeps the part of an activation that functions of the example explain, fitted once on given examples.

`ablate.frequencies` takes Fourier components of the coordinates, `ablate.classes` one function for each class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.harmonics import products
from circuits.interventions.base import ActivationEdit, HookContext, Replacement, RunContext
from circuits.interventions.clean_passes import Reduction, Reference
from circuits.model.prompts import Prompts
from circuits.model.sites import SiteKind
from circuits.tensors import Positions, Snapshot
from circuits.variance import Contrasts

#: Choices for the components of a frequency.
DIRECTIONS = ("all", "sum")
#: Rows of tokens are numbered without sorting if there are at most this many possible rows.
NUMBERS = 10**7


@dataclass(frozen=True)
class Design(ABC):
    """Functions of an example, and the examples [example pos] on which activations are fitted with them."""

    caller: ClassVar[str]

    examples: Snapshot

    @abstractmethod
    def functions(self, tokens: Tensor) -> Tensor:
        """Returns the functions at a run's examples, [batch function], float64; refuses examples that were not
        fitted.
        """

    @abstractmethod
    def solve(self, means: Tensor) -> Tensor:
        """Returns the coefficients of the functions from the means of function × deviation, [function feature]."""

    @abstractmethod
    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Fit(Reduction):
    """The mean of an activation over the examples, and each function's coefficient, [1 + function ...], float64."""

    design: Design

    def piece(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        functions = self.design.functions(prompts.tokens).to(activation.device)
        functions = torch.cat([functions.new_ones(len(functions), 1), functions], 1)
        # A masked score is minus infinity in every example, and no part of it depends on the example.
        activation = activation.double().masked_fill(activation.isneginf(), 0.0)
        return (functions.T @ activation.flatten(1)).reshape(-1, *activation.shape[1:])

    def finish(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        means = total.flatten(1) / len(prompts)
        coefficients = self.design.solve(means.cpu()).to(total.device)
        return torch.cat([means[:1], coefficients]).reshape(-1, *total.shape[1:])


@dataclass(frozen=True)
class RemoveFitted(Replacement):
    """The activation minus its fitted part; with `keep`, the mean plus that part alone."""

    design: Design
    keep: bool

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        examples = Prompts(self.design.examples.tensor)
        return {"fit": Reference(examples, write.hook, write.kind, Fit(self.design))}

    def prepare(self, run: RunContext) -> Tensor | None:
        """Returns the functions at the run's examples, [batch function]."""
        tokens = run.tokens
        if run.mask is not None:
            raise CircuitsError(
                f"{self.design.caller}: the run has padding, the examples it was fitted on have none"
            )
        return None if tokens is None else run.once(id(self), lambda: self.design.functions(tokens))

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns the activation without its fitted part, or with that part alone."""
        label, fit = context.write.label, context.references["fit"].to(current.device)
        if context.prepared is None:
            raise CircuitsError(
                f"{label}: call the whole model with a tensor of tokens, which tell its examples"
            )
        if fit.shape[1:] != current.shape[1:]:
            raise CircuitsError(
                f"{label}: fitted on {context.write.hook} [example, {', '.join(map(str, fit.shape[1:]))}], in the run "
                f"it is {list(current.shape)}"
            )
        share = (context.prepared.to(current.device) @ fit[1:].flatten(1)).reshape(current.shape)
        new = fit[:1] + share if self.keep else current.double() - share
        return torch.where(current.isneginf(), current, new.to(current.dtype))

    def describe(self) -> dict[str, Any]:
        return {**self.design.describe(), "keep": self.keep}


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
class FourierGrid(Design):
    """Fourier components on a complete grid, which holds every combination of coordinates once."""

    caller = "ablate.frequencies"

    components: FourierComponents

    def __post_init__(self) -> None:
        """Refuses a grid that does not hold every combination exactly once, as orthonormality needs."""
        grid, period, coords = self.examples.tensor, self.components.period, list(self.components.coords)
        self._check_coordinates(grid, f"{self.caller}, grid")
        size, different = period ** len(coords), len(grid[:, coords].unique(dim=0))
        if len(grid) != size or different != size:
            raise CircuitsError(
                f"{self.caller}: grid must hold each of the {period}^{len(coords)} = {size} combinations of "
                f"coordinates once; it has {len(grid)} examples, {different} of them different"
            )

    def functions(self, tokens: Tensor) -> Tensor:
        self._check_coordinates(tokens, self.caller)
        grid, places = self.examples.tensor.to(tokens.device), self.components.places
        if grid.shape[1] == tokens.shape[1]:
            other = (grid[places(grid).argsort()][places(tokens)] != tokens).any(1)
            if bool(other.any()):
                raise CircuitsError(
                    f"{self.caller}: example {int(other.nonzero()[0])} is not on the grid: with its coordinates the "
                    "grid has other tokens at positions that are no coordinates"
                )
        return self.components.at(tokens)

    def solve(self, means: Tensor) -> Tensor:
        return means[1:]  # orthonormal functions of mean 0

    def describe(self) -> dict[str, Any]:
        components = self.components
        return {
            "value": "frequencies",
            "keys": list(components.keys),
            "period": components.period,
            "coords": list(components.coords),
            "directions": components.directions,
            "grid": self.examples.describe(),
        }

    def _check_coordinates(self, tokens: Tensor, label: str) -> None:
        """Refuses tokens that are no coordinates of the period, or positions that the run does not have."""
        period, coords, length = self.components.period, list(self.components.coords), tokens.shape[1]
        if wrong := [position for position in coords if not -length <= position < length]:
            raise CircuitsError(f"{label}: no position {wrong[0]}: the run has positions 0-{length - 1}")
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.is_complex():
            raise CircuitsError(
                f"{label}: coordinates are token ids [batch pos], the inputs are {list(tokens.shape)}"
            )
        low, high = int(tokens[:, coords].min()), int(tokens[:, coords].max())
        if low < 0 or high >= period:
            raise CircuitsError(
                f"{label}: coordinates {low}-{high} at positions {coords}; they must lie in 0-{period - 1} for "
                f"period {period}"
            )


@dataclass(frozen=True)
class ClassFit(Design):
    """Examples, all different, and their classes [example kind]: one function for each class of each kind."""

    caller = "ablate.classes"

    classes: Snapshot

    @cached_property
    def contrasts(self) -> Contrasts:
        """The kinds of classes; refuses those that are not independent."""
        kinds = {f"kind {at}": column for at, column in enumerate(self.classes.tensor.cpu().T)}
        return Contrasts.of(kinds, len(self.examples.tensor), self.caller)

    def functions(self, tokens: Tensor) -> Tensor:
        """Returns 1 for the classes of each of a run's examples, one of each kind, else 0."""
        known = self.examples.tensor.to(tokens.device)
        if known.shape[1:] != tokens.shape[1:]:
            raise CircuitsError(
                f"{self.caller}: the examples with classes are {list(known.shape)}, the run's {list(tokens.shape)}"
            )
        numbers = _numbered(torch.cat([known, tokens.to(known.dtype)]))
        row_of_number = torch.full((int(numbers.max()) + 1,), -1, device=tokens.device)
        row_of_number[numbers[: len(known)]] = torch.arange(len(known), device=tokens.device)
        rows = row_of_number[numbers[len(known) :]]
        if bool((rows < 0).any()):
            missing = int((rows < 0).nonzero()[0])
            raise CircuitsError(
                f"{self.caller}: example {missing} is none of those that have classes, {tokens[missing].tolist()}"
            )
        return torch.cat(self._one_hot(rows.cpu()), 1)

    def _one_hot(self, rows: Tensor) -> list[Tensor]:
        """Returns by kind the classes of some examples, [example class], float64."""
        contrasts = self.contrasts
        return [
            torch.nn.functional.one_hot(kind[rows], len(basis)).double()
            for kind, basis in zip(contrasts.classes, contrasts.bases, strict=True)
        ]

    def solve(self, means: Tensor) -> Tensor:
        """Returns what each class adds to the mean; several kinds are fitted by least squares, each with mean 0."""
        contrasts, examples = self.contrasts, len(self.examples.tensor)
        shares = [one.mean(0)[:, None] for one in self._one_hot(torch.arange(examples))]
        by_kind = means[1:].split([len(basis) for basis in contrasts.bases])
        deviations = [
            basis.T @ (mean - share * means[0])
            for basis, mean, share in zip(contrasts.bases, by_kind, shares, strict=True)
        ]
        solution = torch.cholesky_solve(examples * torch.cat(deviations), contrasts.factor)
        tables = [
            basis @ solution[block] for basis, block in zip(contrasts.bases, contrasts.blocks, strict=True)
        ]
        return torch.cat(
            [table - (share * table).sum(0) for table, share in zip(tables, shares, strict=True)]
        )

    def describe(self) -> dict[str, Any]:
        return {
            "value": "classes",
            "classes": self.classes.describe(),
            "examples": self.examples.describe(),
        }


def _numbered(rows: Tensor) -> Tensor:
    """Numbers the rows [row ...], equal rows alike."""
    flat = rows.flatten(1)
    if not flat.is_floating_point():
        sizes = flat.max(0).values - flat.min(0).values + 1
        if float(sizes.double().prod()) < NUMBERS:
            # Token ids as digits of one number: nothing needs to be sorted.
            strides = torch.cat([sizes.new_ones(1), sizes.cumprod(0)[:-1]])
            return ((flat - flat.min(0).values) * strides).sum(1)
    return flat.unique(dim=0, return_inverse=True)[1]
