"""Replacements for activations. Each is a frozen value that holds no model."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from circuits.arguments import parse_choice
from circuits.errors import CircuitsError, prefix_circuits_errors
from circuits.frozen_tensors_and_positions import (
    Positions,
    Snapshot,
    Span,
    describe_positions,
    positions_to_columns,
    positions_to_mask,
    to_tensor_if_array,
)
from circuits.interventions.base import (
    ActivationEdit,
    HookContext,
    Intervention,
    MeanOverExamples,
    PassRequest,
    Replacement,
)
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import check_no_unmasked_padding, parse_prompts, prompts_for_model
from circuits.model.prompts_with_mask import (
    Given,
    Prompts,
    broadcast_mask,
    check_source_fits_base,
    gather_columns,
    positions_from_mask,
)
from circuits.model.sites import KINDS

# The direction of every patch, as descriptions give it.
DIRECTION = "source -> run"

# What to do where a source and the run have prompts of unequal length.
_UNEQUAL_LENGTHS = "give the source with its mask (circuits.prompts), or positions= and source_positions="


@dataclass(frozen=True)
class Zero(Replacement):
    """Zero; at attention scores, only in the place of those that are not masked."""

    cache_safe = True

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        if context.write.kind.name == "scores":
            # A zero in the place of a masked score would let a query see its future.
            return torch.where(visible_mask(current), torch.zeros_like(current), current)
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

    def resolve(self, hooked: HookedModel, owner: Intervention) -> Replacement:
        with prefix_circuits_errors(owner.label):
            found = replace(self, given=prompts_for_model(self.given, hooked, self.role))
        found.check_prompts(hooked, owner.label)
        return found

    def check_prompts(self, hooked: HookedModel, label: str) -> None:
        """Refuses, before any run, prompts that would be read otherwise than they are meant."""

    def clean_passes(self, write: ActivationEdit) -> dict[str, PassRequest]:
        return {"source": PassRequest(self.prompts, write.hook, write.kind)}


@dataclass(frozen=True)
class Mean(_FromPrompts):
    """The mean of the same activation over a reference batch; per position unless `over` is "batch,pos"."""

    cache_safe = True
    role = "reference"

    over: str = "batch"
    at: Positions | Span | None = None  # the positions of the reference that are pooled; None: all

    @property
    def reduction(self) -> MeanOverExamples:
        return MeanOverExamples(self.over == "batch,pos", self.at)

    def check_prompts(self, hooked: HookedModel, label: str) -> None:
        prompts = self.prompts
        if isinstance(self.at, tuple):
            positions_to_mask(self.at, prompts.shape[1], f"{label}, reference_positions", prompts.real)
        if self.at is not None and not bool(self.reduction.positions_in_mean(prompts).any()):
            raise CircuitsError(f"{label}: the reference has no tokens at reference_positions={self.at}")
        # Means per position need equal lengths only; a mean over positions must see no padding at all.
        used = torch.ones(prompts.shape[:2], dtype=torch.bool) if self.over == "batch,pos" else None
        check_no_unmasked_padding(hooked, prompts, used, f"{label}, reference")

    def clean_passes(self, write: ActivationEdit) -> dict[str, PassRequest]:
        return {"mean": PassRequest(self.prompts, write.hook, write.kind, self.reduction)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns the mean, at each row's own positions where it is taken by position."""
        mean, known, step = (
            context.clean_pass_result("mean", current),
            self.prompts.lengths,
            context.decode_step,
        )
        pooled, kind = self.over == "batch,pos", context.write.kind
        if pooled or not (self.prompts.padded or step.open or step.real is not None):
            check_source_shape(mean, current, context.write, "reference", pooled)
            return mean
        real, longest = context.mask_with_past(current), known.max()[None]
        lengths = real.sum(1)
        if step.open:
            check_positions_in_source(
                step.own_positions(current.shape[kind.query_axis]), longest, current, context, "reference"
            )
        elif int(lengths.max()) > int(longest):
            raise CircuitsError(
                f"{context.write.label}: the reference has prompts of up to {int(longest)} tokens, the run one of "
                f"{int(lengths.max())}; there is no mean at its last positions"
            )
        if "key" in kind.axes and len({*lengths.tolist(), *known.tolist()}) > 1 and not context.run.causal:
            raise CircuitsError(
                f"{context.write.label}: queries of prompts of unequal length see different keys; give prompts of one "
                "length"
            )
        return select_own_positions(mean, positions_from_mask(real), longest, current, real, context)

    def describe(self) -> dict[str, Any]:
        described = {"value": "mean", "over": self.over, "reference": self.given.describe()}
        return described | ({} if self.at is None else {"reference_positions": describe_positions(self.at)})


