"""Replacements for activations. Each is a frozen value that holds no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, HookContext, Replacement
from circuits.interventions.reference_runs import MeanOver, Reference
from circuits.model.inputs import Given, with_model
from circuits.model.padding import refuse_padding
from circuits.model.prompts import Prompts, own_positions, taken
from circuits.model.sites import KINDS
from circuits.model.surface import Surface
from circuits.tensors import (
    Positions,
    Snapshot,
    as_dense_tensor,
    columns_of,
    describe_positions,
    select_positions,
)

# The direction of every patch, as descriptions give it.
DIRECTION = "source -> run"


@dataclass(frozen=True)
class Zero(Replacement):
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
class _FromPrompts(Replacement):
    """A replacement that is taken from a pass on other inputs."""

    given: Given

    #: What the inputs are called in messages.
    role: ClassVar[str] = "source"

    @property
    def prompts(self) -> Prompts:
        assert isinstance(self.given, Prompts)  # texts have become tokens when the edit was planned
        return self.given

    def on(self, surface: Surface) -> Replacement:
        return replace(self, given=with_model(self.given, surface, self.role))


@dataclass(frozen=True)
class Mean(_FromPrompts):
    """The mean of the same activation over a reference batch; per position unless `over` is "batch,pos"."""

    role = "reference"

    over: str = "batch"

    def check(self, surface: Surface, label: str) -> None:
        prompts = self.prompts
        # Means per position need equal lengths only; a mean over positions must see no padding at all.
        used = torch.ones(prompts.shape[:2], dtype=torch.bool) if self.over == "batch,pos" else None
        refuse_padding(surface, prompts, used, f"{label}, reference")

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        return {
            "mean": Reference(self.prompts, write.hook, write.kind, MeanOver(pooled=self.over == "batch,pos"))
        }

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        mean = context.reference("mean", current)
        write, pooled, prompts = context.write, self.over == "batch,pos", self.prompts
        if not pooled and (prompts.padded or context.mask is not None):
            return self._by_position(mean, current, context)
        _same_shape(mean, current, write, "reference", pooled=pooled)
        return mean

    def _by_position(self, mean: Tensor, current: Tensor, context: HookContext) -> Tensor:
        """Returns the mean at each row's own positions."""
        kind, label = context.write.kind, context.write.label
        real = _real(context, current)
        lengths, known = real.sum(1), self.prompts.lengths
        if int(lengths.max()) > int(known.max()):
            raise CircuitsError(
                f"{label}: the reference has prompts of up to {int(known.max())} tokens, the run one of "
                f"{int(lengths.max())}; there is no mean at its last positions"
            )
        if "key" in kind.axes and len({*lengths.tolist(), *known.tolist()}) > 1 and not context.causal:
            raise CircuitsError(
                f"{label}: queries of prompts of unequal length see different keys; give prompts of one length"
            )
        return _placed(mean, own_positions(real).clamp(min=0), current, real, context)

    def describe(self) -> dict[str, Any]:
        return {"value": "mean", "over": self.over, "reference": self.given.describe()}


