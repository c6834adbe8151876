"""Applies all cut edges of a run together: each receiver reads a stream in which its cut senders are replaced.

A receiver's input is the residual stream of the run plus the sum over its cut edges of (the sender's replacement − its
output in this run). Nothing else is changed: the receiver's output goes on as usual, to later receivers too. All edges
into a receiver that are not cut therefore carry what the edited run computes.

No second run is needed. The input of each site is read before any hook there. Edits and the user's hooks act on a
receiver's stream as they act on the run's: where hooks f change the stream x, a difference d that passes the site
becomes f(x + d) − f(x). Where a norm stands between a component's weights and the stream, f is that norm: the
differences of all senders before it that a receiver is cut off from pass it together.
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

#: Sites of senders and of receivers, with their order within a layer of serial blocks.
SENDERS = {"embed": -2, "pos_embed": -2, "z": 0, "attn_out": 1, "mlp_post": 2, "mlp_out": 3}
RECEIVERS = {"q": 0, "k": 0, "v": 0, "mlp_pre": 2, "resid_post": 4}
_PER_LAYER = 10
_BY_HEAD = ("q", "k", "v")
_RUN_KEY = "cut edges"


def order_of(name: str, layer: int | None, table: dict[str, int]) -> int:
    """Returns a site's place in the order of computation, by `SENDERS` or `receivers_of`."""
    return table[name] + (_PER_LAYER * layer if layer is not None else -_PER_LAYER)


def receivers_of(surface: Surface) -> dict[str, int]:
    """Returns the sites of receivers with their order within a layer of this model: where attention and MLP run in
    parallel, they read the same stream and neither hears the other.

    Raises `CircuitsError` for a model whose paths were not compared with a forward by hand.
    """
    surface.refuse_unproved_paths()
    return RECEIVERS | {"mlp_pre": RECEIVERS["q"]} if surface.parallel else RECEIVERS


Group = frozenset[int]  # numbers of the senders that a receiver is cut off from


def check_cuts(cuts: Sequence[Cut], surface: Surface) -> None:
    """Refuses cuts that cannot be one edit: an edge that is cut twice, or different `through`."""
    receivers = receivers_of(surface)
    # Sorted, so that a stream comes before its readers.
    cuts = sorted(cuts, key=lambda cut: order_of(cut.receiver.kind.name, cut.receiver.layer, receivers))
    ways = list(dict.fromkeys(cut.through for cut in cuts))
    if len(ways) > 1:
        raise CircuitsError(
            f"{cuts[0].label}: the paths of one run have one through=, here there are {' and '.join(map(repr, ways))}"
        )
    # Cuts by (part of a sender, receiving hook), with their heads; and by part, the cuts whose receiver is a stream.
    known: dict[tuple[object, ...], list[tuple[Cut, frozenset[int | None]]]] = {}
    streams: dict[object, list[Cut]] = {}
    for cut in cuts:
        order = order_of(cut.receiver.kind.name, cut.receiver.layer, receivers)
        heads = frozenset(_heads(cut.receiver, surface))
        for part in _parts(cut.sender, surface):
            places = known.setdefault((part, cut.receiver.hook), [])
            others = [(other, heads & there) for other, there in places if not heads.isdisjoint(there)]
            # All later receivers read a stream that receives, so the sender reaches them through it.
            for other in streams.get(part, ()):
                if order_of("resid_post", other.receiver.layer, receivers) < order:
                    others.append((other, heads))
            for other, shared in others:
                if not _disjoint(cut, other):
                    raise CircuitsError(
                        f"{cut.label}: the edge from {_sender_name(cut.sender)} to "
                        f"{_receiver_name(cut.receiver, min(shared, key=lambda head: head or 0))} is cut twice; give "
                        "each edge one source"
                    )
            places.append((cut, heads))
            if cut.receiver.kind.name == "resid_post":
                streams.setdefault(part, []).append(cut)


def _parts(sender: ActivationEdit, surface: Surface) -> list[tuple[str, int | None, int | None]]:
    """Returns the parts of a sender; two senders that share a part overlap there."""
    name, layer = sender.kind.name, sender.layer
    if name in ("z", "attn_out"):
        heads = range(surface.n_heads) if sender.heads is None else sender.heads
        return [("z", layer, head) for head in heads]
    return [("mlp_out" if name == "mlp_post" else name, layer, None)]