@dataclass(frozen=True)
class MeanUnderOwnEdit(Mean):
    """The mean per position over the reference batch, in a pass in which the edit that this replacement belongs to is
    made in all earlier layers, and no other.
    """

    cache_safe = False

    def clean_passes(self, write: ActivationEdit) -> dict[str, PassRequest]:
        assert write.layer is not None  # patterns belong to layers
        before = write.owner, write.layer
        return {"mean": PassRequest(self.prompts, write.hook, write.kind, self.reduction, before)}

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "of": "edited"}


@dataclass(frozen=True)
class Resample(_FromPrompts):
    """The activation of another example: row i gets row d(i) of the source, d a derangement of the whole batch."""

    cache_safe = True

    seed: int = 0

    def check_prompts(self, hooked: HookedModel, label: str) -> None:
        check_no_unmasked_padding(hooked, self.prompts, None, f"{label}, source")

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = context.clean_pass_result("source", current)
        order = derangement(len(source), self.seed)
        # Rows are put in order first, and then cut to those of this call.
        mask = self.prompts.real[order] if self.prompts.padded else None
        return align_source(source[order.to(source.device)], mask, current, context)

    def describe(self) -> dict[str, Any]:
        return {"value": "resample", "seed": self.seed, "source": self.given.describe()}


@dataclass(frozen=True)
class Noise(Replacement):
    """The activation plus Gaussian noise of standard deviation `scale`, independent for every entry of the batch."""

    scale: float
    seed: int = 0

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        label = context.write.label
        if context.token_mask is not None:
            raise CircuitsError(f"{label}: noise is drawn by position; give prompts of one length")
        # Of the whole batch, then cut to the rows of this call: the same whatever the batch size.
        total = len(current) if context.run.state.total is None else context.run.state.total
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {context.write.hook}".encode()))
        drawn = torch.randn(total, *current.shape[1:], generator=generator, dtype=torch.float64)
        added = self.scale * context.rows_of_this_call(drawn, len(current), "noise")
        return current + match_dtype_and_device(added, current)

    def describe(self) -> dict[str, Any]:
        return {"value": "noise", "scale": self.scale, "seed": self.seed}


@dataclass(frozen=True)
class FromTokens(_FromPrompts):
    """The activation of another run, given by its inputs. A source of one example serves every row.

    Attributes:
        at: the positions of the source that go, in their order, to those of the edit; None: the same ones.
    """

    cache_safe = True
    direction = DIRECTION

    at: Positions | None = None

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = context.clean_pass_result("source", current)
        mask = self.prompts.real if self.prompts.padded else None
        return align_source(source, mask, current, context, self.at, _UNEQUAL_LENGTHS)

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

    cache_safe = True
    direction = DIRECTION

    activations: tuple[tuple[str, Snapshot], ...]
    mask: Snapshot | None = None
    at: Positions | None = None

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        source = dict(self.activations).get(context.write.hook)
        if source is None:
            hooks = ", ".join(hook for hook, _ in self.activations)
            raise CircuitsError(
                f"{context.write.label}: the source has no {context.write.hook}; it has {hooks}"
            )
        mask = None if self.mask is None else self.mask.tensor
        tensor = match_dtype_and_device(source.tensor, current)
        by_column = mask is None and self.at is None
        return align_source(tensor, mask, current, context, self.at, _UNEQUAL_LENGTHS, by_column)

    def describe(self) -> dict[str, Any]:
        source = {hook: tensor.describe() for hook, tensor in self.activations}
        described = {"value": "stored", "direction": self.direction, "source": source}
        return described | ({} if self.at is None else {"source_positions": describe_positions(self.at)})


@dataclass(frozen=True)
class FromFunction(Replacement):
    """The result of a function of the activation."""

    cache_safe = True

    function: Callable[[Tensor], Tensor]

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        # A copy, so that a function that works in place does not reach the entries that are to stay.
        try:
            new = to_tensor_if_array(self.function(current.clone()), f"{context.write.label}: the function")
        except TypeError as error:
            if getattr(error.__traceback__, "tb_next", None):  # of what it does, not of the call
                raise
            message = f"{context.write.label}: the function gets the activation alone: {error}"
            raise CircuitsError(message) from error
        if not isinstance(new, Tensor) or new.shape != current.shape or new.is_complex():
            kind = "complex " if isinstance(new, Tensor) and new.is_complex() else ""
            got = f"{kind}{list(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
            raise CircuitsError(
                f"{context.write.label}: the function must return a tensor {list(current.shape)}, got {got}"
            )
        return match_dtype_and_device(new, current)

    def describe(self) -> dict[str, Any]:
        return {"value": "function", "function": getattr(self.function, "__qualname__", repr(self.function))}


