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
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.frozen_tensors_and_positions import Span
from circuits.interventions.base import ActivationEdit, EdgePatch
from circuits.interventions.clean_passes_and_edit_hooks import EditedRuns, replacement_and_mask
from circuits.interventions.paths import BY_HEAD, order_of_computation, receiver_site_order, receiving_heads
from circuits.interventions.replacements import FromTensors, Zero
from circuits.model.head_and_mlp_projections import OUTPUTS, Projections, check_recomputed
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle
from circuits.model.sites import KINDS

Group = frozenset[int]  # numbers of the senders whose edges into a receiver are patched
Place = tuple[str, int | None]  # a receiving hook, and a head of it; None where a receiver has no heads


@dataclass
class EdgeRunState:
    """The differences that one run has collected so far. It holds tensors alone, as the run keeps it.

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

    @contextmanager
    def hooks_paused(self) -> Iterator[None]:
        """Lets modules be called inside the block for another stream than the run's."""
        busy, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = busy


class EdgeHooks:
    """The patched edges of one forward pass, and the hooks that carry them out."""

    def __init__(self, hooked: HookedModel, call: EditedRuns) -> None:
        """Numbers the senders; finds which are replaced for each receiving head, and each group's last receiver."""
        self._hooked, self._call = hooked, call
        self._projections = Projections.of_model(hooked)
        self._receivers = receiver_site_order(hooked)
        self._through_mlps = call.edges[0].through == "mlps"
        self._senders: list[EdgePatch] = []  # by number, an edge from each
        self._at: dict[str, list[int]] = {}  # by hook, the senders there
        groups: dict[Place, set[int]] = {}
        # By place, its order and the label of one of the edges there.
        places: dict[Place, tuple[int, str]] = {}
        numbers: dict[tuple[object, ...], int] = {}
        # Replacements are slow to compare by content, and many edges share one sender.
        known: dict[int, int] = {}
        for edge in call.edges:
            write, receiver = edge.sender, edge.receiver
            if id(write) not in known:
                key = (write.hook, write.heads, write.positions, write.replacement)
                number = known[id(write)] = numbers.setdefault(key, len(self._senders))
                if number == len(self._senders):
                    self._senders.append(edge)
                    self._at.setdefault(write.hook, []).append(number)
            for head in receiving_heads(receiver, hooked):
                groups.setdefault((receiver.hook, head), set()).add(known[id(write)])
                order = order_of_computation(receiver.kind.name, receiver.layer, self._receivers)
                places[receiver.hook, head] = order, edge.label
        # Whether some sender is replaced by zeros, and with all of them nothing of a stream may be left.
        self._zeroes = any(_writes_zeros(edge.sender) for edge in self._senders)
        self._groups = {place: frozenset(senders) for place, senders in groups.items()}
        self._heads: dict[str, list[int | None]] = {}
        # In their order, so that all heads of a layer are a slice of its weights and not a copy.
        for hook, head in sorted(self._groups, key=lambda place: -1 if place[1] is None else place[1]):
            self._heads.setdefault(hook, []).append(head)
        self._last: dict[Group, int] = {}  # by group, the order of its last receiver
        self._labels: dict[Group, str] = {}
        for place, (order, label) in places.items():
            group = self._groups[place]
            self._last[group] = max(order, self._last.get(group, order))
            self._labels[group] = label

    def hook_installers(self) -> list[Callable[[], Handle]]:
        """Returns what puts a hook onto each place where senders' changes arise, pass on or are received."""
        functions: list[tuple[str, Callable[[EdgeRunState, Tensor], Tensor | None]]] = [
            (hook, partial(self._collect_at_embedding, hook)) for hook in ("hook_embed", "hook_pos_embed")
        ]
        for layer in range(self._hooked.n_layers):
            functions += [
                (hook_at("resid_pre", layer), partial(self._prepare_qkv, layer)),
                *((hook_at(site, layer), partial(self._replace_qkv, site, layer)) for site in BY_HEAD),
                (hook_at("z", layer), partial(self._collect_inner_changes, "z", layer)),
                (hook_at("attn_out", layer), partial(self._collect_output_changes, "attn_out", layer)),
                (hook_at("resid_mid", layer), partial(self._carry_differences_to_mlp, layer)),
                (hook_at("mlp_post", layer), partial(self._collect_inner_changes, "mlp_post", layer)),
                (hook_at("mlp_out", layer), partial(self._collect_output_changes, "mlp_out", layer)),
                (hook_at("resid_post", layer), partial(self._replace_and_carry_resid_post, layer)),
            ]
        put_on: list[Callable[[], Handle]] = [
            partial(self._hooked.on_input, hook, partial(self._call_in_run, function))
            for hook, function in functions
            if hook in self._hooked.hooks
        ]
        for layer in range(self._hooked.n_layers):
            if (hook_at("mlp_pre", layer), None) in self._groups:
                function = partial(self._call_in_run, partial(self._replace_mlp_input, layer))
                put_on.append(partial(self._hooked.on_mlp_input, layer, function))
        return put_on

    def _call_in_run(
        self, function: Callable[[EdgeRunState, Tensor], Tensor | None], x: Tensor
    ) -> Tensor | None:
        """Calls a hook function with the run under way, unless it is none of ours, or modules are called aside."""
        if self._call.state.suspended or not self._call.is_model_running:
            return None
        run: EdgeRunState = self._call.run.compute_once("patched edges", EdgeRunState)
        return None if run.busy else function(run, x)

    # ---- Hook functions in the order of a run. Each gets the input of its site.

    def _collect_at_embedding(self, hook: str, run: EdgeRunState, x: Tensor) -> None:
        output = self._after_hooks(run, hook, x)
        if hook == "hook_pos_embed" and "pos_embed" not in self._hooked.embeddings:
            run.positions = output
            return
        run.left = output if run.left is None else run.left + output
        run.changes |= self._sender_changes_at(run, hook, output)

    def _prepare_qkv(self, layer: int, run: EdgeRunState, x: Tensor) -> None:
        """Computes what receivers at q, k and v of a layer get of the stream with the senders' changes.

        It is written when their hooks fire; see `_replace_qkv`.
        """
        order = order_of_computation("q", layer, self._receivers)
        if layer == 0 and run.left is not None:
            run.left = self._apply_and_propagate(
                run, partial(self._projections.apply_post_norm_after, "embed", None), run.left, order
            )
        if run.left is not None and (run.changes or run.carried) and max(self._last.values()) >= order:
            # Whatever changed the stream between blocks would change the differences as well.
            label = self._call.edges[0].label
            differs = f"what comes to block {layer} differs from what was handed on to it"
            check_recomputed(x, run.left, label, differs)
        beyond_mlp = self._groups_through_mlp(layer) if self._hooked.parallel else []
        arriving = self._differences_so_far(run, beyond_mlp, x)
        stream = self._apply_and_propagate(
            run, partial(self._hooked.apply_hooks, hook_at("resid_pre", layer)), x, order
        )
        if self._hooked.parallel:
            self._prepare_mlp_input_and_outputs(run, layer, beyond_mlp, x, arriving, stream)
        heads_by_site = {site: heads for site in BY_HEAD if (heads := self._heads.get(hook_at(site, layer)))}
        groups = list(
            dict.fromkeys(
                self._groups[hook_at(site, layer), head]
                for site, heads in heads_by_site.items()
                for head in heads
            )
        )
        if not groups:
            return
        changes = self._all_differences(run, groups, stream)
        projections = self._projections
        with run.hooks_paused():
            # One by one: hooks inside the norm may depend on the examples in the batch.
            normed = torch.stack([projections.attn_input(layer, one) for one in stream + changes])
            # Last, so that a user's hook that keeps the norm's output keeps the run's.
            normed_run = projections.attn_input(layer, stream.clone())
        # [group batch pos]; `any` of floats is much slower, and NaN counts as a change here too.
        changed = (changes.detach().amax(-1) != 0) | (changes.detach().amin(-1) != 0)
        for site, heads in heads_by_site.items():
            hook = hook_at(site, layer)
            at = _slice_or_list([groups.index(self._groups[hook, head]) for head in heads])
            weight, bias = projections.qkv_weight_and_bias(site, layer)
            of_heads = _slice_or_list([int(head) for head in heads if head is not None])
            weight, bias = weight[of_heads], bias[of_heads]
            aside = 0 if run.positions is None or site == "v" else run.positions
            streams = (normed[at], normed_run[None])
            new, computed = (_project_to_heads(one + aside, weight, bias) for one in streams)
            run.received[hook] = of_heads, new, changed[at].permute(1, 2, 0), computed

    def _replace_qkv(self, site: str, layer: int, run: EdgeRunState, x: Tensor) -> Tensor | None:
        """Returns q, k or v of a layer with the heads that receive computed anew; `None` where nothing is received."""
        hook = hook_at(site, layer)
        if hook not in run.received:
            return None
        at, new, changed, computed = run.received.pop(hook)
        new, same = new.to(x.dtype), x[:, :, at]
        label = self._labels[self._groups[hook, self._heads[hook][0]]]
        differs = f"{hook} differs from what ln1 and the weights make of the stream"
        check_recomputed(same, computed, label, differs)
        self._call.received.add(hook)
        if new.requires_grad:
            # What carries the run's own value has the source's gradient, which is none.
            same = same.detach() + (new - new.detach())
        output = torch.where(changed[..., None], new, same)
        if output.shape == x.shape and isinstance(at, slice):
            return output
        whole = x.clone()
        whole[:, :, at] = output
        return whole

    def _collect_inner_changes(self, site: str, layer: int, run: EdgeRunState, x: Tensor) -> None:
        hook = hook_at(site, layer)
        if hook in self._at:
            output = self._after_hooks(run, hook, x)
            run.inner[site] = output, self._sender_changes_at(run, hook, output)

    def _collect_output_changes(self, site: str, layer: int, run: EdgeRunState, x: Tensor) -> None:
        """Collects the differences at a component's output, attn_out or mlp_out."""
        hook = hook_at(site, layer)
        after = self._after_hooks(run, hook, x)
        inner, changes = run.inner.pop(OUTPUTS[site], (None, {}))
        if inner is not None:
            weight, bias = self._projections.output_weight_and_bias(OUTPUTS[site], layer)
            label = self._senders[next(iter(changes))].label
            output = inner.flatten(2) @ weight
            output = output if bias is None else output + bias
            made = self._normed_output(run, site, layer, output)
            check_recomputed(x, made, label, f"{hook} differs from what the weights make of {OUTPUTS[site]}")
            differences = {
                number: self._project_to_stream(number, change, weight) for number, change in changes.items()
            }
            if made is not output:

                def norm_and_hooks(output: Tensor) -> Tensor:
                    return self._after_hooks(run, hook, self._normed_output(run, site, layer, output))

                # From the output computed here, so that what has not changed stays exactly as it is.
                self._propagate_differences(run, norm_and_hooks, output, norm_and_hooks(output), differences)
            elif after is x:
                run.changes |= differences
            else:
                self._propagate_differences(run, partial(self._after_hooks, run, hook), x, after, differences)
        run.changes |= self._sender_changes_at(run, hook, after)
        for group, mlp_out in run.group_mlp_out.items() if site == "mlp_out" else ():
            # Where the MLP itself is a sender, its output does not depend on the group's stream.
            silenced = self._mlp_replaced_mask(group, layer, after)
            run.carried[group] = run.carried.get(group, 0) + (mlp_out - after).masked_fill(silenced, 0)
        if site == "mlp_out":
            run.group_mlp_out.clear()

    def _carry_differences_to_mlp(self, layer: int, run: EdgeRunState, x: Tensor) -> None:
        """Carries differences through the hooks and the norm at resid_mid, and prepares the MLP for them."""
        order, groups = (
            order_of_computation("mlp_pre", layer, self._receivers),
            self._groups_through_mlp(layer),
        )
        arriving = self._differences_so_far(run, groups, x)
        stream = self._apply_and_propagate(
            run, partial(self._hooked.apply_hooks, hook_at("resid_mid", layer)), x, order
        )
        stream = self._apply_and_propagate(
            run, partial(self._projections.apply_post_norm_after, "resid_mid", layer), stream, order
        )
        self._prepare_mlp_input_and_outputs(run, layer, groups, x, arriving, stream)

    def _groups_through_mlp(self, layer: int) -> list[Group]:
        """Returns the groups on whose streams the MLP of a layer is recomputed."""
        if not self._through_mlps or hook_at("mlp_out", layer) not in self._hooked.hooks:
            return []
        order = order_of_computation("mlp_pre", layer, self._receivers)
        return [group for group, last in self._last.items() if last > order]

    def _prepare_mlp_input_and_outputs(
        self,
        run: EdgeRunState,
        layer: int,
        groups: Sequence[Group],
        x: Tensor,
        arriving: Tensor,
        stream: Tensor,
    ) -> None:
        """Prepares what the MLP of a layer receives, and its outputs on the streams of some groups: it reads `x`, with
        the groups' differences `arriving`, which hooks make `stream`.
        """
        receiver = hook_at("mlp_pre", layer), None
        if receiver in self._groups:
            (run.into_mlp,) = self._all_differences(run, [self._groups[receiver]], stream)
        leaving = self._differences_so_far(run, groups, stream)
        with run.hooks_paused():
            for group, before, after in zip(groups, arriving, leaving, strict=True):
                if bool(before.any()) or bool(after.any()) or after.requires_grad:
                    run.group_mlp_out[group] = self._projections.mlp_output(layer, x + before, stream + after)

    def _replace_mlp_input(self, layer: int, run: EdgeRunState, x: Tensor) -> Tensor | None:
        if run.into_mlp is None:
            return None
        change, run.into_mlp = run.into_mlp, None
        self._call.received.add(hook_at("mlp_pre", layer))
        return x + change

    def _replace_and_carry_resid_post(self, layer: int, run: EdgeRunState, x: Tensor) -> Tensor | None:
        """Returns the stream with what a receiver at the block's end gets, `None` for no receiver; keeps it."""
        hook, order, new = (
            hook_at("resid_post", layer),
            order_of_computation("resid_post", layer, self._receivers),
            None,
        )
        if (hook, None) in self._groups:
            (change,) = self._all_differences(run, [self._groups[hook, None]], x)
            x = new = x + change
            self._call.received.add(hook)
        stream = self._apply_and_propagate(run, partial(self._hooked.apply_hooks, hook), x, order)
        # Copied, as a hook on the block may write to it in place.
        onward = partial(self._projections.apply_post_norm_after, "resid_post", layer)
        run.left = self._apply_and_propagate(run, onward, stream, order).clone()
        return new

    # ---- Differences between the streams of groups and the run's

    def _sender_changes_at(self, run: EdgeRunState, hook: str, output: Tensor) -> dict[int, Tensor]:
        """Returns, by sender at a site, its replacement − its output in the run."""
        differences = {}
        for number in self._at.get(hook, ()):
            write = self._senders[number].sender
            new, selected = replacement_and_mask(write, self._call.run, output)
            differences[number] = torch.where(selected, new - output, torch.zeros_like(output))
            run.seen.add(number)
            # In a part of a sweep's examples, prompts may all be shorter than those of other parts.
            if isinstance(write.positions, Span) and self._call.state.rows is None:
                (self._call.reached if bool(selected.any()) else self._call.missed).add(id(write))
        return differences

    def _propagate_differences(
        self,
        run: EdgeRunState,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        after: Tensor,
        changes: dict[int, Tensor],
        order: int | None = None,
    ) -> None:
        """Adapts differences, group by group, to a function f of the stream or of what is added to it: d becomes
        f(x + d) − f(x).

        Args:
            function: the function f (hooks, a norm, or a norm and the hooks after it); `after` is f(x).
            order: order of the site, where it is on the stream itself; then `carried` is adapted too.
        """
        for group, last in self._last.items():
            if order is not None and last < order:
                continue
            parts = [changes[number] for number in group if number in changes]
            if order is not None and group in run.carried:
                parts.append(run.carried[group])
            if parts:
                difference = torch.stack([_in_stream_layout(part, x) for part in parts]).sum(0)
                difference = _cancel_stream_exactly(difference, x) if self._zeroes else difference
                before = run.carried.get(group, 0) if order is None else 0
                run.carried[group] = before + function(x + difference) - after

    def _apply_and_propagate(
        self, run: EdgeRunState, function: Callable[[Tensor], Tensor], x: Tensor, order: int
    ) -> Tensor:
        """Returns the run's stream after hooks or a norm, to which the collected differences are adapted; the stream
        itself where nothing changes it.
        """
        with run.hooks_paused():
            after = function(x)
            if after is not x:
                self._propagate_differences(run, function, x, after, run.changes, order)
                run.changes = {}
        return after

    def _all_differences(self, run: EdgeRunState, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the differences between the streams that groups of receivers read and the run's, [group batch pos
        d_model]; refuses senders that the run has not passed.
        """
        for number in frozenset().union(*groups) - run.seen:
            edge = self._senders[number]
            raise CircuitsError(
                f"{edge.label}: this run did not pass {edge.sender.hook}, which is to send; call the whole model"
            )
        return self._differences_so_far(run, groups, stream)

    def _differences_so_far(self, run: EdgeRunState, groups: Sequence[Group], stream: Tensor) -> Tensor:
        """Returns the same differences, of the senders that the run has passed so far."""
        differences = stream.new_zeros(len(groups), *stream.shape)
        if groups and run.changes:
            changes = torch.stack([_in_stream_layout(change, stream) for change in run.changes.values()])
            member = stream.new_tensor([[number in group for number in run.changes] for group in groups])
            differences = torch.einsum("gs,sbpd->gbpd", member, changes)
        if any(group in run.carried for group in groups):
            none = stream.new_zeros(())
            differences = differences + torch.stack(
                [_in_stream_layout(run.carried.get(group, none), stream) for group in groups]
            )
        return _cancel_stream_exactly(differences, stream) if self._zeroes else differences

    # ---- Helpers

    def _mlp_replaced_mask(self, group: Group, layer: int, mlp_out: Tensor) -> Tensor:
        """Tells where an MLP's output is replaced for a group, boolean, broadcast to the stream."""
        mask, call = torch.zeros((1, 1, 1), dtype=torch.bool, device=mlp_out.device), self._call
        for write in (self._senders[number].sender for number in group):
            if write.layer == layer and write.kind.name in ("mlp_post", "mlp_out"):
                mask = mask | write.selection_mask(mlp_out, call.run)
        return mask

    def _after_hooks(self, run: EdgeRunState, hook: str, x: Tensor) -> Tensor:
        """Returns the activation after all hooks at a site."""
        with run.hooks_paused():
            return self._hooked.apply_hooks(hook, x)

    def _normed_output(self, run: EdgeRunState, site: str, layer: int, output: Tensor) -> Tensor:
        """Returns what comes to the hooks at attn_out or mlp_out of a sublayer's output; the same object where no norm
        stands between.
        """
        with run.hooks_paused():
            return self._projections.apply_sublayer_norm(site, layer, output)

    def _project_to_stream(self, number: int, change: Tensor, weight: Tensor) -> Tensor:
        """Returns what a difference at z or mlp_post adds to the stream, by the rows of the weights that it meets."""
        heads = self._senders[number].sender.heads
        if heads is None:
            return change.flatten(2) @ weight
        at = _slice_or_list(heads)
        return change[:, :, at].flatten(2) @ weight.unflatten(0, (change.shape[2], -1))[at].flatten(0, 1)