def _heads(receiver: Receiver, surface: Surface) -> Iterable[int | None]:
    if receiver.kind.name not in _BY_HEAD:
        return (None,)
    return range(surface.head_count(receiver.kind)) if receiver.heads is None else receiver.heads


def _disjoint(one: Cut, other: Cut) -> bool:
    """Tells whether two cuts of an edge are sure to be at different positions."""
    first, second = one.sender.positions, other.sender.positions
    if isinstance(first, tuple) and isinstance(second, tuple):
        # The length is unknown without a run, so a negative position may be any of the others.
        same_end = min(*first, *second) >= 0 or max(*first, *second) < 0
        return same_end and not set(first) & set(second)
    if isinstance(first, Snapshot) and isinstance(second, Snapshot) and first.shape == second.shape:
        return not bool((first.tensor.cpu() & second.tensor.cpu()).any())
    return False


def _sender_name(sender: ActivationEdit) -> str:
    heads = "" if sender.heads is None else f", heads {','.join(map(str, sender.heads))}"
    return (sender.kind.name if sender.layer is None else f"{sender.kind.name}.{sender.layer}") + heads


def _receiver_name(receiver: Receiver, head: int | None) -> str:
    return f"{receiver.kind.name}.{receiver.layer}" + ("" if head is None else f", head {head}")


@contextmanager
def cutting(surface: Surface, cuts: Sequence[Cut], call: ForwardPass) -> Iterator[set[str]]:
    """Cuts these edges too inside the block; yields a set that fills with the hooks at which something was received."""
    if not cuts:
        yield set()
        return
    block = _Block(tuple(cuts), call)
    blocks = _blocks.setdefault(surface.model, [])
    check_cuts([*(cut for open_block in blocks for cut in open_block.cuts), *cuts], surface)
    blocks.append(block)
    try:
        renew(surface)
        yield block.received
    finally:
        blocks.remove(block)
        renew(surface)


def renew(surface: Surface) -> None:
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


@dataclass(eq=False)
class _Block:
    cuts: tuple[Cut, ...]
    call: ForwardPass
    received: set[str] = field(default_factory=set)


# Open blocks by model, and the hooks that serve them. Not part of its `State`, which a copy of the model would take
# along.
_blocks: WeakKeyDictionary[nn.Module, list[_Block]] = WeakKeyDictionary()
_cut_hooks: WeakKeyDictionary[nn.Module, CutHooks] = WeakKeyDictionary()


@dataclass
class _Sender:
    label: str
    write: ActivationEdit
    call: ForwardPass


