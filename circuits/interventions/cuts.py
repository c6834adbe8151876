"""The cut edges of a run, all together: each receiver hears, of the senders cut off from it, what replaces them.

A receiver's input is the residual stream of the run under way plus the sum over its cut edges of (what the sender is
replaced by − what it writes in this run). Nothing else is touched: what a receiver makes of its input goes on as ever,
to later receivers too. All edges into a receiver that are not cut, therefore, carry what the edited run computes.

No second run is needed. What comes to each site is seen before anything that hangs there. Edits, and hooks of the
user's, act on a receiver's stream as they act on the run's: where one changes the stream, a change that passes by
becomes what it makes of the changed stream − what it makes of the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, Cut, Receiver
from circuits.interventions.forward_pass import ForwardPass, RunState, replacement_for
from circuits.model.hooks import Handle, Handles
from circuits.model.projections import OUTPUTS, Projections, check_made
from circuits.model.sites import KINDS
from circuits.model.surface import Surface
from circuits.tensors import Snapshot

#: Where a component's output can be taken, and where it can be received, with their order within a layer.
SENDERS = {"embed": -2, "pos_embed": -2, "z": 0, "attn_out": 1, "mlp_post": 2, "mlp_out": 3}
RECEIVERS = {"q": 0, "k": 0, "v": 0, "mlp_pre": 2, "resid_post": 4}
_PER_LAYER = 10
_BY_HEAD = ("q", "k", "v")
_FLOW = "cut edges"


def order_of(name: str, layer: int | None, table: dict[str, int]) -> int:
    """Where in the order of computation a site comes, by `SENDERS` or `RECEIVERS`."""
    return table[name] + (_PER_LAYER * layer if layer is not None else -_PER_LAYER)


Group = frozenset[int]  # of senders, by their number: all that a receiver is cut off from


def check_cuts(cuts: Sequence[Cut], surface: Surface) -> None:
    """Refuse cuts that cannot be one edit: an edge that is cut twice, or two ways through the MLPs."""
    # So that a stream comes before those that read from it.
    cuts = sorted(cuts, key=lambda cut: order_of(cut.receiver.kind.name, cut.receiver.layer, RECEIVERS))
    ways = list(dict.fromkeys(cut.through for cut in cuts))
    if len(ways) > 1:
        raise CircuitsError(
            f"{cuts[0].label}: the paths of one run have one through=, here there are {' and '.join(map(repr, ways))}"
        )
    # By part of a sender and place that receives: who cuts it; and by part, the streams that receive.
    known: dict[tuple[object, ...], list[Cut]] = {}
    streams: dict[object, list[Cut]] = {}
    for cut in cuts:
        order = order_of(cut.receiver.kind.name, cut.receiver.layer, RECEIVERS)
        for part in _parts(cut.sender, surface):
            for head in _heads(cut.receiver, surface):
                others = list(known.setdefault((part, cut.receiver.hook, head), []))
                # A stream that receives is what all that comes later reads, and carries the sender there.
                for other in streams.get(part, ()):
                    others += (
                        [other] if order_of("resid_post", other.receiver.layer, RECEIVERS) < order else []
                    )
                if any(not _apart(cut, other) for other in others):
                    raise CircuitsError(
                        f"{cut.label}: the edge from {_named(cut.sender)} to {_called(cut.receiver, head)} is cut "
                        "twice; give each edge one source"
                    )
                known[part, cut.receiver.hook, head].append(cut)
            if cut.receiver.kind.name == "resid_post":
                streams.setdefault(part, []).append(cut)


def _parts(sender: ActivationEdit, surface: Surface) -> list[tuple[str, int | None, int | None]]:
    """What a sender consists of; two that share a part are the same as far as that goes."""
    name, layer = sender.kind.name, sender.layer
    if name in ("z", "attn_out"):
        heads = range(surface.n_heads) if sender.heads is None else sender.heads
        return [("z", layer, head) for head in heads]
    return [("mlp_out" if name == "mlp_post" else name, layer, None)]


def _heads(receiver: Receiver, surface: Surface) -> Iterable[int | None]:
    if receiver.kind.name not in _BY_HEAD:
        return (None,)
    return range(surface.head_count(receiver.kind)) if receiver.heads is None else receiver.heads


def _apart(one: Cut, other: Cut) -> bool:
    """Whether two cuts of an edge are sure to be at different positions."""
    here, there = one.sender.positions, other.sender.positions
    if isinstance(here, tuple) and isinstance(there, tuple):
        # A negative position may be any of the others, as far as is known without a run.
        same_end = min(*here, *there) >= 0 or max(*here, *there) < 0
        return same_end and not set(here) & set(there)
    if isinstance(here, Snapshot) and isinstance(there, Snapshot) and here.shape == there.shape:
        return not bool((here.tensor.cpu() & there.tensor.cpu()).any())
    return False


def _named(sender: ActivationEdit) -> str:
    heads = "" if sender.heads is None else f", heads {','.join(map(str, sender.heads))}"
    return (sender.kind.name if sender.layer is None else f"{sender.kind.name}.{sender.layer}") + heads


def _called(receiver: Receiver, head: int | None) -> str:
    return f"{receiver.kind.name}.{receiver.layer}" + ("" if head is None else f", head {head}")


@contextmanager
def cutting(surface: Surface, cuts: Sequence[Cut], call: ForwardPass) -> Iterator[set[str]]:
    """Cut these edges too, for the length of a block; gives the hooks at which something has received, as they do."""
    if not cuts:
        yield set()
        return
    block = _Block(tuple(cuts), call)
    blocks = _blocks.setdefault(surface.model, [])
    check_cuts([*(cut for each in blocks for cut in each.cuts), *cuts], surface)
    blocks.append(block)
    try:
        renew(surface)
        yield block.received
    finally:
        blocks.remove(block)
        renew(surface)


def renew(surface: Surface) -> None:
    """Hang all cuts of the open blocks onto the model anew, so that they see what every edit leaves."""
    before = _junctions.pop(surface.model, None)
    if before is not None:
        before.remove()
    blocks = _blocks.get(surface.model)
    if blocks:
        junction = _junctions[surface.model] = Junction(surface, blocks)
        junction.put_on()


@dataclass(eq=False)
class _Block:
    cuts: tuple[Cut, ...]
    call: ForwardPass
    received: set[str] = field(default_factory=set)


# Of the blocks that are open on a model. Not part of its `State`, which a copy of the model would take along.
_blocks: WeakKeyDictionary[nn.Module, list[_Block]] = WeakKeyDictionary()
_junctions: WeakKeyDictionary[nn.Module, Junction] = WeakKeyDictionary()


@dataclass
class _Sender:
    label: str
    write: ActivationEdit
    call: ForwardPass


@dataclass
class _Flow:
    """What one run has shown so far.

    Attributes:
        changes: by sender, what it would add to the stream: replaced − own. Not of those from before the stream was
            last edited: these are in `carried`, by group, as the edits have left them.
        inner: by site (z, mlp_post), what it is in the run, and by sender how it would change.
        own_mlp: by group, what the MLP under way makes of the group's stream.
        received: by hook, the heads that receive, what they get, where that is another than their own, and the whole
            site as it is made from the run's own stream.
        into_mlp: what the MLP under way reads beyond the run's stream.
        busy: whether the model is asked for something on the way, which is not the run.
    """

    changes: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[Group, Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    inner: dict[str, tuple[Tensor, dict[int, Tensor]]] = field(default_factory=dict)
    own_mlp: dict[Group, Tensor] = field(default_factory=dict)
    received: dict[str, tuple[list[int], Tensor, Tensor, Tensor]] = field(default_factory=dict)
    into_mlp: Tensor | None = None
    read: dict[str, tuple[Tensor, int]] = field(
        default_factory=dict
    )  # by norm, what it reads, and how it was then
    left: Tensor | None = None  # the stream as the embeddings or the last block left it
    busy: bool = False


class Junction:
    """All edges that are cut in one model."""

    def __init__(self, surface: Surface, blocks: Sequence[_Block]) -> None:
        self._surface, self._blocks = surface, tuple(blocks)
        self._projections = Projections.of(surface)
        self._through_mlps = blocks[0].cuts[0].through == "mlps"
        self._senders: list[_Sender] = []
        self._at: dict[str, list[int]] = {}  # senders by hook
        self._groups: dict[tuple[str, int | None], Group] = {}  # by hook and head that receives
        self._last: dict[Group, int] = {}  # when a group is wanted for the last time
        self._labels: dict[Group, str] = {}
        self._layers = range(surface.n_layers)
        self._handle: Handle | None = None
        # Of a run that begins without the model being called.
        self._direct = _Flow()
        self._read()

    def _read(self) -> None:
        numbers: dict[tuple[object, ...], int] = {}
        groups: dict[tuple[str, int | None], set[int]] = {}
        for block in self._blocks:
            for cut in block.cuts:
                write = cut.sender
                key = (id(block), write.hook, write.heads, write.positions, write.replacement)
                number = numbers.setdefault(key, len(self._senders))
                if number == len(self._senders):
                    self._senders.append(_Sender(cut.label, write, block.call))
                    self._at.setdefault(write.hook, []).append(number)
                for head in _heads(cut.receiver, self._surface):
                    groups.setdefault((cut.receiver.hook, head), set()).add(number)
        for block in self._blocks:
            for cut in block.cuts:
                order = order_of(cut.receiver.kind.name, cut.receiver.layer, RECEIVERS)
                for head in _heads(cut.receiver, self._surface):
                    place = cut.receiver.hook, head
                    group = self._groups[place] = frozenset(groups[place])
                    self._last[group] = max(order, self._last.get(group, order))
                    self._labels[group] = cut.label

    def put_on(self) -> None:
        functions: list[tuple[str, Callable[[Tensor], Tensor | None]]] = [
            ("hook_embed", partial(self._embedding, "hook_embed")),
            ("hook_pos_embed", partial(self._embedding, "hook_pos_embed")),
        ]
        handles: list[Handle] = []
        for layer in self._layers:
            functions += [
                (_hook("resid_pre", layer), partial(self._before_attention, layer)),
                *((_hook(site, layer), partial(self._receive, site, layer)) for site in _BY_HEAD),
                (_hook("z", layer), partial(self._inside, "z", layer)),
                (_hook("attn_out", layer), partial(self._added, "attn_out", layer)),
                (_hook("resid_mid", layer), partial(self._between, layer)),
                (_hook("mlp_post", layer), partial(self._inside, "mlp_post", layer)),
                (_hook("mlp_out", layer), partial(self._added, "mlp_out", layer)),
                (_hook("resid_post", layer), partial(self._after, layer)),
            ]
        for hook, function in functions:
            if hook in self._surface.hooks:
                handles.append(self._surface.before(hook, function))
        for layer in self._layers:
            for norm in ("ln1", "ln2"):
                handle = self._surface.before_norm(norm, layer, partial(self._read_by_norm, norm))
                handles += [] if handle is None else [handle]
        for layer in self._layers:
            if (_hook("mlp_pre", layer), None) in self._groups:
                handles.append(self._surface.before_mlp(layer, partial(self._read_by_mlp, layer)))
        self._handle = Handles(*handles)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    # ---- In the order of a run. Each is called with what comes to its site.

    def _embedding(self, hook: str, x: Tensor) -> None:
        # A busy flow asks what hangs at this very hook, and comes here a second time.
        if hook == "hook_embed" and not self._frame.whole and not self._direct.busy:
            self._direct = _Flow()
        flow = self._flow()
        if flow is None:
            return
        own = self._through(flow, hook, x)
        flow.left = own if flow.left is None else flow.left + own
        flow.changes |= self._changes_of(flow, hook, own)

    def _before_attention(self, layer: int, x: Tensor) -> None:
        flow = self._flow()
        if flow is None:
            return
        if layer == self._layers[0] and flow.left is not None:
            flow.left = self._normalised(flow, "embed", None, flow.left, order_of("q", layer, RECEIVERS))
        wanted_later = max(self._last.values()) >= order_of("q", layer, RECEIVERS)
        if flow.left is not None and (flow.changes or flow.carried) and wanted_later:
            # What changed it on the way would change what passes by as well.
            label = self._blocks[0].cuts[0].label
            check_made(
                x, flow.left, label, f"what comes to block {layer} differs from what was handed on to it"
            )
        stream = self._stream(flow, _hook("resid_pre", layer), order_of("q", layer, RECEIVERS), x)
        wanted = {
            site: heads
            for site in _BY_HEAD
            if (heads := [head for hook, head in self._groups if hook == _hook(site, layer)])
        }
        groups = list(dict.fromkeys(self._groups[_hook(s, layer), h] for s in wanted for h in wanted[s]))
        if not groups:
            return
        changes = self._received(flow, groups, stream)
        projections = self._projections
        flow.busy = True
        try:
            # One by one: what hangs inside the norm may be of certain examples.
            normed = torch.stack([projections.norm(layer, stream + change) for change in changes])
            # Last, so that what somebody keeps of the norm is of the run.
            own = projections.norm(layer, stream.clone())
        finally:
            flow.busy = False
        changed = (changes != 0).any(-1)  # [group batch pos]
        for site, heads in wanted.items():
            hook = _hook(site, layer)
            at = [groups.index(self._groups[hook, head]) for head in heads]
            weight, bias = projections.by_head(site, layer)
            chosen = [int(head) for head in heads if head is not None]
            new = torch.einsum("hbpd,hde->bphe", normed[at], weight[chosen]) + bias[chosen]
            made = torch.einsum("bpd,hde->bphe", own, weight) + bias
            flow.received[hook] = chosen, new, changed[at].permute(1, 2, 0), made

    def _receive(self, site: str, layer: int, x: Tensor) -> Tensor | None:
        flow, hook = self._flow(), _hook(site, layer)
        if flow is None or hook not in flow.received:
            return None
        heads, new, changed, made = flow.received.pop(hook)
        label = self._labels[self._groups[hook, heads[0]]]
        check_made(x, made, label, f"{hook} differs from what ln1 and the weights make of the stream")
        found = x.clone()
        found[:, :, heads] = torch.where(changed[..., None], new.to(x.dtype), x[:, :, heads])
        self._has_received(hook)
        return found

    def _inside(self, site: str, layer: int, x: Tensor) -> None:
        flow, hook = self._flow(), _hook(site, layer)
        if flow is not None and hook in self._at:
            own = self._through(flow, hook, x)
            flow.inner[site] = own, self._changes_of(flow, hook, own)

    def _added(self, site: str, layer: int, x: Tensor) -> None:
        """At what a component adds to the stream, attn_out or mlp_out."""
        flow, hook = self._flow(), _hook(site, layer)
        if flow is None:
            return
        self._check_read(flow, "ln1" if site == "attn_out" else "ln2", layer)
        after = self._through(flow, hook, x)
        own, changes = flow.inner.pop(OUTPUTS[site], (None, {}))
        if own is not None:
            weight, bias = self._projections.outward(OUTPUTS[site], layer)
            made = own.flatten(2) @ weight
            label = self._senders[next(iter(changes))].label
            made = made if bias is None else made + bias
            check_made(x, made, label, f"{hook} differs from what the weights make of {OUTPUTS[site]}")
            moved = {number: change.flatten(2) @ weight for number, change in changes.items()}
            if after is x:
                flow.changes |= moved
            else:
                self._carry(flow, partial(self._through, flow, hook), x, after, moved)
        flow.changes |= self._changes_of(flow, hook, after)
        for group, theirs in flow.own_mlp.items() if site == "mlp_out" else ():
            # Where the MLP itself is cut off, it is not what it would make of the stream.
            cut = self._cut_at(group, layer, after)
            flow.carried[group] = flow.carried.get(group, 0) + (theirs - after).masked_fill(cut, 0)
        if site == "mlp_out":
            flow.own_mlp.clear()

    def _between(self, layer: int, x: Tensor) -> None:
        flow, hook = self._flow(), _hook("resid_mid", layer)
        if flow is None:
            return
        order, receiver = order_of("mlp_pre", layer, RECEIVERS), (_hook("mlp_pre", layer), None)
        groups = [group for group, last in self._last.items() if last > order] if self._through_mlps else []
        arriving = self._changes(flow, groups, x) if groups else None
        stream = self._normalised(flow, "resid_mid", layer, self._stream(flow, hook, order, x), order)
        if receiver in self._groups:
            (flow.into_mlp,) = self._received(flow, [self._groups[receiver]], stream)
        if arriving is None or _hook("mlp_out", layer) not in self._surface.hooks:
            return
        flow.busy = True
        try:
            for group, coming, leaving in zip(
                groups, arriving, self._changes(flow, groups, stream), strict=True
            ):
                if bool(coming.any()) or bool(leaving.any()):
                    flow.own_mlp[group] = self._projections.mlp(layer, x + coming, stream + leaving)
        finally:
            flow.busy = False

    def _read_by_norm(self, norm: str, x: Tensor) -> None:
        flow = self._flow()
        if flow is not None and not x.is_inference():
            flow.read.setdefault(norm, (x, x._version))

    def _check_read(self, flow: _Flow, norm: str, layer: int) -> None:
        """Refuse a hook of a norm that writes to what the norm reads: it changes the stream, past all that is seen."""
        x, version = flow.read.pop(norm, (None, 0))
        if x is not None and x._version != version:
            raise CircuitsError(
                f"{self._blocks[0].cuts[0].label}: a hook changes, in place, what comes to blocks.{layer}.{norm}, and "
                "with it the residual stream; let it return another tensor"
            )

    def _read_by_mlp(self, layer: int, x: Tensor) -> Tensor | None:
        flow = self._flow()
        if flow is None or flow.into_mlp is None:
            return None
        change, flow.into_mlp = flow.into_mlp, None
        self._has_received(_hook("mlp_pre", layer))
        return x + change

    def _after(self, layer: int, x: Tensor) -> Tensor | None:
        flow, hook = self._flow(), _hook("resid_post", layer)
        if flow is None:
            return None
        new = None
        if (hook, None) in self._groups:
            (change,) = self._received(flow, [self._groups[hook, None]], x)
            x = new = x + change
            self._has_received(hook)
        order = order_of("resid_post", layer, RECEIVERS)
        # Copied: a hook on the block may write to it in place.
        left = self._normalised(flow, "resid_post", layer, self._stream(flow, hook, order, x), order)
        flow.left = left.clone()
        if layer == self._layers[-1] and not self._frame.whole:
            self._direct = _Flow()
        return new

    # ---- What these share

    @property
    def _frame(self) -> RunState:
        return self._blocks[0].call.frame

    def _flow(self) -> _Flow | None:
        if self._blocks[0].call.state.suspended:
            return None
        frame = self._frame
        flow: _Flow = frame.known.setdefault(_FLOW, _Flow()) if frame.whole else self._direct
        return None if flow.busy else flow

    def _through(self, flow: _Flow, hook: str, x: Tensor) -> Tensor:
        """What goes on from a site, after all that hangs there."""
        flow.busy = True
        try:
            return self._surface.through(hook, x)
        finally:
            flow.busy = False

    def _stream(self, flow: _Flow, hook: str, order: int, x: Tensor) -> Tensor:
        """The run's stream as it goes on from a site, to where changes that pass by are taken along."""
        after = self._through(flow, hook, x)
        if after is not x:
            self._carry(flow, partial(self._through, flow, hook), x, after, flow.changes, order)
            flow.changes = {}
        return after

    def _normalised(self, flow: _Flow, site: str, layer: int | None, x: Tensor | None, order: int) -> Tensor:
        """The run's stream past the norm that stands on it there, through which changes go too; or just the stream."""
        assert x is not None
        flow.busy = True
        try:
            after = self._projections.onward(site, layer, x)
            if after is not x:
                self._carry(
                    flow, partial(self._projections.onward, site, layer), x, after, flow.changes, order
                )
                flow.changes = {}
        finally:
            flow.busy = False
        return after

    def _carry(
        self,
        flow: _Flow,
        onward: Callable[[Tensor], Tensor],
        x: Tensor,
        after: Tensor,
        changes: dict[int, Tensor],
        order: int | None = None,
    ) -> None:
        """What hangs at a site, or a norm that stands there, makes other changes of these, group by group.

        Args:
            onward: what the stream is past it.
            order: of the site, where it is of the stream itself; then what is carried already changes too.
        """
        for group, last in self._last.items():
            if order is not None and last < order:
                continue
            parts = [changes[number] for number in group if number in changes]
            if order is not None and group in flow.carried:
                parts.append(flow.carried[group])
            if parts:
                moved = onward(x + torch.stack([_like(part, x) for part in parts]).sum(0))
                rest = flow.carried.get(group, 0) if order is None else 0
                flow.carried[group] = rest + moved - after

    def _received(self, flow: _Flow, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """How what groups of receivers read differs from the run's stream, [group batch pos d_model]."""
        for number in frozenset().union(*groups) - flow.seen:
            sender = self._senders[number]
            raise CircuitsError(
                f"{sender.label}: this run did not pass {sender.write.hook}, which is to send; call the whole model"
            )
        return self._changes(flow, groups, stream)

    def _changes(self, flow: _Flow, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """The same, as far as the run has come."""
        numbers = list(flow.changes)
        found = stream.new_zeros(len(groups), *stream.shape)
        if numbers:
            member = stream.new_tensor([[number in group for number in numbers] for group in groups])
            changes = torch.stack([_like(flow.changes[number], stream) for number in numbers])
            found = torch.einsum("gs,sbpd->gbpd", member, changes)
        carried = [flow.carried.get(group) for group in groups]
        if any(one is not None for one in carried):
            none = stream.new_zeros(())
            found = found + torch.stack([_like(none if one is None else one, stream) for one in carried])
        return found

    def _changes_of(self, flow: _Flow, hook: str, own: Tensor) -> dict[int, Tensor]:
        """Of the senders at a site, what replaces them − what they are in the run."""
        found = {}
        for number in self._at.get(hook, ()):
            sender = self._senders[number]
            new, selected = replacement_for(sender.write, sender.call, own)
            found[number] = torch.where(selected, new - own, torch.zeros_like(own))
            flow.seen.add(number)
        return found

    def _cut_at(self, group: Group, layer: int, mlp_out: Tensor) -> Tensor:
        """Where a group is cut off from an MLP, boolean, broadcast to the stream."""
        found = torch.zeros((1, 1, 1), dtype=torch.bool, device=mlp_out.device)
        for number in group:
            sender = self._senders[number]
            if sender.write.layer == layer and sender.write.kind.name in ("mlp_post", "mlp_out"):
                state = sender.call.state
                found = found | sender.write.selected(mlp_out, state.rows, state.total)
        return found

    def _has_received(self, hook: str) -> None:
        for block in self._blocks:
            block.received.add(hook)


def _like(change: Tensor, stream: Tensor) -> Tensor:
    return change.to(stream.dtype).expand(stream.shape)


def _hook(site: str, layer: int) -> str:
    return KINDS[site].hook.format(layer)
