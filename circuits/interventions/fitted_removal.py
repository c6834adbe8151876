"""Removes from activations what functions of the example explain, fitted once on given examples.

`ablate.frequencies` takes Fourier components of the coordinates, `ablate.classes` one function for each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.fourier_waves import wave_products
from circuits.frozen_tensors_and_positions import Positions, Snapshot
from circuits.interventions.base import ActivationEdit, HookContext, PassRequest, Reduction, Replacement
from circuits.model.prompts_with_mask import Prompts
from circuits.model.sites import SiteKind

#: Choices for the components of a frequency.
DIRECTIONS = ("all", "sum")
#: Directions in the span of the functions are dropped below this share of the largest eigenvalue of their products.
SINGULAR = 1e-9


@dataclass(frozen=True)
class FunctionValuesOnExamples:
    """Functions of an example, by their values on the examples [example pos] on which activations are fitted.

    Attributes:
        caller: the function that the user called, for errors.
        examples: all different.
        values: [example function], float64, each with mean 0 over the examples.
        described: what `describe` says of them.
    """

    caller: str
    examples: Snapshot
    values: Snapshot
    described: Mapping[str, Any] = field(compare=False)

    @cached_property
    def _row_of(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): number for number, row in enumerate(self.examples.tensor.tolist())}

    @cached_property
    def gram_pinv(self) -> Tensor:
        """What takes the means of function × activation to least squares' coefficients."""
        values = self.values.tensor
        return torch.linalg.pinv(values.T @ values / len(values), hermitian=True, rtol=SINGULAR)

    def values_at(self, tokens: Tensor) -> Tensor:
        """Returns the functions at a run's examples, [batch function]; refuses examples that were not fitted."""
        rows = [self._row_of.get(tuple(row), -1) for row in tokens.tolist()]
        if -1 in rows:
            number = rows.index(-1)
            raise CircuitsError(
                f"{self.caller}: example {number}, {tokens[number].tolist()}, is none of those that were fitted, "
                f"{list(self.examples.shape)}"
            )
        return self.values.tensor[rows]


@dataclass(frozen=True)
class FunctionCoefficients(Reduction):
    """The mean of an activation over the examples, and each function's coefficient, [1 + function ...], float64."""

    functions: FunctionValuesOnExamples

    def reduce_chunk(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        functions = self.functions.values_at(prompts.tokens).to(activation.device)
        functions = torch.cat([functions.new_ones(len(functions), 1), functions], 1)
        # A masked score is minus infinity in every example, and no part of it depends on the example.
        activation = activation.double().masked_fill(activation.isneginf(), 0.0)
        return (functions.T @ activation.flatten(1)).reshape(-1, *activation.shape[1:])

    def from_sum(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        means = total.flatten(1) / len(prompts)
        coefficients = (self.functions.gram_pinv @ means[1:].cpu()).to(total.device)
        return torch.cat([means[:1], coefficients]).reshape(-1, *total.shape[1:])


@dataclass(frozen=True)
class RemoveFitted(Replacement):
    """The activation minus its fitted part; with `keep`, the mean plus that part alone."""

    functions: FunctionValuesOnExamples
    keep: bool

    def clean_passes(self, write: ActivationEdit) -> dict[str, PassRequest]:
        examples = Prompts(self.functions.examples.tensor)
        return {"fit": PassRequest(examples, write.hook, write.kind, FunctionCoefficients(self.functions))}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns the activation without its fitted part, or with that part alone."""
        tokens = context.run.tokens
        if tokens is None:
            raise CircuitsError(
                f"{context.write.label}: call the whole model with a tensor of tokens, which tell its examples"
            )
        if context.token_mask is not None:
            raise CircuitsError(f"{self.functions.caller}: the run has padding, and the fit had none")
        functions = context.run.compute_once(id(self), lambda: self.functions.values_at(tokens))
        fit = context.references["fit"].to(current.device)
        share = (functions.to(current.device) @ fit[1:].flatten(1)).reshape(current.shape)
        new = fit[:1] + share if self.keep else current.double() - share
        return torch.where(current.isneginf(), current, new.to(current.dtype))

    def describe(self) -> dict[str, Any]:
        return {**self.functions.described, "keep": self.keep}


def fourier_functions(
    grid: Snapshot, coords: Positions, period: int, keys: tuple[int, ...], directions: str, caller: str
) -> FunctionValuesOnExamples:
    """Returns Fourier functions of the coordinates of a grid, the ids at the positions `coords`; refuses one that does
    not hold every combination of them exactly once, as orthonormality needs.
    """
    tokens, size = grid.tensor, period ** len(coords)
    if outside := [position for position in coords if not -tokens.shape[1] <= position < tokens.shape[1]]:
        raise CircuitsError(f"{caller}: no position {outside[0]}: the grid has 0-{tokens.shape[1] - 1}")
    x = tokens[:, list(coords)]
    in_range = int(x.min()) >= 0 and int(x.max()) < period
    different = len(x.unique(dim=0))
    if not in_range or not len(x) == different == size:
        raise CircuitsError(
            f"{caller}: grid must hold each of the {period}^{len(coords)} = {size} combinations of coordinates "
            f"0-{period - 1} at positions {list(coords)} once; it has {len(x)} examples, {different} of them different"
        )
    described = {"keys": list(keys), "period": period, "coords": list(coords), "directions": directions}
    x = x.cpu().long()
    x = x.sum(1, keepdim=True) if directions == "sum" else x
    values = Snapshot(torch.cat([wave_products(x, key, period) for key in keys], 1))
    return FunctionValuesOnExamples(
        caller, grid, values, {"value": "frequencies", **described, "grid": grid.describe()}
    )


def class_functions(examples: Snapshot, classes: Tensor, caller: str) -> FunctionValuesOnExamples:
    """Returns a function for each class of some examples, [example], or of each kind of classes, [example kind].

    Raises `CircuitsError` for examples of which two are equal, and for anything but a whole number for each of them.
    """
    kinds = classes[:, None] if classes.ndim == 1 else classes
    count = len(examples.tensor)
    if kinds.ndim != 2 or len(kinds) != count or kinds.is_floating_point() or not kinds.shape[1]:
        raise CircuitsError(
            f"{caller}: classes are whole numbers [example] or [example kind] of {count} examples; got "
            f"{str(classes.dtype)[6:]} {list(classes.shape)}"
        )
    if len(examples.tensor.unique(dim=0)) != count:
        raise CircuitsError(f"{caller}: the examples that have classes must be different from each other")
    numbers = (kind.cpu().unique(return_inverse=True)[1] for kind in kinds.T)
    values = torch.cat([torch.nn.functional.one_hot(kind).double() for kind in numbers], 1)
    described = {"classes": Snapshot(kinds.long()).describe(), "examples": examples.describe()}
    return FunctionValuesOnExamples(
        caller, examples, Snapshot(values - values.mean(0)), {"value": "classes", **described}
    )