def hook_at(site: str, layer: int) -> str:
    """Returns the hook of a site in a layer."""
    return KINDS[site].hook.format(layer)


def _writes_zeros(write: ActivationEdit) -> bool:
    """Tells whether an edit writes zeros, as `Zero` or as tensors of them."""
    given = write.replacement
    if isinstance(given, FromTensors):
        return not any(bool(x.tensor.any()) for hook, x in given.activations if hook == write.hook)
    return isinstance(given, Zero)


def _cancel_stream_exactly(differences: Tensor, stream: Tensor) -> Tensor:
    """Returns differences that leave nothing of a stream [... pos d_model] where they leave its rounding, which a norm
    would make as large as any stream.
    """
    left, size = ((x.abs().amax(-1, keepdim=True)) for x in (stream + differences, stream))
    return torch.where(left <= 16 * torch.finfo(stream.dtype).eps * size, -stream, differences)


def _in_stream_layout(change: Tensor, stream: Tensor) -> Tensor:
    return change.to(stream.dtype).expand(stream.shape)


def _project_to_heads(streams: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns what heads read of their streams [head or 1, batch pos d_model]: [batch pos head d_head]."""
    read = (streams.flatten(1, 2) @ weight).unflatten(1, streams.shape[1:3])
    return read.permute(1, 2, 0, 3) + bias


def _slice_or_list(indices: Sequence[int]) -> slice | list[int]:
    """Returns an index of these rows: a slice, which copies nothing, where one follows the other."""
    run = slice(indices[0], indices[0] + len(indices))
    return run if list(indices) == list(range(run.start, run.stop)) else list(indices)
