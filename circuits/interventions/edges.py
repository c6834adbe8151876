"""Applies all patched edges of a run together: each receiver reads a stream in which its senders are replaced.

A receiver's input is the residual stream of the run plus the sum over its patched edges of (the sender's replacement −
its output in this run). Nothing else is changed: the receiver's output goes on as usual, to later receivers too. All
other edges into a receiver therefore carry what the edited run computes.

No second run is needed. The input of each site is read before any hook there. Edits and the user's hooks act on a
receiver's stream as they act on the run's: where hooks f change the stream x, a difference d that passes the site
becomes f(x + d) − f(x). Where a norm stands between a component's weights and the stream, f is that norm: the
differences of all senders before it whose edges into a receiver are patched pass it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit
from circuits.interventions.forward_pass import ForwardPass, replacement_for
from circuits.interventions.paths import BY_HEAD, check_edges, order_of, receivers_of, receiving_heads
from circuits.interventions.replacements import FromTensors, Zero
from circuits.model.contexts import model_block
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle, Handles
from circuits.model.projections import OUTPUTS, Projections, check_made
from circuits.model.sites import KINDS
from circuits.tensors import Span

Group = frozenset[int]  # numbers of the senders whose edges into a receiver are patched


@dataclass
class Sender:
    """What a patched edge replaces, and the forward pass that it belongs to."""

    label: str
    write: ActivationEdit
    call: ForwardPass


class EdgePlan:
    """The patched edges of one model, by sender and by receiver.

    Attributes:
        senders: by number.
        at: numbers of the senders at a hook.
        groups: by receiving hook and head, the senders that are replaced for it.
        heads: the receiving heads of a hook, in order; None where a receiver has no heads.
        last: by group, the order of its last receiver.
        zeroes: whether some sender is replaced by zeros.
    """

    def __init__(self, surface: HookedModel, calls: Sequence[ForwardPass]) -> None:
        """Numbers the senders; finds which are replaced for each receiving head, and each group's last receiver."""
        self._surface, self._receivers = surface, receivers_of(surface)
        self.senders: list[Sender] = []
        self.at: dict[str, list[int]] = {}
        self.last: dict[Group, int] = {}
        self._labels: dict[Group, str] = {}
        numbers: dict[tuple[object, ...], int] = {}
        groups: dict[tuple[str, int | None], set[int]] = {}
        # By place, its order and the label of one of the edges there.
        places: dict[tuple[str, int | None], tuple[int, str]] = {}
        for call in calls:
            # Replacements are slow to compare by content, and many edges share one sender.
            known: dict[int, int] = {}
            for edge in call.edges:
                write, receiver = edge.sender, edge.receiver
                number = known.get(id(write), -1)
                if number < 0:
                    key = (id(call), write.hook, write.heads, write.positions, write.replacement)
                    number = known[id(write)] = numbers.setdefault(key, len(self.senders))
                if number == len(self.senders):
                    self.senders.append(Sender(edge.label, write, call))
                    self.at.setdefault(write.hook, []).append(number)
                about = self.order(receiver.kind.name, receiver.layer), edge.label
                for head in receiving_heads(receiver, self._surface):
                    place = receiver.hook, head
                    groups.setdefault(place, set()).add(number)
                    places[place] = about
        self.zeroes = any(_zeroes(sender.write) for sender in self.senders)
        self.groups: dict[tuple[str, int | None], Group] = {
            place: frozenset(numbers_there) for place, numbers_there in groups.items()
        }
        self.heads: dict[str, list[int | None]] = {}
        for hook, head in self.groups:
            self.heads.setdefault(hook, []).append(head)
        for heads in self.heads.values():
            # In their order, so that all heads of a layer are a slice of its weights and not a copy.
            heads.sort(key=lambda head: -1 if head is None else head)
        for place, (order, label) in places.items():
            group = self.groups[place]
            self.last[group] = max(order, self.last.get(group, order))
            self._labels[group] = label

    def order(self, receiver: str, layer: int) -> int:
        """Returns where a receiver stands in the order of a run."""
        return order_of(receiver, layer, self._receivers)

    def label(self, hook: str, head: int | None) -> str:
        """Returns the label of one of the edges into a receiving head."""
        return self._labels[self.groups[hook, head]]

    def replaced_at(self, group: Group, layer: int, mlp_out: Tensor) -> Tensor:
        """Tells where an MLP's output is replaced for a group, boolean, broadcast to the stream."""
        mask = torch.zeros((1, 1, 1), dtype=torch.bool, device=mlp_out.device)
        for number in group:
            sender = self.senders[number]
            if sender.write.layer == layer and sender.write.kind.name in ("mlp_post", "mlp_out"):
                state = sender.call.state
                mask = mask | sender.write.selected(
                    mlp_out, state.rows, state.total, sender.call.run.decode_step
                )
        return mask


