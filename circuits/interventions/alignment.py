"""Takes from other activations the entries that stand where an edit writes: of which example, at which position."""

from __future__ import annotations

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, HookContext
from circuits.model.prompts import broadcast_mask, own_positions, taken
from circuits.tensors import Positions, Snapshot, columns_of, select_positions


def in_dtype_of(tensor: Tensor, current: Tensor) -> Tensor:
    """Returns a tensor on the run's device, in its dtype."""
    return tensor.to(device=current.device, dtype=current.dtype)


def check_shape(
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


def check_reach(own: Tensor, lengths: Tensor, current: Tensor, context: HookContext, what: str) -> None:
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


def source_rows(
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
        check_shape(source, current, write, "source")
        return source if len(source) == 1 else context.per_example(source, len(current), what)
    there = torch.ones(len(source), source.shape[axis], dtype=torch.bool) if mask is None else mask
    if at is not None:
        select_positions(at, source.shape[axis], f"{write.label}, source_positions", there)
    if len(source) > 1:
        source, there = (context.per_example(one, len(current), what) for one in (source, there))
    there = there.to(current.device)
    if at is not None:
        values = taken(source, _paired_columns(at, there, current, context), axis)
        check_shape(values, current, write, "source")
        return values
    real = context.real(current)
    real = torch.ones_like(real) if by_column else real
    own, here, lengths = own_positions(real), real.sum(1), there.sum(1).expand(len(real))
    if step.open:
        check_reach(own[:, step.start :], lengths, current, context, "source")
    elif bool((here != lengths).any()):
        row = int((here != lengths).nonzero()[0])
        raise CircuitsError(
            f"{write.label}: example {context.number(row)} has {int(here[row])} tokens, the one it takes from "
            f"{int(lengths[row])}; {advice}"
        )
    start = there.int().argmax(1)[:, None]
    return at_own_positions(source, own, lengths, current, real, context, start)


def _paired_columns(at: Positions, source_real: Tensor, current: Tensor, context: HookContext) -> Tensor:
    """Returns for each column of the run that of the source which goes there, [batch pos]; 0 where none does.

    Args:
        at: positions of the source, which go in order to those of the edit.
        source_real: the mask of the source, a row for each of this call or one for all.
    """
    write, decode_step = context.write, context.decode_step
    length = current.shape[write.kind.query_axis]
    given = columns_of(at, source_real).expand(len(current), len(at))
    columns = torch.full((len(current), length), -1, device=current.device)
    assert isinstance(write.positions, tuple)
    for number, position in enumerate(write.positions):
        here = decode_step.selected((position,), length, write.label).to(current.device)
        theirs = given[:, number, None].to(current.device)
        twice = (here & (columns >= 0) & (columns != theirs)).any(1)
        if bool(twice.any()):
            row = context.number(int(twice.nonzero()[0]))
            raise CircuitsError(
                f"{write.label}: positions= names a token of example {row} twice, and source_positions= another token "
                "for each; name it once"
            )
        columns = torch.where(here, theirs, columns)
    return columns.clamp(min=0)


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


def at_own_positions(
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
        values = taken(values, columns, axis)
        if kind.axes[axis] == "key":
            known = broadcast_mask(here < lengths.to(here.device)[:, None], axis, values.ndim)
            values = torch.where(known, values, torch.full_like(values, hidden))
    if "key" in kind.axes:
        # Keys that are padding stay as they are: no query sees them.
        values = torch.where(real[:, None, None, -current.shape[-1] :], values, current)
    check_shape(values, current, context.write, "source")
    return values
