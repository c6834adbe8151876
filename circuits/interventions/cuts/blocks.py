"""Opens blocks in which edges of a model are cut, and puts the hooks of all open ones onto it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from torch import nn

from circuits.interventions.base import Cut
from circuits.interventions.cuts.hooks import CutHooks
from circuits.interventions.cuts.plan import CutBlock
from circuits.interventions.edges import check_cuts
from circuits.interventions.forward_pass import ForwardPass
from circuits.model.blocks import model_block
from circuits.model.hooked_model import HookedModel

# Open blocks by model, and the hooks that serve them. Not part of its `State`, which a copy of the model would take
# along.
_blocks: WeakKeyDictionary[nn.Module, list[CutBlock]] = WeakKeyDictionary()
_cut_hooks: WeakKeyDictionary[nn.Module, CutHooks] = WeakKeyDictionary()


@model_block
def cutting(surface: HookedModel, cuts: Sequence[Cut], call: ForwardPass) -> Iterator[set[str]]:
    """Cuts these edges too inside the block; yields a set that fills with the hooks at which something was received."""
    if not cuts:
        yield set()
        return
    block = CutBlock(tuple(cuts), call)
    blocks = _blocks.setdefault(surface.model, [])
    if blocks:  # these alone were checked when they were planned
        check_cuts([*(cut for open_block in blocks for cut in open_block.cuts), *cuts], surface)
    blocks.append(block)
    try:
        renew(surface)
        yield block.received
    finally:
        blocks.remove(block)
        renew(surface)


def renew(surface: HookedModel) -> None:
    """Puts all cuts of the open blocks onto the model anew, behind every edit, so that they see what the edits
    leave.
    """
    previous = _cut_hooks.pop(surface.model, None)
    if previous is not None:
        previous.remove()
    blocks = _blocks.get(surface.model)
    if blocks:
        cut_hooks = _cut_hooks[surface.model] = CutHooks(surface, blocks)
        cut_hooks.put_on()