def _zeroes(write: ActivationEdit) -> bool:
    """Tells whether an edit writes zeros, as `Zero` or as tensors of them."""
    given = write.replacement
    if isinstance(given, FromTensors):
        return not any(bool(x.tensor.any()) for hook, x in given.activations if hook == write.hook)
    return isinstance(given, Zero)


def hook_at(site: str, layer: int) -> str:
    """Returns the hook of a site in a layer."""
    return KINDS[site].hook.format(layer)


@dataclass
class EdgeRun:
    """The differences that one run has collected so far.

    It holds tensors and no plan, which refers to the forward pass that keeps this: they would hold each other.

    Attributes:
        changes: by sender, the difference to the stream: replacement − output in the run. Those from before the last
            edit of the stream are in `carried`, by group, as the edits have left them.
        seen: the senders that the run has passed.
        inner: by site (z, mlp_post), its value in the run, and by sender the difference to it.
        group_mlp_out: by group, the output of the current MLP on the group's stream.
        received: by hook, the heads that receive, their new values, where these differ from the run's (boolean), and
            the run's values as computed from its stream.
        into_mlp: the difference of the current MLP's input from the run's stream.
        left: the stream as the embeddings or the last block left it.
        positions: what a shortformer adds to all that queries and keys read.
        busy: whether modules are called now for another stream than the run's.
    """

    changes: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[Group, Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    inner: dict[str, tuple[Tensor, dict[int, Tensor]]] = field(default_factory=dict)
    group_mlp_out: dict[Group, Tensor] = field(default_factory=dict)
    received: dict[str, tuple[slice | list[int], Tensor, Tensor, Tensor]] = field(default_factory=dict)
    into_mlp: Tensor | None = None
    left: Tensor | None = None
    positions: Tensor | None = None
    busy: bool = False

    @model_block
    def aside(self) -> Iterator[None]:
        """Lets modules be called inside the block for another stream than the run's."""
        busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = busy

    def changes_of(self, plan: EdgePlan, hook: str, output: Tensor) -> dict[int, Tensor]:
        """Returns, by sender at a site, its replacement − its output in the run."""
        differences = {}
        for number in plan.at.get(hook, ()):
            sender = plan.senders[number]
            new, selected = replacement_for(sender.write, sender.call, output)
            differences[number] = torch.where(selected, new - output, torch.zeros_like(output))
            self.seen.add(number)
            # In a part of a sweep's examples, prompts may all be shorter than those of other parts.
            if isinstance(sender.write.positions, Span) and sender.call.state.rows is None:
                reached = sender.call.reached if bool(selected.any()) else sender.call.missed
                reached.add(id(sender.write))
        return differences

    def carry(
        self,
        plan: EdgePlan,
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
        for group, last in plan.last.items():
            if order is not None and last < order:
                continue
            parts = [changes[number] for number in group if number in changes]
            if order is not None and group in self.carried:
                parts.append(self.carried[group])
            if parts:
                difference = torch.stack([_like(part, x) for part in parts]).sum(0)
                difference = _settled(difference, x) if plan.zeroes else difference
                before = self.carried.get(group, 0) if order is None else 0
                self.carried[group] = before + onward(x + difference) - after

    def for_receivers(self, plan: EdgePlan, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the differences between the streams that groups of receivers read and the run's, [group batch pos
        d_model]; refuses senders that the run has not passed.
        """
        for number in frozenset().union(*groups) - self.seen:
            sender = plan.senders[number]
            raise CircuitsError(
                f"{sender.label}: this run did not pass {sender.write.hook}, which is to send; call the whole model"
            )
        return self.differences(plan, groups, stream)

    def differences(self, plan: EdgePlan, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the same differences, of the senders that the run has passed so far."""
        differences = stream.new_zeros(len(groups), *stream.shape)
        if groups and self.changes:
            changes = torch.stack([_like(change, stream) for change in self.changes.values()])
            member = stream.new_tensor([[number in group for number in self.changes] for group in groups])
            differences = torch.einsum("gs,sbpd->gbpd", member, changes)
        carried = [self.carried.get(group) for group in groups]
        if any(one is not None for one in carried):
            none = stream.new_zeros(())
            differences = differences + torch.stack(
                [_like(none if one is None else one, stream) for one in carried]
            )
        return _settled(differences, stream) if plan.zeroes else differences


def _settled(differences: Tensor, stream: Tensor) -> Tensor:
    """Returns differences that leave nothing of a stream [... pos d_model] where they leave its rounding, which a norm
    would make as large as any stream.
    """
    left, size = ((x.abs().amax(-1, keepdim=True)) for x in (stream + differences, stream))
    return torch.where(left <= 16 * torch.finfo(stream.dtype).eps * size, -stream, differences)


def _like(change: Tensor, stream: Tensor) -> Tensor:
    return change.to(stream.dtype).expand(stream.shape)


_RUN_KEY = "patched edges"


class EdgeHooks:
    """The hooks that carry out all patched edges of one model."""

    def __init__(self, surface: HookedModel, calls: Sequence[ForwardPass]) -> None:
        """Plans the senders and receivers; no hook is put on yet."""
        self._surface, self._calls = surface, tuple(calls)
        self._projections = Projections.of(surface)
        self._through_mlps = calls[0].edges[0].through == "mlps"
        self._plan = EdgePlan(surface, calls)
        self._layers = range(surface.n_layers)
        self._handle: Handle | None = None

    def register(self) -> None:
        """Puts hooks onto every place where senders' changes arise, pass on or are received."""
        functions: list[tuple[str, Callable[[Tensor], Tensor | None]]] = [
            ("hook_embed", partial(self._embedding, "hook_embed")),
            ("hook_pos_embed", partial(self._embedding, "hook_pos_embed")),
        ]
        handles: list[Handle] = []
        for layer in self._layers:
            functions += [
                (hook_at("resid_pre", layer), partial(self._before_attention, layer)),
                *((hook_at(site, layer), partial(self._receive, site, layer)) for site in BY_HEAD),
                (hook_at("z", layer), partial(self._inside, "z", layer)),
                (hook_at("attn_out", layer), partial(self._added, "attn_out", layer)),
                (hook_at("resid_mid", layer), partial(self._between, layer)),
                (hook_at("mlp_post", layer), partial(self._inside, "mlp_post", layer)),
                (hook_at("mlp_out", layer), partial(self._added, "mlp_out", layer)),
                (hook_at("resid_post", layer), partial(self._after, layer)),
            ]
        for hook, function in functions:
            if hook in self._surface.hooks:
                handles.append(self._surface.before(hook, function))
        for layer in self._layers:
            if (hook_at("mlp_pre", layer), None) in self._plan.groups:
                handles.append(self._surface.before_mlp(layer, partial(self._read_by_mlp, layer)))
        self._handle = Handles(*handles)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    # ---- Hook functions in the order of a run. Each gets the input of its site.

    def _embedding(self, hook: str, x: Tensor) -> None:
        run = self._current_run()
        if run is None:
            return
        output = self._after_hooks(run, hook, x)
        if hook == "hook_pos_embed" and "pos_embed" not in self._surface.embeddings:
            run.positions = output
            return
        run.left = output if run.left is None else run.left + output
        run.changes |= run.changes_of(self._plan, hook, output)

    def _before_attention(self, layer: int, x: Tensor) -> None:
        """Computes what receivers at q, k and v of a layer get of the stream with the senders' changes.

        It is written when their hooks fire; see `_receive`.
        """
        run = self._current_run()
        if run is None:
            return
        if layer == self._layers[0] and run.left is not None:
            run.left = self._normalised(run, "embed", None, run.left, self._plan.order("q", layer))
        wanted_later = max(self._plan.last.values()) >= self._plan.order("q", layer)
        if run.left is not None and (run.changes or run.carried) and wanted_later:
            # Whatever changed the stream between blocks would change the differences as well.
            label = self._calls[0].edges[0].label
            check_made(
                x, run.left, label, f"what comes to block {layer} differs from what was handed on to it"
            )
        beyond_mlp = self._groups_past_mlp(layer) if self._surface.parallel else []
        arriving = run.differences(self._plan, beyond_mlp, x)
        stream = self._stream(run, hook_at("resid_pre", layer), self._plan.order("q", layer), x)
        if self._surface.parallel:
            self._before_mlp(run, layer, beyond_mlp, x, arriving, stream)
        heads_by_site = {
            site: heads for site in BY_HEAD if (heads := self._plan.heads.get(hook_at(site, layer)))
        }
        groups: list[Group] = []
        for site, heads in heads_by_site.items():
            hook = hook_at(site, layer)
            groups += [self._plan.groups[hook, head] for head in heads]
        groups = list(dict.fromkeys(groups))
        if not groups:
            return
        changes = run.for_receivers(self._plan, groups, stream)
        projections = self._projections
        with run.aside():
            # One by one: hooks inside the norm may depend on the examples in the batch.
            normed = torch.stack([projections.norm(layer, one) for one in stream + changes])
            # Last, so that a user's hook that keeps the norm's output keeps the run's.
            normed_run = projections.norm(layer, stream.clone())
        # [group batch pos]; `any` of floats is much slower, and NaN counts as a change here too.
        changed = (changes.detach().amax(-1) != 0) | (changes.detach().amin(-1) != 0)
        for site, heads in heads_by_site.items():
            hook = hook_at(site, layer)
            at = _rows([groups.index(self._plan.groups[hook, head]) for head in heads])
            weight, bias = projections.by_head(site, layer)
            of_heads = _rows([int(head) for head in heads if head is not None])
            weight, bias = weight[of_heads], bias[of_heads]
            aside = 0 if run.positions is None or site == "v" else run.positions
            new, computed = (_read_by(one + aside, weight, bias) for one in (normed[at], normed_run[None]))
            run.received[hook] = of_heads, new, changed[at].permute(1, 2, 0), computed

    def _receive(self, site: str, layer: int, x: Tensor) -> Tensor | None:
        """Returns q, k or v of a layer with the heads that receive computed anew; `None` where nothing is received."""
        run, hook = self._current_run(), hook_at(site, layer)
        if run is None or hook not in run.received:
            return None
        at, new, changed, computed = run.received.pop(hook)
        new, same = new.to(x.dtype), x[:, :, at]
        label = self._plan.label(hook, self._plan.heads[hook][0])
        check_made(same, computed, label, f"{hook} differs from what ln1 and the weights make of the stream")
        self._has_received(hook)
        if new.requires_grad:
            # What carries the run's own value has the source's gradient, which is none.
            same = same.detach() + (new - new.detach())
        output = torch.where(changed[..., None], new, same)
        if output.shape == x.shape and isinstance(at, slice):
            return output
        whole = x.clone()
        whole[:, :, at] = output
        return whole

    def _inside(self, site: str, layer: int, x: Tensor) -> None:
        run, hook = self._current_run(), hook_at(site, layer)
        if run is not None and hook in self._plan.at:
            output = self._after_hooks(run, hook, x)
            run.inner[site] = output, run.changes_of(self._plan, hook, output)

    def _added(self, site: str, layer: int, x: Tensor) -> None:
        """Collects the differences at a component's output, attn_out or mlp_out."""
        run, hook = self._current_run(), hook_at(site, layer)
        if run is None:
            return
        after = self._after_hooks(run, hook, x)
        inner, changes = run.inner.pop(OUTPUTS[site], (None, {}))
        if inner is not None:
            weight, bias = self._projections.outward(OUTPUTS[site], layer)
            label = self._plan.senders[next(iter(changes))].label
            output = inner.flatten(2) @ weight
            output = output if bias is None else output + bias
            made = self._added_by(run, site, layer, output)
            check_made(x, made, label, f"{hook} differs from what the weights make of {OUTPUTS[site]}")
            differences = {
                number: self._outward(number, change, weight) for number, change in changes.items()
            }
            if made is not output:
                # From the output computed here, so that what has not changed stays exactly as it is.
                whole = partial(self._to_stream, run, site, layer)
                run.carry(self._plan, whole, output, whole(output), differences)
            elif after is x:
                run.changes |= differences
            else:
                run.carry(self._plan, partial(self._after_hooks, run, hook), x, after, differences)
        run.changes |= run.changes_of(self._plan, hook, after)
        for group, mlp_out in run.group_mlp_out.items() if site == "mlp_out" else ():
            # Where the MLP itself is a sender, its output does not depend on the group's stream.
            silenced = self._plan.replaced_at(group, layer, after)
            run.carried[group] = run.carried.get(group, 0) + (mlp_out - after).masked_fill(silenced, 0)
        if site == "mlp_out":
            run.group_mlp_out.clear()

    def _between(self, layer: int, x: Tensor) -> None:
        run, hook = self._current_run(), hook_at("resid_mid", layer)
        if run is None:
            return
        order, groups = self._plan.order("mlp_pre", layer), self._groups_past_mlp(layer)
        arriving = run.differences(self._plan, groups, x)
        stream = self._normalised(run, "resid_mid", layer, self._stream(run, hook, order, x), order)
        self._before_mlp(run, layer, groups, x, arriving, stream)

    def _groups_past_mlp(self, layer: int) -> list[Group]:
        """Returns the groups on whose streams the MLP of a layer is recomputed."""
        order = self._plan.order("mlp_pre", layer)
        if not self._through_mlps or hook_at("mlp_out", layer) not in self._surface.hooks:
            return []
        return [group for group, last in self._plan.last.items() if last > order]

    def _before_mlp(
        self, run: EdgeRun, layer: int, groups: Sequence[Group], x: Tensor, arriving: Tensor, stream: Tensor
    ) -> None:
        """Prepares what the MLP of a layer receives, and its outputs on the streams of some groups.

        Args:
            x: the stream that it reads, before the hooks there; `arriving` are the groups' differences.
            stream: the same after them.
        """
        receiver = hook_at("mlp_pre", layer), None
        if receiver in self._plan.groups:
            (run.into_mlp,) = run.for_receivers(self._plan, [self._plan.groups[receiver]], stream)
        with run.aside():
            for group, coming, leaving in zip(
                groups, arriving, run.differences(self._plan, groups, stream), strict=True
            ):
                if bool(coming.any()) or bool(leaving.any()) or leaving.requires_grad:
                    run.group_mlp_out[group] = self._projections.mlp(layer, x + coming, stream + leaving)

    def _read_by_mlp(self, layer: int, x: Tensor) -> Tensor | None:
        run = self._current_run()
        if run is None or run.into_mlp is None:
            return None
        change, run.into_mlp = run.into_mlp, None
        self._has_received(hook_at("mlp_pre", layer))
        return x + change

    def _after(self, layer: int, x: Tensor) -> Tensor | None:
        """Returns the stream with what a receiver at the block's end gets, `None` for no receiver; keeps it."""
        run, hook = self._current_run(), hook_at("resid_post", layer)
        if run is None:
            return None
        new = None
        if (hook, None) in self._plan.groups:
            (change,) = run.for_receivers(self._plan, [self._plan.groups[hook, None]], x)
            x = new = x + change
            self._has_received(hook)
        order = self._plan.order("resid_post", layer)
        # Copied, as a hook on the block may write to it in place.
        left = self._normalised(run, "resid_post", layer, self._stream(run, hook, order, x), order)
        run.left = left.clone()
        return new

    # ---- Helpers

    def _current_run(self) -> EdgeRun | None:
        call = self._calls[0]
        if call.state.suspended or not call.whole:
            return None
        run: EdgeRun = call.run.once(_RUN_KEY, EdgeRun)
        return None if run.busy else run

    def _after_hooks(self, run: EdgeRun, hook: str, x: Tensor) -> Tensor:
        """Returns the activation after all hooks at a site."""
        with run.aside():
            return self._surface.through(hook, x)

    def _added_by(self, run: EdgeRun, site: str, layer: int, output: Tensor) -> Tensor:
        """Returns what comes to the hooks at attn_out or mlp_out of a sublayer's output; the same object where no norm
        stands between.
        """
        with run.aside():
            return self._projections.added(site, layer, output)

    def _to_stream(self, run: EdgeRun, site: str, layer: int, output: Tensor) -> Tensor:
        """Returns what a sublayer's output adds to the stream, past its norm and the hooks at attn_out or mlp_out."""
        return self._after_hooks(run, hook_at(site, layer), self._added_by(run, site, layer, output))

    def _stream(self, run: EdgeRun, hook: str, order: int, x: Tensor) -> Tensor:
        """Returns the run's stream after a site; where hooks change it there, the collected differences change too."""
        after = self._after_hooks(run, hook, x)
        if after is not x:
            run.carry(self._plan, partial(self._after_hooks, run, hook), x, after, run.changes, order)
            run.changes = {}
        return after

    def _normalised(self, run: EdgeRun, site: str, layer: int | None, x: Tensor, order: int) -> Tensor:
        """Returns the run's stream after the norm on it (post-norm models), to which the differences are adapted; else
        the stream.
        """
        with run.aside():
            after = self._projections.onward(site, layer, x)
            if after is not x:
                onward = partial(self._projections.onward, site, layer)
                run.carry(self._plan, onward, x, after, run.changes, order)
                run.changes = {}
        return after

    def _outward(self, number: int, change: Tensor, weight: Tensor) -> Tensor:
        """Returns what a difference at z or mlp_post adds to the stream, by the rows of the weights that it meets."""
        heads = self._plan.senders[number].write.heads
        if heads is None:
            return change.flatten(2) @ weight
        at = _rows(heads)
        return change[:, :, at].flatten(2) @ weight.unflatten(0, (change.shape[2], -1))[at].flatten(0, 1)

    def _has_received(self, hook: str) -> None:
        for call in self._calls:
            call.received.add(hook)


def _read_by(streams: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns what heads read of their streams [head or 1, batch pos d_model]: [batch pos head d_head]."""
    read = (streams.flatten(1, 2) @ weight).unflatten(1, streams.shape[1:3])
    return read.permute(1, 2, 0, 3) + bias


def _rows(indices: Sequence[int]) -> slice | list[int]:
    """Returns an index of these rows: a slice, which copies nothing, where one follows the other."""
    first, count = indices[0], len(indices)
    return (
        slice(first, first + count) if list(indices) == list(range(first, first + count)) else list(indices)
    )


# The runs of open blocks with edges by model, and the hooks that serve them. Not part of its `State`, which a copy of
# the model would take along.
_open: WeakKeyDictionary[nn.Module, list[ForwardPass]] = WeakKeyDictionary()
_edge_hooks: WeakKeyDictionary[nn.Module, EdgeHooks] = WeakKeyDictionary()


@model_block
def patched_edges(surface: HookedModel, call: ForwardPass) -> Iterator[None]:
    """Patches the edges of these runs inside the block, behind every edit, so that they see what the edits leave; so do
    those of blocks around it.
    """
    calls = _open.setdefault(surface.model, [])
    if calls and call.edges:  # these alone were checked when they were planned
        check_edges([edge for one in (*calls, call) for edge in one.edges], surface)
    calls += [call] if call.edges else []
    try:
        _put_on(surface, calls)
        yield
    finally:
        calls[:] = [one for one in calls if one is not call]
        if call.edges:
            _put_on(surface, calls)


def _put_on(surface: HookedModel, calls: Sequence[ForwardPass]) -> None:
    """Puts all edges of open blocks onto the model anew."""
    previous = _edge_hooks.pop(surface.model, None)
    if previous is not None:
        previous.remove()
    if calls:
        edge_hooks = _edge_hooks[surface.model] = EdgeHooks(surface, calls)
        edge_hooks.register()