@dataclass(frozen=True)
class Uniform(Replacement):
    """Equal attention to every key that the query may see, or to those of `keys` that it may see."""

    cache_safe = True

    keys: Positions | None = None

    def hooks_read(self, write: ActivationEdit) -> dict[str, str]:
        return {"scores": KINDS["scores"].hook.format(write.layer)}

    def value(self, current: Tensor, context: HookContext) -> Tensor:
        """Returns patterns that spread each query evenly over the chosen keys that it may see."""
        scores = context.run.reads.pop((id(context.write), "scores"), None)
        if scores is None:
            raise CircuitsError(
                f"{context.write.label}: no attention scores were seen, so the visible keys are unknown"
            )
        chosen = may_see = visible_mask(scores)
        if self.keys is not None:
            step, label = context.decode_step, context.write.label
            # The keys of a call end where its queries do; a sliding cache has dropped the first of them.
            end = step.start + current.shape[-2] if step.open else current.shape[-1]
            of_keys = replace(step, start=end - current.shape[-1], whole=True)
            keys = of_keys.position_mask(self.keys, current.shape[-1], f"{label}, keys {list(self.keys)}")
            chosen = may_see & (keys if keys.ndim == 1 else keys[:, None, None]).to(current.device)
            sees_none = may_see.any(-1, keepdim=True) & ~chosen.any(-1, keepdim=True)
            wrong = (context.selected & sees_none).any(-1)
            if bool(wrong.any()):
                raise CircuitsError(
                    f"{label}: query {int(wrong.any(0).any(0).nonzero()[0])} sees none of the keys {list(self.keys)}; "
                    "name the queries to edit with positions="
                )
        count = chosen.sum(-1, keepdim=True)
        # A query that sees no key at all (left padding) keeps the zero pattern that the model gives it.
        return chosen.to(current.dtype) / count.clamp(min=1).to(current.dtype)

    def describe(self) -> dict[str, Any]:
        return {"value": "uniform", "keys": None if self.keys is None else list(self.keys)}


def visible_mask(scores: Tensor) -> Tensor:
    """Tells which attention scores are not masked: neither minus infinity nor so low that only a mask can be there."""
    return scores > torch.finfo(scores.dtype).min / 2


def derangement(size: int, seed: int | torch.Generator) -> Tensor:
    """Draws a permutation of `size` rows without a fixed point, uniform among all of them."""
    if size < 2:
        raise CircuitsError(f"a resample needs a batch of at least 2 examples, got {size}")
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    rows = torch.arange(size)
    while True:
        order = torch.randperm(size, generator=generator)
        if not bool((order == rows).any()):
            return order


# ---- What of other activations stands where an edit writes: of which example, at which position


def match_dtype_and_device(tensor: Tensor, current: Tensor) -> Tensor:
    """Returns a tensor on the run's device, in its dtype."""
    return tensor.to(device=current.device, dtype=current.dtype)