@dataclass(frozen=True)
class Resample(_FromPrompts):
    """The activation of another example: row i gets row d(i) of the source, d a derangement of the whole batch."""

    seed: int = 0

    def check(self, surface: Surface, label: str) -> None:
        refuse_padding(surface, self.prompts, None, f"{label}, source")

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        return {"source": Reference(self.prompts, write.hook, write.kind)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = context.reference("source", current)
        order = derangement(len(source), self.seed)
        # Rows are put in order first, and then cut to those of this call.
        return _source_rows(source[order.to(source.device)], _mask(self.prompts, order), current, context)

    def describe(self) -> dict[str, Any]:
        return {"value": "resample", "seed": self.seed, "source": self.given.describe()}


@dataclass(frozen=True)
class FromTokens(_FromPrompts):
    """The activation of another run, given by its inputs. A source of one example serves every row.

    Attributes:
        at: the positions of the source that go, in their order, to those of the edit; None: the same ones.
    """

    direction = DIRECTION

    at: Positions | Snapshot | None = None

    def references(self, write: ActivationEdit) -> dict[str, Reference]:
        return {"source": Reference(self.prompts, write.hook, write.kind)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = context.reference("source", current)
        return _source_rows(source, _mask(self.prompts), current, context, self.at)

    def describe(self) -> dict[str, Any]:
        described = {"value": "source", "direction": self.direction, "source": self.given.describe()}
        return described | ({} if self.at is None else {"source_positions": describe_positions(self.at)})


@dataclass(frozen=True)
class FromTensors(Replacement):
    """Activations given as tensors, by full hook name.

    Attributes:
        mask: that of the run they are from, bool [batch pos], true at tokens; None where it had no padding or where
            that is unknown, and columns are taken as they are.
        at: as in `FromTokens`.
    """

    direction = DIRECTION

    activations: tuple[tuple[str, Snapshot], ...]
    mask: Snapshot | None = None
    at: Positions | Snapshot | None = None

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = dict(self.activations).get(context.write.hook)
        if source is None:
            hooks = ", ".join(hook for hook, _ in self.activations)
            raise CircuitsError(
                f"{context.write.label}: the source has no {context.write.hook}; it has {hooks}"
            )
        mask, tensor = None if self.mask is None else self.mask.tensor, _like(source.tensor, current)
        if mask is None and self.at is None:
            return _same_columns(tensor, current, context)
        return _source_rows(tensor, mask, current, context, self.at)

    def describe(self) -> dict[str, Any]:
        source = {hook: tensor.describe() for hook, tensor in self.activations}
        described = {"value": "stored", "direction": self.direction, "source": source}
        return described | ({} if self.at is None else {"source_positions": describe_positions(self.at)})


@dataclass(frozen=True)
class Computed(Replacement):
    """The result of a function of the activation."""

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
            what = f"{label}, keys {list(self.keys)}"
            keys = select_positions(self.keys, current.shape[-1], what, context.mask).to(current.device)
            chosen = may_see & (keys if context.mask is None else keys[:, None, None])
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


def _mask(prompts: Prompts, order: Tensor | None = None) -> Tensor | None:
    """Returns the mask of prompts, in an order of its rows; None where they have no padding."""
    if not prompts.padded:
        return None
    return prompts.real if order is None else prompts.real[order]


def _real(context: HookContext, current: Tensor) -> Tensor:
    """Returns the mask of the run, [batch pos], all true where it has no padding."""
    if context.mask is not None:
        return context.mask.to(current.device)
    length = current.shape[context.write.kind.query_axis]
    return torch.ones(len(current), length, dtype=torch.bool, device=current.device)


def _same_columns(source: Tensor, current: Tensor, context: HookContext) -> Tensor:
    _same_shape(source, current, context.write, "source")
    if source.shape[0] == 1:
        return source
    return context.per_example(source, current.shape[0], f"the source {list(source.shape)}")


def _source_rows(
    source: Tensor,
    mask: Tensor | None,
    current: Tensor,
    context: HookContext,
    at: Positions | Snapshot | None = None,
) -> Tensor:
    """Returns the source's rows of this call, each position where the run has it.

    Args:
        mask: of the source, bool [batch pos], true at tokens; None: it has no padding.
        at: positions of the source that go, in order, to those of the edit; None: all go to the same positions.
    """
    kind, write = context.write.kind, context.write
    if at is None and mask is None and context.mask is None:
        return _same_columns(source, current, context)
    real = _real(context, current)
    length, what = source.shape[kind.query_axis], f"the source {list(source.shape)}"
    source_real = torch.ones(len(source), length, dtype=torch.bool) if mask is None else mask
    given = _columns(at, source_real, write.label)
    if len(source) > 1:
        source = context.per_example(source, len(current), what)
        source_real = context.per_example(source_real, len(current), what)
    source_real = source_real.to(current.device)
    if at is None:
        here, there = real.sum(1), source_real.sum(1).expand(len(real))
        if bool((here != there).any()):
            row = int((here != there).nonzero()[0])
            advice = (
                "give the source with its mask (circuits.prompts), or positions= and source_positions="
                if isinstance(write.replacement, FromTokens | FromTensors)
                else "give prompts of one length"
            )
            raise CircuitsError(
                f"{write.label}: example {context.number(row)} has {int(here[row])} tokens, the one it takes from "
                f"{int(there[row])}; {advice}"
            )
        start = source_real.int().argmax(1)[:, None]
        columns = (start + own_positions(real).clamp(min=0)).clamp(max=length - 1)
        return _placed(source, columns, current, real, context)
    everywhere = torch.ones_like(real)
    chosen = write.positions
    if isinstance(chosen, Snapshot) and chosen.tensor.ndim == 2:
        pattern = context.per_example(chosen.tensor, len(real), "the mask of positions").to(real.device)
        targets = [(row & kept).nonzero().flatten() for row, kept in zip(pattern, real, strict=True)]
    else:
        targets = _columns(chosen, real, write.label)
    if len(given) > 1:
        numbers = torch.arange(len(given))
        given = [given[int(row)] for row in (numbers if context.rows is None else numbers[context.rows])]
    columns = torch.zeros_like(everywhere, dtype=torch.long)
    for row, target in enumerate(targets):
        found = given[row if len(given) > 1 else 0]
        if len(found) != len(target):
            raise CircuitsError(
                f"{write.label}: example {context.number(row)} is edited at {len(target)} positions, and "
                f"source_positions= names {len(found)} for it"
            )
        columns[row, target] = found.to(columns.device)
    return _placed(source, columns, current, real, context, (kind.query_axis,))


def _columns(positions: Positions | Snapshot | None, real: Tensor, label: str) -> list[Tensor]:
    """Returns the columns of the chosen positions of each row, in order."""
    if positions is None:
        return []
    if isinstance(positions, Snapshot):
        chosen = positions.tensor.to(real.device)
        if chosen.ndim == 1 and len(chosen) == real.shape[1]:
            chosen = chosen.expand_as(real)
        if chosen.shape != real.shape:
            raise CircuitsError(
                f"{label}: a mask of positions is {list(chosen.shape)}, its inputs are {list(real.shape)}"
            )
        return [(row & kept).nonzero().flatten() for row, kept in zip(chosen, real, strict=True)]
    select_positions(positions, real.shape[1], f"{label}, source_positions", real)
    return list(columns_of(positions, real))


def _placed(
    values: Tensor,
    columns: Tensor,
    current: Tensor,
    real: Tensor,
    context: HookContext,
    axes: tuple[int, ...] | None = None,
) -> Tensor:
    """Returns values at the `columns` [batch pos] that belong to the run's, along the axes of positions."""
    kind = context.write.kind
    for axis in kind.position_axes if axes is None else axes:
        values = taken(values, columns, axis)
    if "key" in kind.axes:
        # Keys that are padding stay as they are: no query sees them.
        values = torch.where(real[:, None, None], values, current)
    _same_shape(values, current, context.write, "source")
    return values