@dataclass
class _CutRun:
    """The differences that one run has collected so far.

    Attributes:
        changes: by sender, the difference to the stream: replacement − output in the run. Those from before the last
            edit of the stream are in `carried`, by group, as the edits have left them.
        inner: by site (z, mlp_post), its value in the run, and by sender the difference to it.
        group_mlp_out: by group, the output of the current MLP on the group's stream.
        received: by hook, the heads that receive, their new values, where these differ from the run's (boolean), and
            the product of the whole site, as computed from the run's stream, with `_signs`.
        into_mlp: the difference of the current MLP's input from the run's stream.
        busy: whether modules are called now for another stream than the run's.
    """

    changes: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[Group, Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    inner: dict[str, tuple[Tensor, dict[int, Tensor]]] = field(default_factory=dict)
    group_mlp_out: dict[Group, Tensor] = field(default_factory=dict)
    received: dict[str, tuple[list[int], Tensor, Tensor, Tensor]] = field(default_factory=dict)
    into_mlp: Tensor | None = None
    read: dict[str, tuple[Tensor, int]] = field(
        default_factory=dict
    )  # by norm: its input, and the version of that
    stack: Tensor | None = None  # copies of differences, in the order of `stacked`
    stacked: list[int] = field(default_factory=list)
    left: Tensor | None = None  # the stream as the embeddings or the last block left it
    busy: bool = False


class CutHooks:
    """The hooks that carry out all cut edges of one model."""

    def __init__(self, surface: Surface, blocks: Sequence[_Block]) -> None:
        self._surface, self._blocks = surface, tuple(blocks)
        self._projections = Projections.of(surface)
        self._receivers = receivers_of(surface)
        self._through_mlps = blocks[0].cuts[0].through == "mlps"
        self._senders: list[_Sender] = []
        self._at: dict[str, list[int]] = {}  # senders by hook
        self._groups: dict[tuple[str, int | None], Group] = {}  # by receiving hook and head
        self._last: dict[Group, int] = {}  # order of the last receiver of a group
        self._labels: dict[Group, str] = {}
        self._layers = range(surface.n_layers)
        self._handle: Handle | None = None
        # The run of a model whose own __call__ was bypassed.
        self._direct = _CutRun()
        self._read()

    def _read(self) -> None:
        numbers: dict[tuple[object, ...], int] = {}
        groups: dict[tuple[str, int | None], set[int]] = {}
        for block in self._blocks:
            # Replacements are slow to compare by content, and many cuts share one sender.
            known: dict[int, int] = {}
            for cut in block.cuts:
                write = cut.sender
                number = known.get(id(write), -1)
                if number < 0:
                    key = (id(block), write.hook, write.heads, write.positions, write.replacement)
                    number = known[id(write)] = numbers.setdefault(key, len(self._senders))
                if number == len(self._senders):
                    self._senders.append(_Sender(cut.label, write, block.call))
                    self._at.setdefault(write.hook, []).append(number)
                for head in _heads(cut.receiver, self._surface):
                    groups.setdefault((cut.receiver.hook, head), set()).add(number)
        self._groups = {place: frozenset(numbers_there) for place, numbers_there in groups.items()}
        for block in self._blocks:
            for cut in block.cuts:
                order = self._order(cut.receiver.kind.name, cut.receiver.layer)
                for head in _heads(cut.receiver, self._surface):
                    group = self._groups[cut.receiver.hook, head]
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

    # ---- Hook functions in the order of a run. Each gets the input of its site.

    def _embedding(self, hook: str, x: Tensor) -> None:
        # A busy run asks what hangs at this very hook, and comes here a second time.
        if hook == "hook_embed" and not self._frame.whole and not self._direct.busy:
            self._direct = _CutRun()
        run = self._current_run()
        if run is None:
            return
        output = self._through(run, hook, x)
        run.left = output if run.left is None else run.left + output
        run.changes |= self._changes_of(run, hook, output)

    def _before_attention(self, layer: int, x: Tensor) -> None:
        run = self._current_run()
        if run is None:
            return
        if layer == self._layers[0] and run.left is not None:
            run.left = self._normalised(run, "embed", None, run.left, self._order("q", layer))
        wanted_later = max(self._last.values()) >= self._order("q", layer)
        if run.left is not None and (run.changes or run.carried) and wanted_later:
            # Whatever changed the stream between blocks would change the differences as well.
            label = self._blocks[0].cuts[0].label
            check_made(
                x, run.left, label, f"what comes to block {layer} differs from what was handed on to it"
            )
        beyond_mlp = self._through_mlp(layer) if self._surface.parallel else []
        arriving = self._changes(run, beyond_mlp, x)
        stream = self._stream(run, _hook("resid_pre", layer), self._order("q", layer), x)
        if self._surface.parallel:
            self._before_mlp(run, layer, beyond_mlp, x, arriving, stream)
        heads_by_site = {
            site: heads
            for site in _BY_HEAD
            if (heads := [head for hook, head in self._groups if hook == _hook(site, layer)])
        }
        groups = list(
            dict.fromkeys(self._groups[_hook(s, layer), h] for s in heads_by_site for h in heads_by_site[s])
        )
        if not groups:
            return
        changes = self._received(run, groups, stream)
        projections = self._projections
        run.busy = True
        try:
            # One by one: hooks inside the norm may depend on the examples in the batch.
            normed = torch.stack([projections.norm(layer, stream + change) for change in changes])
            # Last, so that a user's hook that keeps the norm's output keeps the run's.
            normed_run = projections.norm(layer, stream.clone())
        finally:
            run.busy = False
        changed = changes.any(-1)  # [group batch pos]
        for site, heads in heads_by_site.items():
            hook = _hook(site, layer)
            at = [groups.index(self._groups[hook, head]) for head in heads]
            weight, bias = projections.by_head(site, layer)
            chosen = [int(head) for head in heads if head is not None]
            new = torch.einsum("hbpd,hde->bphe", normed[at], weight[chosen]) + bias[chosen]
            signs = _signs(bias)
            computed = torch.einsum("bpd,hd->bph", normed_run, weight @ signs) + bias @ signs
            run.received[hook] = chosen, new, changed[at].permute(1, 2, 0), computed

    def _receive(self, site: str, layer: int, x: Tensor) -> Tensor | None:
        run, hook = self._current_run(), _hook(site, layer)
        if run is None or hook not in run.received:
            return None
        heads, new, changed, computed = run.received.pop(hook)
        label = self._labels[self._groups[hook, heads[0]]]
        check_made(
            x @ _signs(x), computed, label, f"{hook} differs from what ln1 and the weights make of the stream"
        )
        output = x.clone()
        output[:, :, heads] = torch.where(changed[..., None], new.to(x.dtype), x[:, :, heads])
        self._has_received(hook)
        return output

    def _inside(self, site: str, layer: int, x: Tensor) -> None:
        run, hook = self._current_run(), _hook(site, layer)
        if run is not None and hook in self._at:
            output = self._through(run, hook, x)
            run.inner[site] = output, self._changes_of(run, hook, output)

    def _added(self, site: str, layer: int, x: Tensor) -> None:
        """Collects the differences at a component's output, attn_out or mlp_out."""
        run, hook = self._current_run(), _hook(site, layer)
        if run is None:
            return
        self._check_read(run, "ln1" if site == "attn_out" else "ln2", layer)
        after = self._through(run, hook, x)
        inner, changes = run.inner.pop(OUTPUTS[site], (None, {}))
        if inner is not None:
            weight, bias = self._projections.outward(OUTPUTS[site], layer)
            output = inner.flatten(2) @ weight
            label = self._senders[next(iter(changes))].label
            output = output if bias is None else output + bias
            added = self._added_by(run, site, layer, output)
            check_made(x, added, label, f"{hook} differs from what the weights make of {OUTPUTS[site]}")
            differences = {
                number: self._outward(number, change, weight) for number, change in changes.items()
            }
            if added is not output:
                # From the output computed here, so that what has not changed stays exactly as it is.
                whole = partial(self._to_stream, run, site, layer)
                self._carry(run, whole, output, whole(output), differences)
            elif after is x:
                run.changes |= differences
            else:
                self._carry(run, partial(self._through, run, hook), x, after, differences)
        run.changes |= self._changes_of(run, hook, after)
        for group, mlp_out in run.group_mlp_out.items() if site == "mlp_out" else ():
            # Where the MLP itself is a cut sender, its output does not depend on the group's stream.
            cut = self._cut_at(group, layer, after)
            run.carried[group] = run.carried.get(group, 0) + (mlp_out - after).masked_fill(cut, 0)
        if site == "mlp_out":
            run.group_mlp_out.clear()

    def _between(self, layer: int, x: Tensor) -> None:
        run, hook = self._current_run(), _hook("resid_mid", layer)
        if run is None:
            return
        order, groups = self._order("mlp_pre", layer), self._through_mlp(layer)
        arriving = self._changes(run, groups, x)
        stream = self._normalised(run, "resid_mid", layer, self._stream(run, hook, order, x), order)
        self._before_mlp(run, layer, groups, x, arriving, stream)

    def _through_mlp(self, layer: int) -> list[Group]:
        """Returns the groups on whose streams the MLP of a layer is recomputed."""
        order = self._order("mlp_pre", layer)
        if not self._through_mlps or _hook("mlp_out", layer) not in self._surface.hooks:
            return []
        return [group for group, last in self._last.items() if last > order]

    def _before_mlp(
        self, run: _CutRun, layer: int, groups: Sequence[Group], x: Tensor, arriving: Tensor, stream: Tensor
    ) -> None:
        """Prepares what the MLP of a layer receives, and its outputs on the streams of some groups.

        Args:
            x: the stream that it reads, before the hooks there; `arriving` are the groups' differences.
            stream: the same after them.
        """
        receiver = _hook("mlp_pre", layer), None
        if receiver in self._groups:
            (run.into_mlp,) = self._received(run, [self._groups[receiver]], stream)
        run.busy = True
        try:
            for group, coming, leaving in zip(
                groups, arriving, self._changes(run, groups, stream), strict=True
            ):
                if bool(coming.any()) or bool(leaving.any()):
                    run.group_mlp_out[group] = self._projections.mlp(layer, x + coming, stream + leaving)
        finally:
            run.busy = False

    def _read_by_norm(self, norm: str, x: Tensor) -> None:
        run = self._current_run()
        if run is not None and not x.is_inference():
            run.read.setdefault(norm, (x, x._version))

    def _check_read(self, run: _CutRun, norm: str, layer: int) -> None:
        """Refuses a hook of a norm that writes to its input, which would change the stream unseen."""
        x, version = run.read.pop(norm, (None, 0))
        if x is not None and x._version != version:
            raise CircuitsError(
                f"{self._blocks[0].cuts[0].label}: a hook changes, in place, what comes to blocks.{layer}.{norm}, and "
                "with it the residual stream; let it return another tensor"
            )

    def _read_by_mlp(self, layer: int, x: Tensor) -> Tensor | None:
        run = self._current_run()
        if run is None or run.into_mlp is None:
            return None
        change, run.into_mlp = run.into_mlp, None
        self._has_received(_hook("mlp_pre", layer))
        return x + change

    def _after(self, layer: int, x: Tensor) -> Tensor | None:
        run, hook = self._current_run(), _hook("resid_post", layer)
        if run is None:
            return None
        new = None
        if (hook, None) in self._groups:
            (change,) = self._received(run, [self._groups[hook, None]], x)
            x = new = x + change
            self._has_received(hook)
        order = self._order("resid_post", layer)
        # Copied, as a hook on the block may write to it in place.
        left = self._normalised(run, "resid_post", layer, self._stream(run, hook, order, x), order)
        run.left = left.clone()
        if layer == self._layers[-1] and not self._frame.whole:
            self._direct = _CutRun()
        return new

    # ---- Helpers

    def _order(self, receiver: str, layer: int) -> int:
        return order_of(receiver, layer, self._receivers)

    @property
    def _frame(self) -> RunState:
        return self._blocks[0].call.frame

    def _current_run(self) -> _CutRun | None:
        if self._blocks[0].call.state.suspended:
            return None
        frame = self._frame
        run: _CutRun = frame.known.setdefault(_RUN_KEY, _CutRun()) if frame.whole else self._direct
        return None if run.busy else run

    def _through(self, run: _CutRun, hook: str, x: Tensor) -> Tensor:
        """Returns the activation after all hooks at a site."""
        run.busy = True
        try:
            return self._surface.through(hook, x)
        finally:
            run.busy = False

    def _added_by(self, run: _CutRun, site: str, layer: int, output: Tensor) -> Tensor:
        """Returns what comes to the hooks at attn_out or mlp_out of a sublayer's output; the same object where no norm
        stands between.
        """
        run.busy = True
        try:
            return self._projections.added(site, layer, output)
        finally:
            run.busy = False

    def _to_stream(self, run: _CutRun, site: str, layer: int, output: Tensor) -> Tensor:
        """Returns what a sublayer's output adds to the stream, past its norm and the hooks at attn_out or mlp_out."""
        return self._through(run, _hook(site, layer), self._added_by(run, site, layer, output))

    def _stream(self, run: _CutRun, hook: str, order: int, x: Tensor) -> Tensor:
        """Returns the run's stream after a site; where hooks change it there, the collected differences change too."""
        after = self._through(run, hook, x)
        if after is not x:
            self._carry(run, partial(self._through, run, hook), x, after, run.changes, order)
            run.changes = {}
        return after

    def _normalised(self, run: _CutRun, site: str, layer: int | None, x: Tensor | None, order: int) -> Tensor:
        """Returns the run's stream after the norm on it (post-norm models), to which the differences are adapted; else
        the stream.
        """
        assert x is not None
        run.busy = True
        try:
            after = self._projections.onward(site, layer, x)
            if after is not x:
                self._carry(run, partial(self._projections.onward, site, layer), x, after, run.changes, order)
                run.changes = {}
        finally:
            run.busy = False
        return after

    def _carry(
        self,
        run: _CutRun,
        onward: Callable[[Tensor], Tensor],
        x: Tensor,
        after: Tensor,
        changes: dict[int, Tensor],
        order: int | None = None,
    ) -> None:
        """Adapts differences, group by group, to a function f of the stream or of what is added to it: d becomes
        f(x + d) − f(x).

        Args:
            onward: the function f (hooks, a norm, or a norm and the hooks after it); `after` is f(x).
            order: order of the site, where it is on the stream itself; then `carried` is adapted too.
        """
        for group, last in self._last.items():
            if order is not None and last < order:
                continue
            parts = [changes[number] for number in group if number in changes]
            if order is not None and group in run.carried:
                parts.append(run.carried[group])
            if parts:
                onward_stream = onward(x + torch.stack([_like(part, x) for part in parts]).sum(0))
                rest = run.carried.get(group, 0) if order is None else 0
                run.carried[group] = rest + onward_stream - after

    def _received(self, run: _CutRun, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the differences between the streams that groups of receivers read and the run's, [group batch pos
        d_model].
        """
        for number in frozenset().union(*groups) - run.seen:
            sender = self._senders[number]
            raise CircuitsError(
                f"{sender.label}: this run did not pass {sender.write.hook}, which is to send; call the whole model"
            )
        return self._changes(run, groups, stream)

    def _changes(self, run: _CutRun, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the same differences, of the senders that the run has passed so far."""
        numbers = list(run.changes)
        differences = stream.new_zeros(len(groups), *stream.shape)
        if not groups:
            return differences
        if numbers:
            stacked, columns = self._stacked(run, numbers, stream)
            member = stream.new_tensor([[number in group for number in columns] for group in groups])
            differences = torch.einsum("gs,sbpd->gbpd", member, stacked)
        carried = [run.carried.get(group) for group in groups]
        if any(one is not None for one in carried):
            none = stream.new_zeros(())
            differences = differences + torch.stack(
                [_like(none if one is None else one, stream) for one in carried]
            )
        return differences

    def _stacked(self, run: _CutRun, numbers: list[int], stream: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Returns the differences of some senders [sender batch pos d_model], and whose they are."""
        if run.stack is None:
            run.stack = stream.new_empty(len(self._senders), *stream.shape)
        if torch.is_grad_enabled() or run.stack.dtype != stream.dtype:
            return torch.stack([_like(run.changes[number], stream) for number in numbers]), numbers
        # Each is copied once in a run, and not for every receiver.
        for number in numbers:
            if number not in run.stacked:
                run.stack[len(run.stacked)] = run.changes[number]
                run.stacked.append(number)
        # The edits that the stream has passed have taken some along.
        return run.stack[: len(run.stacked)], [
            number if number in run.changes else -1 for number in run.stacked
        ]

    def _changes_of(self, run: _CutRun, hook: str, output: Tensor) -> dict[int, Tensor]:
        """Returns, by sender at a site, its replacement − its output in the run."""
        differences = {}
        for number in self._at.get(hook, ()):
            sender = self._senders[number]
            new, selected = replacement_for(sender.write, sender.call, output)
            differences[number] = torch.where(selected, new - output, torch.zeros_like(output))
            run.seen.add(number)
        return differences

    def _outward(self, number: int, change: Tensor, weight: Tensor) -> Tensor:
        """Returns what a difference at z or mlp_post adds to the stream, by the rows of the weights that it meets."""
        heads = self._senders[number].write.heads
        if heads is None:
            return change.flatten(2) @ weight
        at = list(heads)
        return change[:, :, at].flatten(2) @ weight.unflatten(0, (change.shape[2], -1))[at].flatten(0, 1)

    def _cut_at(self, group: Group, layer: int, mlp_out: Tensor) -> Tensor:
        """Tells where a group is cut off from an MLP, boolean, broadcast to the stream."""
        mask = torch.zeros((1, 1, 1), dtype=torch.bool, device=mlp_out.device)
        for number in group:
            sender = self._senders[number]
            if sender.write.layer == layer and sender.write.kind.name in ("mlp_post", "mlp_out"):
                state = sender.call.state
                mask = mask | sender.write.selected(
                    mlp_out, state.rows, state.total, sender.call.frame.window
                )
        return mask

    def _has_received(self, hook: str) -> None:
        for block in self._blocks:
            block.received.add(hook)


def _like(change: Tensor, stream: Tensor) -> Tensor:
    return change.to(stream.dtype).expand(stream.shape)


def _signs(x: Tensor) -> Tensor:
    """Returns a fixed vector of random signs: products with it tell two activations apart, at a fraction of the cost of
    computing both.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (x.shape[-1],), generator=generator) * 2 - 1
    return signs.to(dtype=x.dtype, device=x.device)


def _hook(site: str, layer: int) -> str:
    return KINDS[site].hook.format(layer)
