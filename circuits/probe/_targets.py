"""Reads the targets of probes, numbers or classes per example or position, and shuffles them for controls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.prompts import Prompts
from circuits.tensors import as_dense_tensor
from circuits.validate import by_text, read_choice

REGRESSION, CLASSIFICATION = "regression", "classification"
KINDS = (REGRESSION, CLASSIFICATION)

#: Each class has a column in the fit; no vocabulary is larger.
MOST_CLASSES = 2**20


@dataclass(frozen=True)
class Target:
    """The target of a probe at each position of each example.

    Attributes:
        values: float64 [batch pos d], or classes [batch pos]; pos is 1 where it is the same at all positions.
        width: d, or the number of classes.
        reached: [batch pos], where an example has a value; None: everywhere.
        order: [batch], or [batch pos] where lengths differ, the example whose target each example gets; None unless
            targets are shuffled.
    """

    name: str
    kind: str
    values: Tensor
    width: int
    reached: Tensor | None = None
    order: Tensor | None = None

    @property
    def centre(self) -> Tensor:
        """Returns the median of each number over examples and positions [width]; 0 for each class."""
        if self.kind == CLASSIFICATION:
            return torch.zeros(self.width, dtype=torch.float64)
        entries = self.values.flatten(0, 1) if self.reached is None else self.values[self.reached]
        return entries.median(0).values

    def take(self, examples: Tensor, positions: slice, chosen: Tensor) -> Tensor:
        """Returns targets [entry d] or classes [entry] where `chosen` [example pos] is true, in row-major order."""
        sources = examples if self.order is None else self.order[examples]
        values = (
            self.values[sources]
            if sources.ndim == 1
            else self.values[sources, torch.arange(sources.shape[1])]
        )
        if values.shape[1] > 1:
            values = values[:, positions]
        return values.expand(*chosen.shape, *values.shape[2:])[chosen]

    def shuffled(self, groups: list[Tensor], seed: int) -> Target:
        """Returns a copy in which each example has the whole target of another one of its group, drawn at random.

        Where lengths differ, a group stands in a circle, in random order, and at each position an example has the
        target of the next one that is as long: every target is used once, and padding has none. The only one as long
        keeps its own.
        """
        generator = torch.Generator().manual_seed(seed)
        order = torch.arange(len(self.values))
        if self.reached is not None:
            order = order[:, None].repeat(1, self.reached.shape[1])
            for group in groups:
                circle = group[torch.randperm(len(group), generator=generator)]
                for position, reached in enumerate(self.reached[circle].T):
                    order[circle[reached], position] = circle[reached].roll(-1)
            return replace(self, order=order)
        for group in groups:
            order[group] = group[_derangement(len(group), generator)]
        return replace(self, order=order)


def read_targets(targets: Any, kind: Any, prompts: Prompts) -> tuple[Target, ...]:
    """Reads a tensor, named "target", or a dict of several; `kind` is one for all, or a dict by name."""
    if not isinstance(targets, Mapping):
        targets = {"target": targets}
    if not targets:
        raise CircuitsError("probe: no targets; give a tensor or a dict of names and tensors")
    kinds = kind if isinstance(kind, Mapping) else dict.fromkeys(targets, kind)
    unknown = [name for name in kinds if name not in targets]
    if unknown:
        raise CircuitsError(
            f"probe, kind: no target {unknown[0]!r}; targets are {', '.join(map(str, targets))}"
        )
    by_text(targets, "probe", "targets")
    return tuple(
        _read_target(str(name), values, kinds.get(name, REGRESSION), prompts)
        for name, values in targets.items()
    )


def _read_target(name: str, values: Any, kind: Any, prompts: Prompts) -> Target:
    """Returns a target once its values are checked against its kind and the prompts; those of padding become zero."""
    kind = read_choice(kind, KINDS, f"probe, target {name!r}", "kind")
    values = as_dense_tensor(_as_array(values), f"probe, target {name!r}")
    if not isinstance(values, Tensor) or values.is_complex():
        raise CircuitsError(
            f"probe, target {name!r}: expected a tensor of numbers, got {type(values).__name__}"
        )
    values = values.detach().cpu()
    batch, pos = prompts.shape[:2]
    shape = list(values.shape)
    fits = values.ndim in (1, 2, 3) and shape[0] == batch and (values.ndim == 1 or shape[1] in (1, pos))
    if not fits or not values.numel() or (kind == CLASSIFICATION and values.ndim == 3):
        vectors = "" if kind == CLASSIFICATION else ", [batch 1 d] or [batch pos d]"
        raise CircuitsError(
            f"probe, target {name!r}: {kind} targets are [batch], [batch pos]{vectors}; got {shape} for tokens "
            f"[{batch}, {pos}]"
        )
    if values.ndim == 1:
        values = values[:, None]
    reached = prompts.reached if values.shape[1] > 1 and prompts.padded else None
    if reached is not None:
        # Of padding there need be none.
        values = prompts.in_order(values)
        shown = reached[(...,) + (None,) * (values.ndim - 2)]
        values = torch.where(shown, values, torch.zeros_like(values))
    if kind == CLASSIFICATION:
        # Torch compares no unsigned numbers of more than 8 bits.
        classes = values if values.is_floating_point() else values.long()
        if values.is_floating_point() or bool((classes < 0).any()):
            raise CircuitsError(
                f"probe, target {name!r}: classes are whole numbers from 0, got {str(values.dtype)[6:]} from "
                f"{classes.min().item()}"
            )
        if (largest := int(classes.max())) >= MOST_CLASSES:
            raise CircuitsError(
                f"probe, target {name!r}: a class numbered {largest} stands for {largest + 1} classes; number those "
                "that there are: torch.unique(target, return_inverse=True)[1]"
            )
        return Target(name, kind, classes, largest + 1, reached)
    values = values.double()
    if not bool(values.isfinite().all()):
        raise CircuitsError(
            f"probe, target {name!r}: {int((~values.isfinite()).sum())} of {values.numel()} values are not finite"
        )
    values = values if values.ndim == 3 else values[..., None]
    return Target(name, kind, values, values.shape[2], reached)


def _as_array(values: Any) -> Any:
    """Returns a list or a column of a table as an array, anything else as it is."""
    if isinstance(values, Sequence) and not isinstance(values, str):
        values = list(values)  # a column of `datasets`, too
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of texts, or of unequal lengths
            made = torch.as_tensor(values)
            return torch.as_tensor(values, dtype=torch.float64) if made.is_floating_point() else made
    is_table = hasattr(values, "__array__") and not isinstance(values, np.ndarray | Tensor)
    return values.__array__() if is_table else values


def _derangement(size: int, generator: torch.Generator) -> Tensor:
    """Draws a permutation without fixed points, uniformly; for a single item, the identity."""
    rows = torch.arange(size)
    while True:
        order = torch.randperm(size, generator=generator)
        if size < 2 or not bool((order == rows).any()):
            return order
