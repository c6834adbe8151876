"""Carries out cut edges by hooks: collects along a run what senders change, and adds it to what receivers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.interventions.base import EdgePatch
from circuits.interventions.edges.plan import EdgeBlock, EdgePlan, EdgeRun, Group, hook_at
from circuits.interventions.forward_pass import ForwardPass, RunState
from circuits.interventions.paths import BY_HEAD, check_cuts
from circuits.model.contexts import model_block
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Handle, Handles
from circuits.model.projections import OUTPUTS, Projections, check_made

_RUN_KEY = "patched edges"


class EdgeHooks:
    """The hooks that carry out all cut edges of one model."""

    def __init__(self, surface: HookedModel, blocks: Sequence[EdgeBlock]) -> None:
        """Plans the senders and receivers; no hook is put on yet."""
        self._surface, self._blocks = surface, tuple(blocks)
        self._projections = Projections.of(surface)
        self._through_mlps = blocks[0].cuts[0].through == "mlps"
        self._plan = EdgePlan(surface, blocks)
        self._layers = range(surface.n_layers)
        self._handle: Handle | None = None
        # The run of a model whose own __call__ was bypassed.
        self._direct = EdgeRun()

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
        # A busy run asks what hangs at this very hook, and comes here a second time.
        if hook == "hook_embed" and not self._frame.whole and not self._direct.busy:
            self._direct = EdgeRun()
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
            label = self._blocks[0].cuts[0].label
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
            # Where the MLP itself is a cut sender, its output does not depend on the group's stream.
            cut = self._plan.cut_at(group, layer, after)
            run.carried[group] = run.carried.get(group, 0) + (mlp_out - after).masked_fill(cut, 0)
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
        if layer == self._layers[-1] and not self._frame.whole:
            self._direct = EdgeRun()
        return new

    # ---- Helpers

    @property
    def _frame(self) -> RunState:
        return self._blocks[0].call.frame

    def _current_run(self) -> EdgeRun | None:
        if self._blocks[0].call.state.suspended:
            return None
        frame = self._frame
        run: EdgeRun = frame.known.setdefault(_RUN_KEY, EdgeRun()) if frame.whole else self._direct
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
        for block in self._blocks:
            block.received.add(hook)


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


# Open blocks by model, and the hooks that serve them. Not part of its `State`, which a copy of the model would take
# along.
_blocks: WeakKeyDictionary[nn.Module, list[EdgeBlock]] = WeakKeyDictionary()
_edge_hooks: WeakKeyDictionary[nn.Module, EdgeHooks] = WeakKeyDictionary()


@model_block
def patched_edges(surface: HookedModel, cuts: Sequence[EdgePatch], call: ForwardPass) -> Iterator[set[str]]:
    """Cuts these edges too inside the block; yields a set that fills with the hooks at which something was received."""
    if not cuts:
        yield set()
        return
    block = EdgeBlock(tuple(cuts), call)
    blocks = _blocks.setdefault(surface.model, [])
    if blocks:  # these alone were checked when they were planned
        check_cuts([*(cut for open_block in blocks for cut in open_block.cuts), *cuts], surface)
    blocks.append(block)
    try:
        reinstall_hooks(surface)
        yield block.received
    finally:
        blocks.remove(block)
        reinstall_hooks(surface)


def reinstall_hooks(surface: HookedModel) -> None:
    """Puts all cuts of the open blocks onto the model anew, behind every edit, so that they see what the edits
    leave.
    """
    previous = _edge_hooks.pop(surface.model, None)
    if previous is not None:
        previous.remove()
    blocks = _blocks.get(surface.model)
    if blocks:
        edge_hooks = _edge_hooks[surface.model] = EdgeHooks(surface, blocks)
        edge_hooks.register()
