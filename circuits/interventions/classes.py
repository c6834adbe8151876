"""Removes or keeps the part of an activation that depends on classes of the example, fitted on given examples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
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
from circuits.tensors import Snapshot
from circuits.variance import Contrasts

CALLER = "ablate.classes"
#: Rows of tokens are numbered without sorting if there are at most this many possible rows.
NUMBERS = 10**7


@dataclass(frozen=True)
class ClassFit:
    """Examples [example pos], each with its classes [example kind]."""

    examples: Snapshot
    classes: Snapshot

    @cached_property
    def contrasts(self) -> Contrasts:
        kinds = {f"kind {at}": column for at, column in enumerate(self.classes.tensor.cpu().T)}
        return Contrasts.of(kinds, len(self.examples.tensor), CALLER)

    @cached_property
    def starts(self) -> Tensor:
        """Offset of each kind's classes among those of all kinds, [kind]."""
        sizes = [len(basis) for basis in self.contrasts.bases]
        return torch.tensor([0, *sizes[:-1]]).cumsum(0)

    def at(self, tokens: Tensor) -> Tensor:
        """Returns the classes of a run's examples, numbered through all kinds, [kind batch]."""
        known = self.examples.tensor.to(tokens.device)
        if known.shape[1:] != tokens.shape[1:]:
            raise CircuitsError(
                f"{CALLER}: the examples with classes are {list(known.shape)}, the run's {list(tokens.shape)}"
            )
        numbers = _numbered(torch.cat([known, tokens.to(known.dtype)]))
        row_of_number = torch.full((int(numbers.max()) + 1,), -1, device=tokens.device)
        row_of_number[numbers[: len(known)]] = torch.arange(len(known), device=tokens.device)
        known_rows = row_of_number[numbers[len(known) :]]
        if bool((known_rows < 0).any()):
            missing = int((known_rows < 0).nonzero()[0])
            raise CircuitsError(
                f"{CALLER}: example {missing} is none of those that have classes, {tokens[missing].tolist()}"
            )
        return self.contrasts.classes[:, known_rows.cpu()] + self.starts[:, None]


@dataclass(frozen=True)
class Parts(Reduction):
    """The mean over the examples, followed by each class's deviation from it, [1 + class ...], float64.

    With several kinds of classes the deviations are fitted by least squares; each kind's have mean 0 over the examples.
    """

    labelled: ClassFit

    def piece(self, activation: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        activation = activation.double()
        # A masked score is minus infinity in every example, and no part of it depends on a class.
        activation = activation.masked_fill(activation.isneginf(), 0.0)
        index = self.labelled.at(prompts.tokens).to(activation.device)
        sums = activation.new_zeros(
            sum(len(basis) for basis in self.labelled.contrasts.bases), *activation.shape[1:]
        )
        for of_kind in index:
            sums.index_add_(0, of_kind, activation)
        return sums

    def finish(self, total: Tensor, prompts: Prompts, kind: SiteKind) -> Tensor:
        """Returns the mean over examples and what each class adds to it, from sums over the examples of the classes."""
        contrasts = self.labelled.contrasts
        sums = total.flatten(1).cpu()
        counts = [torch.bincount(kind).double()[:, None] for kind in contrasts.classes]
        by_kind = sums.split([len(basis) for basis in contrasts.bases])
        examples = len(prompts)
        mean = by_kind[0].sum(0) / examples
        deviations = torch.cat(
            [
                basis.T @ (part - count * mean)
                for basis, part, count in zip(contrasts.bases, by_kind, counts, strict=True)
            ]
        )
        solution = torch.cholesky_solve(deviations, contrasts.factor)
        tables = [
            basis @ solution[block] for basis, block in zip(contrasts.bases, contrasts.blocks, strict=True)
        ]
        tables = [
            table - (count * table).sum(0) / examples for table, count in zip(tables, counts, strict=True)
        ]
        return torch.cat([mean[None], *tables]).reshape(-1, *total.shape[1:]).to(total.device)


@dataclass(frozen=True)
class RemoveClasses(Replacement):
    """The activation minus the fitted deviations of its classes; with `keep`, the mean plus these deviations alone."""

    labelled: ClassFit
    keep: bool

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        examples = Prompts(self.labelled.examples.tensor)
        return {"parts": Reference(examples, write.hook, write.kind, Parts(self.labelled))}

    def prepare(self, run: RunContext) -> Tensor | None:
        """Returns the classes of the run's examples, [kind batch]."""
        tokens = run.tokens
        refuse_padded_run(run, CALLER)
        return None if tokens is None else run.once(id(self), lambda: self.labelled.at(tokens))

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        label = context.write.label
        if context.prepared is None:
            raise CircuitsError(
                f"{label}: call the whole model with a tensor of tokens, the classes are looked up by them"
            )
        parts = context.references["parts"].to(current.device)
        share = parts[1:][context.prepared.to(current.device)].sum(0)
        new = parts[:1] + share if self.keep else current.double() - share
        return torch.where(current.isneginf(), current, new.to(current.dtype))

    def describe(self) -> dict[str, Any]:
        return {
            "value": "classes",
            "keep": self.keep,
            "classes": self.labelled.classes.describe(),
            "examples": self.labelled.examples.describe(),
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
