"""Replacements for activations. Each is a frozen value that holds no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, HookContext, Replacement
from circuits.interventions.reference_runs import MeanOver, Reference
from circuits.model.generation import at
from circuits.model.padding import refuse_padding
from circuits.model.sites import KINDS
from circuits.model.surface import Surface
from circuits.tensors import Positions, Snapshot, as_dense_tensor

# The direction of every patch, as descriptions give it.
DIRECTION = "source -> run"


@dataclass(frozen=True)
class Zero(Replacement):
    while_generating = True

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        if context.write.kind.name == "scores":
            # A zero in the place of a masked score would let a query see its future.
            return torch.where(
                visible(current, context.write.masked_score), torch.zeros_like(current), current
            )
        return torch.zeros_like(current)

    def describe(self) -> dict[str, Any]:
        return {"value": "zero"}


@dataclass(frozen=True)
class Mean(Replacement):
    """The mean of the same activation over a reference batch; per position unless `over` is "batch,pos"."""

    while_generating = True

    tokens: Snapshot
    over: str = "batch"

    def check(self, surface: Surface, label: str) -> None:
        tokens = self.tokens.tensor
        # Means per position need equal lengths only; a mean over positions must see no padding at all.
        used = torch.ones_like(tokens, dtype=torch.bool) if self.over == "batch,pos" else None
        refuse_padding(
            surface, tokens, used, f"{label}, reference", "give examples of one length, without it"
        )

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        pooled = write.kind.query_axis if self.over == "batch,pos" else None
        return {"mean": Reference(self.tokens, write.hook, MeanOver(pooled))}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        mean = context.reference("mean", current)
        return _in_place(mean, current, context, "reference", pooled=self.over == "batch,pos")

    def describe(self) -> dict[str, Any]:
        return {"value": "mean", "over": self.over, "reference": self.tokens.describe()}


@dataclass(frozen=True)
class Resample(Replacement):
    """The activation of another example: row i gets row d(i) of the source, d a derangement of the whole batch."""

    while_generating = True

    tokens: Snapshot
    seed: int

    def check(self, surface: Surface, label: str) -> None:
        refuse_padding(surface, self.tokens.tensor, None, f"{label}, source", "give examples of one length")

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        return {"source": Reference(self.tokens, write.hook)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = _in_place(context.reference("source", current), current, context, "source")
        order = derangement(source.shape[0], self.seed).to(source.device)
        return context.per_example(source[order], current.shape[0], "the source")

    def describe(self) -> dict[str, Any]:
        return {"value": "resample", "seed": self.seed, "source": self.tokens.describe()}


@dataclass(frozen=True)
class FromTokens(Replacement):
    """The activation of another run, given by its tokens. A source of one example serves every row."""

    while_generating = True
    direction = DIRECTION

    tokens: Snapshot

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        return {"source": Reference(self.tokens, write.hook)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        return _source_rows(context.reference("source", current), current, context)

    def describe(self) -> dict[str, Any]:
        return {"value": "source", "direction": self.direction, "source": self.tokens.describe()}


@dataclass(frozen=True)
class FromTensors(Replacement):
    """Activations given as tensors, by full hook name."""

    while_generating = True
    direction = DIRECTION

    activations: tuple[tuple[str, Snapshot], ...]

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = dict(self.activations).get(context.write.hook)
        if source is None:
            hooks = ", ".join(hook for hook, _ in self.activations)
            raise CircuitsError(
                f"{context.write.label}: the source has no {context.write.hook}; it has {hooks}"
            )
        return _source_rows(_like(source.tensor, current), current, context)

    def describe(self) -> dict[str, Any]:
        source = {hook: tensor.describe() for hook, tensor in self.activations}
        return {"value": "stored", "direction": self.direction, "source": source}


@dataclass(frozen=True)
class Computed(Replacement):
    """The result of a function of the activation."""

    while_generating = True

    function: Callable[[Tensor], Tensor]

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        # A copy, so that a function that works in place does not reach the entries that are to stay.
        new = as_dense_tensor(self.function(current.clone()), f"{context.write.label}: the function")
        if not isinstance(new, Tensor) or new.shape != current.shape or new.is_complex():
            kind = "complex " if isinstance(new, Tensor) and new.is_complex() else ""
            got = f"{kind}{list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise CircuitsError(
                f"{context.write.label}: the function must return a tensor {list(current.shape)}, got {got}"
            )
        return _like(new, current)

    def describe(self) -> dict[str, Any]:
        return {"value": "function", "function": getattr(self.function, "__qualname__", repr(self.function))}


@dataclass(frozen=True)
class Uniform(Replacement):
    """Equal attention to every key that the query may see, or to those of `keys` that it may see."""

    while_generating = True

    keys: Positions | None = None

    def reads(self, write: ActivationEdit) -> dict[str, str]:
        return {"scores": KINDS["scores"].hook.format(write.layer)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        label = context.write.label
        scores = context.reads.pop("scores", None)
        if scores is None:
            raise CircuitsError(f"{label}: no attention scores were seen, so the visible keys are unknown")
        may_see = visible(scores, context.write.masked_score)
        chosen = may_see
        if self.keys is not None:
            window = context.window
            # The keys of a call end where its queries do; a sliding cache has dropped the first of them.
            end = window.start + current.shape[-2] if window.open else current.shape[-1]
            of_keys = replace(window, start=end - current.shape[-1], whole=True)
            keys = of_keys.selected(self.keys, current.shape[-1], f"{label}, keys {list(self.keys)}")
            chosen = may_see & keys.to(current.device)
            fully_masked = (
                context.selected & may_see.any(-1, keepdim=True) & ~chosen.any(-1, keepdim=True)
            ).any(-1)
            if bool(fully_masked.any()):
                query = int(fully_masked.any(0).any(0).nonzero()[0])
                raise CircuitsError(
                    f"{label}: query {query} sees none of the keys {list(self.keys)}; "
                    "name the queries to edit with queries="
                )
        count = chosen.sum(-1, keepdim=True)
        # A query that sees no key at all (left padding) keeps the zero pattern that the model gives it.
        return chosen.to(current.dtype) / count.clamp(min=1).to(current.dtype)

    def describe(self) -> dict[str, Any]:
        return {"value": "uniform", "keys": None if self.keys is None else list(self.keys)}


def visible(scores: Tensor, mask_value: float | None) -> Tensor:
    """Tells which attention scores are not masked, from the scores themselves.

    Masked scores are minus infinity, the model's own finite mask value where it has one, and anything so low that
    only a mask can have put it there.
    """
    lowest = torch.finfo(scores.dtype).min / 2
    seen = scores > lowest
    return seen if mask_value is None else seen & (scores != mask_value)


def derangement(size: int, seed: int) -> Tensor:
    """Draws a permutation of `size` rows without a fixed point, uniform among all of them, from its own generator."""
    if size < 2:
        raise CircuitsError(f"a resample needs a batch of at least 2 examples, got {size}")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(size)
    while True:
        order = torch.randperm(size, generator=generator)
        if not bool((order == rows).any()):
            return order


def _like(tensor: Tensor, current: Tensor) -> Tensor:
    return tensor.to(device=current.device, dtype=current.dtype)


def _same_shape(
    source: Tensor, current: Tensor, write: ActivationEdit, what: str, pooled: bool = False
) -> None:
    """Refuses shapes that differ beyond the batch; a mean pooled over positions has extent 1 there and fits any
    length.
    """
    have, want = list(source.shape[1:]), list(current.shape[1:])
    if pooled:
        have[write.kind.query_axis - 1] = want[write.kind.query_axis - 1]
    if have != want:
        raise CircuitsError(
            f"{write.label}: at {write.hook} the {what} is {list(source.shape)}, "
            f"the run {list(current.shape)}"
        )


def _in_place(
    source: Tensor, current: Tensor, context: HookContext, what: str, pooled: bool = False
) -> Tensor:
    """Returns the part of a source, or of a reference, at the positions of the run; refuses other shapes."""
    write, window = context.write, context.window
    if window.open and source.ndim == current.ndim:
        axis, masked = write.kind.query_axis, 0.0
        if not pooled:
            beyond = context.selected.narrow(axis, 0, context.selected.shape[axis]).any(
                [other for other in range(current.ndim) if other != axis]
            )
            late = beyond.expand(current.shape[axis])[max(0, source.shape[axis] - window.start) :]
            if bool(late.any()):
                position = max(window.start, source.shape[axis]) + int(late.nonzero()[0])
                raise CircuitsError(
                    f"{write.label}: no position {position} in the {what}, which has {source.shape[axis]}; name those "
                    'to edit (positions="prompt")'
                    + (', or give over="batch,pos"' if what == "reference" else "")
                )
            source = at(source, axis, window.start, current.shape[axis], 0.0)
        if "key" in write.kind.axes:
            if write.kind.name == "scores":
                masked = -torch.inf if write.masked_score is None else write.masked_score
            first = window.start + current.shape[axis] - current.shape[-1]
            source = at(source, write.kind.axes.index("key"), first, current.shape[-1], masked)
    _same_shape(source, current, write, what, pooled)
    return source


def _source_rows(source: Tensor, current: Tensor, context: HookContext) -> Tensor:
    source = _in_place(source, current, context, "source")
    if source.shape[0] == 1:
        return source
    return context.per_example(source, current.shape[0], f"the source {list(source.shape)}")
