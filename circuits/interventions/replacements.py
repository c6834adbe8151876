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
from circuits.model.generation import at as columns_at
from circuits.model.inputs import Given, with_model
from circuits.model.padding import refuse_padding
from circuits.model.prompts import Prompts, by_row, own_positions, taken
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
    """Zero; at attention scores, only in the place of those that are not masked."""

    while_generating = True
    blind = True

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

    while_generating = True
    blind = True
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
        pooled, prompts = self.over == "batch,pos", self.prompts
        if not pooled and (prompts.padded or context.window.real is not None):
            return self._by_position(mean, current, context)
        return _in_place(mean, current, context, "reference", pooled)

    def _by_position(self, mean: Tensor, current: Tensor, context: HookContext) -> Tensor:
        """Returns the mean at each row's own positions."""
        kind, label = context.write.kind, context.write.label
        real = _real(context, current)
        lengths, known = real.sum(1), self.prompts.lengths
        if context.window.open:
            _refuse_beyond(
                context.window.own(current.shape[kind.query_axis]),
                known.max()[None],
                current,
                context,
                "reference",
            )
        elif int(lengths.max()) > int(known.max()):
            raise CircuitsError(
                f"{label}: the reference has prompts of up to {int(known.max())} tokens, the run one of "
                f"{int(lengths.max())}; there is no mean at its last positions"
            )
        if "key" in kind.axes and len({*lengths.tolist(), *known.tolist()}) > 1 and not context.causal:
            raise CircuitsError(
                f"{label}: queries of prompts of unequal length see different keys; give prompts of one length"
            )
        return _placed(mean, own_positions(real), known.max()[None], current, real, context)

    def describe(self) -> dict[str, Any]:
        return {"value": "mean", "over": self.over, "reference": self.given.describe()}


@dataclass(frozen=True)
class Resample(_FromPrompts):
    """The activation of another example: row i gets row d(i) of the source, d a derangement of the whole batch."""

    while_generating = True
    blind = True

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

    while_generating = True
    blind = True
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

    while_generating = True
    blind = True
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
        """Returns patterns that spread each query evenly over the chosen keys that it may see."""
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
            keys = keys.to(current.device)
            chosen = may_see & (keys if keys.ndim == 1 else keys[:, None, None])
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
    """Returns the part of a source, or of a reference, at the columns of the run; refuses other shapes."""
    write, window = context.write, context.window
    if window.open and source.ndim == current.ndim:
        axis = write.kind.query_axis
        if not pooled:
            here = torch.arange(window.start, window.start + current.shape[axis])[None]
            _refuse_beyond(here, torch.tensor([source.shape[axis]]), current, context, what)
            source = columns_at(source, axis, window.start, current.shape[axis], 0.0)
        if "key" in write.kind.axes:
            first = window.start + current.shape[axis] - current.shape[-1]
            key_axis, masked = write.kind.axes.index("key"), _masked(write)
            source = columns_at(source, key_axis, first, current.shape[-1], masked)
    _same_shape(source, current, write, what, pooled)
    return source


def _masked(write: ActivationEdit) -> float:
    """Returns the value of a key that the query does not see."""
    if write.kind.name != "scores":
        return 0.0
    return -torch.inf if write.masked_score is None else write.masked_score


def _refuse_beyond(own: Tensor, lengths: Tensor, current: Tensor, context: HookContext, what: str) -> None:
    """Refuses an edit, while the model generates, at positions that the source has not.

    Args:
        own: the positions of the run, [batch or 1, pos].
        lengths: those that the source has, [batch or 1].
    """
    axis, selected = context.write.kind.query_axis, context.selected
    edited = selected.any([other for other in range(1, selected.ndim) if other != axis])
    late = edited.to(own.device).expand(-1, current.shape[axis]) & (own >= lengths.to(own.device)[:, None])
    if bool(late.any()):
        row, column = late.nonzero()[0].tolist()
        position, length = int(own.expand(len(late), -1)[row, column]), int(lengths.expand(len(late))[row])
        raise CircuitsError(
            f"{context.write.label}: no position {position} in the {what}, which has {length}; name those to edit "
            '(positions="prompt")' + (', or give over="batch,pos"' if what == "reference" else "")
        )


def _mask(prompts: Prompts, order: Tensor | None = None) -> Tensor | None:
    """Returns the mask of prompts, in an order of its rows; None where they have no padding."""
    if not prompts.padded:
        return None
    return prompts.real if order is None else prompts.real[order]


def _real(context: HookContext, current: Tensor) -> Tensor:
    """Returns the mask of the run and of what came before it, [batch pos], all true where it has no padding."""
    window = context.window
    if window.real is not None:
        return window.real.to(current.device)
    length = window.start + current.shape[context.write.kind.query_axis]
    return torch.ones(len(current), length, dtype=torch.bool, device=current.device)


