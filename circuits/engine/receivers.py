"""Cuts direct edges in stacked runs that begin at the receivers' blocks.

A path that leads past everything between leaves all that comes before its receivers as it is. So what the sender's
replacement would change of the residual stream is computed once, from the sender's block alone, and the run begins at
the block of the first receiver, which reads the clean stream and this change.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from circuits.interventions.base import ActivationEdit, Cut, Step
from circuits.interventions.edges import SENDERS, order_of, receivers_of
from circuits.model.hooks import Function, Handle, Handles
from circuits.model.projections import Projections
from circuits.model.sites import KINDS
from circuits.model.surface import Surface

#: A stream this many times its rounding is read with three digits; half precision has fewer.
_MANY, _SMALL = 1000, 0.05

#: All that tells the output of one sender's replacement from that of another.
Sender = Hashable


@dataclass(frozen=True)
class Heard:
    """One receiver of a variant, and the senders that it is cut off from; `head` is None for an MLP or the stream."""

    site: str
    hook: str
    layer: int
    head: int | None
    senders: frozenset[Sender]


@dataclass(frozen=True)
class DirectPaths:
    """The cut edges of one variant, which does nothing else: its receivers, and the senders by what names them."""

    heard: tuple[Heard, ...]
    senders: Mapping[Sender, ActivationEdit]

    @property
    def groups(self) -> set[frozenset[Sender]]:
        return {one.senders for one in self.heard}


def direct_paths(plan: Sequence[Step], surface: Surface) -> DirectPaths | None:
    """Returns the edges of a plan; None where it does more than cut edges that leave all before their receivers as it
    is, or where the changes of senders depend on what the stream passes on the way.
    """
    cuts = [step for step in plan if isinstance(step, Cut) and step.through is None]
    if not cuts or len(cuts) < len(plan) or surface.post_norm:
        return None
    if any(cut.sender.replacement.reads(cut.sender) for cut in cuts):
        return None
    table = receivers_of(surface)
    last = max(order_of(cut.sender.kind.name, cut.sender.layer, SENDERS) for cut in cuts)
    if last >= min(order_of(cut.receiver.kind.name, cut.receiver.layer, table) for cut in cuts):
        return None
    senders: dict[Sender, ActivationEdit] = {}
    places: dict[tuple[str, str, int, int | None], set[Sender]] = {}
    for cut in cuts:
        write, receiver = cut.sender, cut.receiver
        sender = (write.hook, write.heads, write.positions, write.replacement)
        senders[sender] = write
        of_heads: Iterable[int | None] = (None,)
        if receiver.kind.head_axis is not None:
            every = range(surface.head_count(receiver.kind))
            of_heads = every if receiver.heads is None else receiver.heads
        for head in of_heads:
            place = receiver.kind.name, receiver.hook, receiver.layer, head
            places.setdefault(place, set()).add(sender)
    return DirectPaths(tuple(Heard(*at, frozenset(who)) for at, who in places.items()), senders)


@dataclass
class Hearing:
    """The hooks by which receivers of a stack hear what their senders' replacements would be.

    Attributes:
        size: rows of one member.
        places: (member, receiver) pairs.
        changes: by senders, what their replacements change of the stream [batch pos d_model].
        busy: whether a norm is called now for other streams than the run's.
        lost: members of which a receiver has read a stream that is a small difference of large ones. Norms make its
            rounding as large as any stream; a run of its own knows where no sender is heard.
        changed: members of which a receiver has read something else than in the clean run.
        unheard: pairs of `places` that the run has not come to.
    """

    surface: Surface
    size: int
    places: Sequence[tuple[int, Heard]]
    changes: Mapping[frozenset[Sender], Tensor]
    busy: bool = False
    changed: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    unheard: set[tuple[int, Heard]] = field(init=False)

    def __post_init__(self) -> None:
        self.unheard = set(self.places)
        self._projections = Projections.of(self.surface)
        self._streams: dict[int, Tensor] = {}

    def unless_busy(self, function: Function) -> Function:
        """Returns a hook function that leaves alone what other streams than the run's make."""
        return lambda activation: None if self.busy else function(activation)

    def put_on(self) -> Handle:
        """Puts hooks onto every place where a sender's change is received."""
        handles: list[Handle] = []
        by_hook: dict[str, list[tuple[int, Heard]]] = {}
        for place in self.places:
            by_hook.setdefault(place[1].hook, []).append(place)
        for layer in dict.fromkeys(one.layer for _, one in self.places if one.head is not None):
            hook = KINDS["resid_pre"].hook.format(layer)
            handles.append(self.surface.before(hook, partial(self._streams.__setitem__, layer)))
        for hook, here in by_hook.items():
            site, layer = here[0][1].site, here[0][1].layer
            if site == "mlp_pre":
                handles.append(self.surface.before_mlp(layer, partial(self._added, here)))
            elif site == "resid_post":
                handles.append(self.surface.before(hook, partial(self._added, here)))
            else:
                handles.append(self.surface.before(hook, partial(self._projected, here)))
        return Handles(*handles)

    def _added(self, here: Sequence[tuple[int, Heard]], stream: Tensor) -> Tensor | None:
        """Adds changes to a stream that a receiver reads, or is."""
        if self.busy:
            return None
        new = stream.clone()
        for at, one in here:
            change = self.changes[one.senders]
            rows = slice(at * self.size, (at + 1) * self.size)
            new[rows] += change.to(new)
            if bool(change.any()):
                self.changed.add(at)
            if bool(_lost(stream[rows], new[rows]).any()):
                self.lost.add(at)
        self.unheard.difference_update(here)
        return new

    def _projected(self, here: Sequence[tuple[int, Heard]], current: Tensor) -> Tensor:
        """Computes some heads' queries, keys or values from the stream with the changes."""
        site, layer = here[0][1].site, here[0][1].layer
        stream = self._streams[layer].unflatten(0, (-1, self.size))
        read = list(dict.fromkeys((at, one.senders) for at, one in here))
        change = torch.stack([self.changes[who].to(stream).expand(stream.shape[1:]) for _, who in read])
        before_change = stream[[at for at, _ in read]]
        after_change = before_change + change
        for (at, _), lost in zip(read, _lost(before_change, after_change).flatten(1).any(1), strict=True):
            if bool(lost):
                self.lost.add(at)
        self.busy = True
        try:
            normed = self._projections.norm(layer, after_change.flatten(0, 1))
        finally:
            self.busy = False
        normed, moved = normed.unflatten(0, (-1, self.size)), change.any(-1, keepdim=True)
        weight, bias = self._projections.by_head(site, layer)
        output = current.clone()
        for at, one in here:
            index, rows = read.index((at, one.senders)), slice(at * self.size, (at + 1) * self.size)
            assert one.head is not None
            before = current[rows, :, one.head]
            new = (normed[index] @ weight[one.head] + bias[one.head]).to(before)
            output[rows, :, one.head] = after = torch.where(moved[index], new, before)
            if not torch.equal(after, before):
                self.changed.add(at)
        self.unheard.difference_update(here)
        return output


def _lost(before: Tensor, after: Tensor) -> Tensor:
    """Tells where a change leaves so little of a stream [... d_model] that much of it is rounding."""
    before, after = (x.abs().amax(-1) for x in (before, after))
    return after < min(_MANY * torch.finfo(before.dtype).eps, _SMALL) * before
