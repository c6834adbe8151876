"""Makes the edits of many variants in one stack at once, so that a kernel serves all of them and not one each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from circuits.interventions.base import ActivationEdit
from circuits.interventions.forward_pass import ForwardPass, replacement_for


def edited_at_once(
    writes: Sequence[Sequence[ActivationEdit]],
    calls: Sequence[ForwardPass],
    current: Tensor,
    read: Tensor | None = None,
) -> tuple[Tensor, list[bool]] | None:
    """Returns the edited activation of a stack [variant row ...], and by variant whether its edit has changed it.

    None where it takes an edit by itself: replacements that differ or look at what they replace, several edits of one
    variant, edits of some positions or neurons, padding, or a stack of which most variants have no edit here.

    Args:
        writes: by variant, its edits at this hook.
        calls: by variant, its run.
        current: [variant row ...], or [1 row ...] where it is the same in all variants.
        read: return these positions only.
    """
    edited = [at for at, each in enumerate(writes) if each]
    if len(edited) < 2 or 2 * len(edited) < len(writes) or any(len(each) > 1 for each in writes):
        return None
    first, call = writes[edited[0]][0], calls[edited[0]]
    window, axis = call.frame.window, first.kind.head_axis
    if axis is None or "key" in first.kind.axes or window.mask is not None or window.real is not None:
        return None
    if not all(_alike(writes[at][0], first) for at in edited):
        return None
    n_heads = current.shape[1 + axis]
    every = range(n_heads)
    heads = [set(every if each[0].heads is None else each[0].heads) if each else set() for each in writes]
    shape = [len(writes), *(n_heads if at == axis else 1 for at in range(current.ndim - 1))]
    # Made by the host, and taken to the device as one tensor.
    chosen = torch.tensor([[head in one for head in every] for one in heads]).to(current.device).view(shape)
    here = current[min(edited[0], len(current) - 1)]
    value, _ = replacement_for(first, call, here)
    if read is not None:
        value, current = value.expand_as(here)[:, read], current[:, :, read]
    new = torch.where(chosen, value, current)
    moved = (new != current).flatten(1).any(1).tolist()
    return new, [bool(each) and was_moved for each, was_moved in zip(writes, moved, strict=True)]


def _alike(write: ActivationEdit, first: ActivationEdit) -> bool:
    same = write.replacement is first.replacement or write.replacement == first.replacement
    return (
        same
        and write.replacement.blind
        and (write.hook, write.groups) == (first.hook, first.groups)
        and write.positions is None
        and write.neurons is None
    )