def _same_columns(source: Tensor, current: Tensor, context: HookContext) -> Tensor:
    source = _in_place(source, current, context, "source")
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
    kind, write, window = context.write.kind, context.write, context.window
    if at is None and mask is None and window.real is None:
        return _same_columns(source, current, context)
    real = _real(context, current)
    length, what = source.shape[kind.query_axis], f"the source {list(source.shape)}"
    source_real = torch.ones(len(source), length, dtype=torch.bool) if mask is None else mask
    given = chosen_columns(at, source_real, f"{write.label}, source_positions")
    if len(source) > 1:
        source = context.per_example(source, len(current), what)
        source_real = context.per_example(source_real, len(current), what)
    source_real = source_real.to(current.device)
    if at is None:
        here, there = real.sum(1), source_real.sum(1).expand(len(real))
        if window.open:
            _refuse_beyond(window.own(current.shape[kind.query_axis]), there, current, context, "source")
        elif bool((here != there).any()):
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
        return _placed(source, own_positions(real), there, current, real, context, start)
    columns = _paired_columns(given, current, context)
    values = taken(source, columns, kind.query_axis)
    _same_shape(values, current, write, "source")
    return values


def _paired_columns(given: list[Tensor], current: Tensor, context: HookContext) -> Tensor:
    """Returns for each column of the run that of the source which goes there, [batch pos]; 0 where none does.

    Args:
        given: the columns of the source that are named, for each row of the whole batch or for all.
    """
    write, window, length = context.write, context.window, current.shape[context.write.kind.query_axis]
    if len(given) > 1:
        numbers = torch.arange(len(given))
        given = [given[int(row)] for row in (numbers if context.rows is None else numbers[context.rows])]
    columns = torch.zeros(len(current), length, dtype=torch.long, device=current.device)
    of_row = [given[row if len(given) > 1 else 0].to(current.device) for row in range(len(current))]
    if isinstance(write.positions, tuple):
        targets = [
            window.selected((position,), length, write.label).to(current.device).expand_as(columns)
            for position in write.positions
        ]
        counts = [len(write.positions)] * len(current)
    else:
        shape = [len(current), length]
        edited = context.selected.any(
            [axis for axis in range(1, current.ndim) if axis != write.kind.query_axis]
        )
        edited = edited.expand(shape)
        # A mask is over the prompt, whose positions have come in the first run.
        counts = [] if window.start else edited.sum(1).tolist()
        order = edited.long().cumsum(1) - 1
        targets = [edited & (order == number) for number in range(max(counts, default=0))]
    for row, count in enumerate(counts):
        if len(of_row[row]) != count:
            raise CircuitsError(
                f"{write.label}: example {context.number(row)} is edited at {count} positions, and "
                f"source_positions= names {len(of_row[row])} for it"
            )
    seen = torch.zeros_like(columns, dtype=torch.bool)
    for number, target in enumerate(targets):
        found = torch.stack([one[number] if number < len(one) else one.new_zeros(()) for one in of_row])
        twice = seen & target & (columns != found[:, None])
        if bool(twice.any()):
            row = int(twice.nonzero()[0, 0])
            raise CircuitsError(
                f"{write.label}: positions= names a token of example {context.number(row)} twice, and "
                "source_positions= another token for each; name it once"
            )
        seen = seen | target
        columns = torch.where(target, found[:, None], columns)
    return columns


def chosen_columns(positions: Positions | Snapshot | None, real: Tensor, label: str) -> list[Tensor]:
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
    select_positions(positions, real.shape[1], label, real)
    return list(columns_of(positions, real))


def _placed(
    values: Tensor,
    own: Tensor,
    lengths: Tensor,
    current: Tensor,
    real: Tensor,
    context: HookContext,
    start: Tensor | int = 0,
) -> Tensor:
    """Returns values at each row's own positions, along the axes of positions.

    Args:
        own: the positions of the run and of what came before it, [batch pos].
        lengths: the positions that the values have, [batch or 1].
        real: the mask of the run and of what came before it, [batch pos].
        start: the column of the first of the values, [batch or 1, 1].
    """
    kind = context.write.kind
    for axis in kind.position_axes:
        count = current.shape[axis]
        # The last columns so far: queries are those of the run, keys all that the cache has not dropped.
        here = own[:, own.shape[1] - count :].to(values.device)
        columns = (start + here.clamp(min=0)).clamp(max=values.shape[axis] - 1)
        values = taken(values, columns, axis)
        if kind.axes[axis] == "key":
            known = by_row(here < lengths.to(here.device)[:, None], axis, values.ndim)
            values = torch.where(known, values, torch.full_like(values, _masked(context.write)))
    if "key" in kind.axes:
        # Keys that are padding stay as they are: no query sees them.
        values = torch.where(real[:, None, None, -current.shape[-1] :], values, current)
    _same_shape(values, current, context.write, "source")
    return values