def check_source_shape(
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


def check_positions_in_source(
    own: Tensor, lengths: Tensor, current: Tensor, context: HookContext, what: str
) -> None:
    """Refuses an edit, while the model generates, at positions of the run, `own` [batch or 1, pos], that are beyond the
    `lengths` [batch or 1] of the source.
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


def align_source(
    source: Tensor,
    mask: Tensor | None,
    current: Tensor,
    context: HookContext,
    at: Positions | None = None,
    advice: str = "give prompts of one length",
    by_column: bool = False,
) -> Tensor:
    """Returns the source's rows of this call, each position where the run has it.

    Args:
        mask: of the source, bool [batch pos], true at tokens; None: it has no padding.
        at: positions of the source that go, in order, to those of the edit; None: all go to the same positions.
        advice: what to do where the two have prompts of unequal length.
        by_column: whether positions are columns, whatever is padding.
    """
    write, step = context.write, context.decode_step
    axis, what = write.kind.query_axis, f"the source {list(source.shape)}"
    as_they_are = by_column or (mask is None and step.real is None)
    if (at is None and as_they_are and not step.open) or source.ndim != current.ndim:
        check_source_shape(source, current, write, "source")
        return source if len(source) == 1 else context.rows_of_this_call(source, len(current), what)
    there = torch.ones(len(source), source.shape[axis], dtype=torch.bool) if mask is None else mask
    if at is not None:
        positions_to_mask(at, source.shape[axis], f"{write.label}, source_positions", there)
    if len(source) > 1:
        source, there = (context.rows_of_this_call(one, len(current), what) for one in (source, there))
    there = there.to(current.device)
    if at is not None:
        values = gather_columns(source, _source_column_per_run_column(at, there, current, context), axis)
        check_source_shape(values, current, write, "source")
        return values
    real = context.mask_with_past(current)
    real = torch.ones_like(real) if by_column else real
    own, here, lengths = positions_from_mask(real), real.sum(1), there.sum(1).expand(len(real))
    if step.open:
        check_positions_in_source(own[:, step.start :], lengths, current, context, "source")
    elif bool((here != lengths).any()):
        row = int((here != lengths).nonzero()[0])
        raise CircuitsError(
            f"{write.label}: example {context.index_in_batch(row)} has {int(here[row])} tokens, the one it takes from "
            f"{int(lengths[row])}; {advice}"
        )
    start = there.int().argmax(1)[:, None]
    return select_own_positions(source, own, lengths, current, real, context, start)


def _source_column_per_run_column(
    at: Positions, source_real: Tensor, current: Tensor, context: HookContext
) -> Tensor:
    """Returns for each column of the run that of the source which goes there, [batch pos]; 0 where none does. Positions
    `at` of the source go in order to those of the edit; its mask has a row for each of this call or one for all.
    """
    write, decode_step = context.write, context.decode_step
    length = current.shape[write.kind.query_axis]
    given = positions_to_columns(at, source_real).expand(len(current), len(at))
    columns = torch.full((len(current), length), -1, device=current.device)
    assert isinstance(write.positions, tuple)
    for number, position in enumerate(write.positions):
        here = decode_step.position_mask((position,), length, write.label).to(current.device)
        theirs = given[:, number, None].to(current.device)
        twice = (here & (columns >= 0) & (columns != theirs)).any(1)
        if bool(twice.any()):
            row = context.index_in_batch(int(twice.nonzero()[0]))
            raise CircuitsError(
                f"{write.label}: positions= names a token of example {row} twice, and source_positions= another token "
                "for each; name it once"
            )
        columns = torch.where(here, theirs, columns)
    return columns.clamp(min=0)


def select_own_positions(
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
    hidden = -torch.inf if kind.name == "scores" else 0.0  # of a key that the query does not see
    for axis in kind.position_axes:
        count = current.shape[axis]
        # The last columns so far: queries are those of the run, keys all that the cache has not dropped.
        here = own[:, own.shape[1] - count :].to(values.device)
        columns = (start + here.clamp(min=0)).clamp(max=values.shape[axis] - 1)
        values = gather_columns(values, columns, axis)
        if kind.axes[axis] == "key":
            known = broadcast_mask(here < lengths.to(here.device)[:, None], axis, values.ndim)
            values = torch.where(known, values, torch.full_like(values, hidden))
    if "key" in kind.axes:
        # Keys that are padding stay as they are: no query sees them.
        values = torch.where(real[:, None, None, -current.shape[-1] :], values, current)
    check_source_shape(values, current, context.write, "source")
    return values


# ---- What circuits and screenings patch with

#: What takes the place of an activation: that of a source prompt, the mean over a batch of them at each of the
#: prompt's own positions, or zero.
HOW = ("resample", "mean", "zero")


def parse_source_prompts(
    source: Any, base: Prompts, hooked: HookedModel, how: Any, caller: str
) -> Prompts | None:
    """Returns the prompts of a source, in the layout of base where each has a partner there; None for zeros.

    Raises `CircuitsError` for a source that does not fit: pairs of unequal length, or means that do not reach as far as
    a prompt of base.
    """
    parse_choice(how, HOW, caller, "how")
    if how == "zero":
        if source is not None:
            raise CircuitsError(f'{caller}: how="zero" has no source; give source=None')
        return None
    source = parse_prompts(hooked, source, caller, "source")
    if how == "resample":
        check_source_fits_base(base, source, caller)
        return source.like(base)
    padded = base.padded or source.padded
    if source.shape[1 + padded :] != base.shape[1 + padded :]:
        raise CircuitsError(
            f"{caller}: source is {list(source.shape)}, base {list(base.shape)}; the source must have base's shape, or "
            "another batch"
        )
    longest = int(source.lengths.max())
    if int(base.lengths.max()) > longest:
        raise CircuitsError(
            f"{caller}: base has a prompt of {int(base.lengths.max())} tokens, the longest source {longest}; there is "
            "no mean at its last positions"
        )
    return source


def align_means_to_prompts(mean: Tensor, prompts: Prompts) -> Tensor:
    """Returns means [1 pos ...] of own positions at those of each prompt: [batch pos ...], or [1 pos ...]."""
    if not prompts.padded and mean.shape[1] == prompts.shape[1]:
        return mean
    return gather_columns(mean, positions_from_mask(prompts.real).clamp(0, mean.shape[1] - 1), 1)
