"""Applies all cut edges of a run together: each receiver reads a stream in which its cut senders are replaced.

A receiver's input is the residual stream of the run plus the sum over its cut edges of (the sender's replacement − its
output in this run). Nothing else is changed: the receiver's output goes on as usual, to later receivers too. All edges
into a receiver that are not cut therefore carry what the edited run computes.

No second run is needed. The input of each site is read before any hook there. Edits and the user's hooks act on a
receiver's stream as they act on the run's: where hooks f change the stream x, a difference d that passes the site
becomes f(x + d) − f(x). Where a norm stands between a component's weights and the stream, f is that norm: the
differences of all senders before it that a receiver is cut off from pass it together.

Where all senders are replaced by zeros, differences would leave rounding of the run's stream, which a norm makes as
large as any stream. There a receiver reads what no sender writes (biases), which is followed beside the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, Cut, Receiver
from circuits.interventions.edges import BY_HEAD, check_cuts, order_of, receivers_of, receiving_heads
from circuits.interventions.forward_pass import ForwardPass, RunState, replacement_for
from circuits.model.hooks import Handle, Handles
from circuits.model.projections import OUTPUTS, Projections, check_made
from circuits.model.sites import KINDS, Site
from circuits.model.surface import Surface
from circuits.tensors import Span

_RUN_KEY = "cut edges"
_WITHOUT_HEADS = 3  # axes of an activation [batch pos d_model]
Group = frozenset[int]  # numbers of the senders that a receiver is cut off from


@contextmanager
def cutting(surface: Surface, cuts: Sequence[Cut], call: ForwardPass) -> Iterator[set[str]]:
    """Cuts these edges too inside the block; yields a set that fills with the hooks at which something was received."""
    if not cuts:
        yield set()
        return
    block = _Block(tuple(cuts), call)
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


@contextmanager
def collecting(
    surface: Surface, senders: Sequence[ActivationEdit], groups: Iterable[Group], call: ForwardPass
) -> Iterator[Callable[[], dict[Group, Tensor]]]:
    """Follows senders, all of one layer, through a run inside the block that nothing else edits.

    Yields a function that returns, after the run, what groups of them (by their numbers in `senders`) would change of
    the residual stream behind that layer: their replacements − their outputs [batch pos d_model].
    """
    end = Site("resid_post", surface.n_layers - 1)
    receiver = Receiver(end.hook(), end.kind, surface.n_layers - 1, None)
    cuts = tuple(Cut(sender.label, sender, receiver) for sender in senders)
    hooks = CutHooks(surface, [_Block(cuts, call)])
    hooks.receive_nothing(groups)
    hooks.put_on()
    try:
        yield hooks.collected
    finally:
        hooks.remove()


@dataclass(eq=False)
class _Block:
    """One open block of `cutting`: its edges, and the hooks at which something was received."""

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
        rest: the stream that is left where every sender so far is silent, that is writes zeros; None as soon as some
            node is silent for no receiver.
        quiet: by hook, the number of nodes that write there, and how many of them are zero in the run [batch pos].
        silenced: by sender, how many of the other nodes its replacement makes zero, less how many of these it does
            not leave zero [batch pos].
        busy: whether modules are called now for another stream than the run's.
    """

    changes: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[Group, Tensor] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    inner: dict[str, tuple[Tensor, dict[int, Tensor]]] = field(default_factory=dict)
    group_mlp_out: dict[Group, Tensor] = field(default_factory=dict)
    received: dict[str, tuple[list[int], Tensor, Tensor, Tensor]] = field(default_factory=dict)
    into_mlp: Tensor | None = None
    rest: Tensor | None = None
    quiet: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    silenced: dict[int, Tensor] = field(default_factory=dict)
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
        """Prepares the tables of senders and receivers; no hook is put on yet."""
        self._surface, self._blocks = surface, tuple(blocks)
        self._projections = Projections.of(surface)
        self._receivers = receivers_of(surface)
        self._through_mlps = blocks[0].cuts[0].through == "mlps"
        self._senders: list[_Sender] = []
        self._at: dict[str, list[int]] = {}  # senders by hook
        self._groups: dict[tuple[str, int | None], Group] = {}  # by receiving hook and head
        self._heads: dict[str, list[int | None]] = {}  # receiving, by hook
        self._last: dict[Group, int] = {}  # order of the last receiver of a group
        self._labels: dict[Group, str] = {}
        self._layers = range(surface.n_layers)
        self._nodes = {
            "hook_embed",
            "hook_pos_embed",
            *(_hook(site, layer) for site in ("z", "mlp_out") for layer in self._layers),
        }
        self._handle: Handle | None = None
        # The run of a model whose own __call__ was bypassed.
        self._direct = _CutRun()
        self._read()

    def _read(self) -> None:
        """Numbers the senders, and finds which of them each receiving head hears, and where each is heard last."""
        numbers: dict[tuple[object, ...], int] = {}
        groups: dict[tuple[str, int | None], set[int]] = {}
        # By place, its order and the label of one of the cuts there.
        places: dict[tuple[str, int | None], tuple[int, str]] = {}
        for block in self._blocks:
            # Replacements are slow to compare by content, and many cuts share one sender.
            known: dict[int, int] = {}
            for cut in block.cuts:
                write, receiver = cut.sender, cut.receiver
                number = known.get(id(write), -1)
                if number < 0:
                    key = (id(block), write.hook, write.heads, write.positions, write.replacement)
                    number = known[id(write)] = numbers.setdefault(key, len(self._senders))
                if number == len(self._senders):
                    self._senders.append(_Sender(cut.label, write, block.call))
                    self._at.setdefault(write.hook, []).append(number)
                about = self._order(receiver.kind.name, receiver.layer), cut.label
                for head in receiving_heads(receiver, self._surface):
                    place = receiver.hook, head
                    groups.setdefault(place, set()).add(number)
                    places[place] = about
        self._groups = {place: frozenset(numbers_there) for place, numbers_there in groups.items()}
        for hook, head in self._groups:
            self._heads.setdefault(hook, []).append(head)
        for heads in self._heads.values():
            # In their order, so that all heads of a layer are a slice of its weights and not a copy.
            heads.sort(key=lambda head: -1 if head is None else head)
        for place, (order, label) in places.items():
            group = self._groups[place]
            self._last[group] = max(order, self._last.get(group, order))
            self._labels[group] = label

    def put_on(self) -> None:
        """Puts hooks onto every place where senders' changes arise, pass on or are received."""
        functions: list[tuple[str, Callable[[Tensor], Tensor | None]]] = [
            ("hook_embed", partial(self._embedding, "hook_embed")),
            ("hook_pos_embed", partial(self._embedding, "hook_pos_embed")),
        ]
        handles: list[Handle] = []
        for layer in self._layers:
            functions += [
                (_hook("resid_pre", layer), partial(self._before_attention, layer)),
                *((_hook(site, layer), partial(self._receive, site, layer)) for site in BY_HEAD),
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

    def receive_nothing(self, groups: Iterable[Group]) -> None:
        """Leaves the run as it is, and only collects what groups of senders would change."""
        self._groups, self._heads = {}, {}
        self._last = dict.fromkeys(groups, self._order("resid_post", self._layers[-1]))

    def collected(self) -> dict[Group, Tensor]:
        """Returns the differences of all groups after the run."""
        run: _CutRun = self._frame.known[_RUN_KEY]
        found: dict[Group, Tensor] = {}
        for group in self._last:
            parts = [run.changes[number] for number in sorted(group) if number in run.changes]
            parts += [run.carried[group]] if group in run.carried else []
            found[group] = torch.stack(torch.broadcast_tensors(*parts)).sum(0)
        return found

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
        if hook == "hook_embed" and not self._through_mlps:
            run.rest = torch.zeros_like(output)
        run.changes |= self._changes_of(run, hook, output)

    def _before_attention(self, layer: int, x: Tensor) -> None:
        """Computes what receivers at q, k and v of a layer get of the stream with the senders' changes.

        It is written when their hooks fire; see `_receive`.
        """
        run = self._current_run()
        if run is None:
            return
        if layer == self._layers[0] and run.left is not None:
            run.left = self._normalised(run, "embed", None, run.left, self._order("q", layer))
        if layer != self._layers[0] and _hook("z", layer - 1) not in run.quiet:
            run.rest = None  # a run that leaves blocks out does not say what they write
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
        heads_by_site = {site: heads for site in BY_HEAD if (heads := self._heads.get(_hook(site, layer)))}
        groups: list[Group] = []
        for site, heads in heads_by_site.items():
            hook = _hook(site, layer)
            groups += [self._groups[hook, head] for head in heads]
        groups = list(dict.fromkeys(groups))
        if not groups:
            return
        changes = self._received(run, groups, stream)
        projections = self._projections
        run.busy = True
        try:
            normed = projections.norms(layer, stream + changes)
            # Last, so that a user's hook that keeps the norm's output keeps the run's.
            normed_run = projections.norm(layer, stream.clone())
        finally:
            run.busy = False
        # [group batch pos]; `any` of floats is much slower, and NaN counts as a change here too.
        changed = (changes.detach().amax(-1) != 0) | (changes.detach().amin(-1) != 0)
        for site, heads in heads_by_site.items():
            hook = _hook(site, layer)
            at = _rows([groups.index(self._groups[hook, head]) for head in heads])
            weight, bias = projections.by_head(site, layer)
            chosen = [int(head) for head in heads if head is not None]
            new = normed[at].flatten(1, 2) @ weight[_rows(chosen)]
            new = new.unflatten(1, stream.shape[:2]).permute(1, 2, 0, 3) + bias[_rows(chosen)]
            signs = _signs(bias.shape[-1], bias.dtype, bias.device)
            # Head by head, since `weight @ signs` copies weights that stand in one matrix of all heads.
            signed = torch.stack([of_head @ signs for of_head in weight])
            computed = torch.einsum("bpd,hd->bph", normed_run, signed) + bias @ signs
            run.received[hook] = chosen, new, changed[at].permute(1, 2, 0), computed

    def _receive(self, site: str, layer: int, x: Tensor) -> Tensor | None:
        """Returns q, k or v of a layer with the heads that receive computed anew; `None` where nothing is received."""
        run, hook = self._current_run(), _hook(site, layer)
        if run is None or hook not in run.received:
            return None
        heads, new, changed, computed = run.received.pop(hook)
        label = self._labels[self._groups[hook, heads[0]]]
        check_made(
            x @ _signs(x.shape[-1], x.dtype, x.device),
            computed,
            label,
            f"{hook} differs from what ln1 and the weights make of the stream",
        )
        self._has_received(hook)
        at = _rows(heads)
        output = torch.where(changed[..., None], new.to(x.dtype), x[:, :, at])
        if output.shape == x.shape and isinstance(at, slice):
            return output
        whole = x.clone()
        whole[:, :, at] = output
        return whole

    def _inside(self, site: str, layer: int, x: Tensor) -> None:
        run, hook = self._current_run(), _hook(site, layer)
        if run is not None and (hook in self._at or run.rest is not None):
            output = self._through(run, hook, x)
            changes = self._changes_of(run, hook, output)
            if hook in self._at:
                run.inner[site] = output, changes

    def _added(self, site: str, layer: int, x: Tensor) -> None:
        """Collects the differences at a component's output, attn_out or mlp_out."""
        run, hook = self._current_run(), _hook(site, layer)
        if run is None:
            return
        self._check_read(run, "ln1" if site == "attn_out" else "ln2", layer)
        after = self._through(run, hook, x)
        inner, changes = run.inner.pop(OUTPUTS[site], (None, {}))
        rest, z = None, _hook("z", layer)
        if run.rest is not None and site == "attn_out":
            bias = self._projections.outward("z", layer)[1]
            rest = torch.zeros_like(x) if bias is None else bias.to(x.dtype).expand_as(x)
        if inner is not None:
            weight, bias = self._projections.outward(OUTPUTS[site], layer)
            label = self._senders[next(iter(changes))].label
            output = x
            if self._surface.sublayer_norm(site, layer) is None:
                signs = _signs(x.shape[-1], weight.dtype, weight.device)
                made = inner.flatten(2) @ (weight @ signs)
                made, given = made if bias is None else made + bias @ signs, x.to(weight.dtype) @ signs
            else:
                output = inner.flatten(2) @ weight
                output = output if bias is None else output + bias
                made, given = self._added_by(run, site, layer, output), x
            check_made(given, made, label, f"{hook} differs from what the weights make of {OUTPUTS[site]}")
            differences = {
                number: self._outward(number, change, weight) for number, change in changes.items()
            }
            if output is not x:
                # From the output computed here, so that what has not changed stays exactly as it is.
                whole = partial(self._to_stream, run, site, layer)
                self._carry(run, whole, output, whole(output), differences, rest, only=z)
            elif after is x:
                run.changes |= differences
            else:
                self._carry(run, partial(self._through, run, hook), x, after, differences, rest, only=z)
        if rest is not None and run.rest is not None:
            run.rest = run.rest + self._to_stream(run, site, layer, rest)
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
        """Returns the stream with what a receiver at the block's end gets, `None` for no receiver; keeps it."""
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
            self._carry(run, partial(self._through, run, hook), x, after, run.changes, run.rest, order)
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
                onward = partial(self._projections.onward, site, layer)
                self._carry(run, onward, x, after, run.changes, run.rest, order)
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
        rest: Tensor | None,
        order: int | None = None,
        only: str | None = None,
    ) -> None:
        """Adapts differences, group by group, to a function f of the stream or of what is added to it: d becomes
        f(x + d) − f(x).

        Args:
            onward: the function f (hooks, a norm, or a norm and the hooks after it); `after` is f(x).
            rest: what is left of x where all its senders are silent; None where that is not followed.
            order: order of the site, where it is on the stream itself; then `carried` is adapted too.
            only: the hook of the senders, where x is what they add to the stream.
        """
        for group, last in self._last.items():
            if order is not None and last < order:
                continue
            parts = [changes[number] for number in group if number in changes]
            if order is not None and group in run.carried:
                parts.append(run.carried[group])
            if parts:
                difference = torch.stack([_like(part, x) for part in parts]).sum(0)
                if rest is not None:
                    (silent,) = self._silent(run, [group], only)
                    difference = torch.where(silent[..., None], rest - x, difference)
                before = run.carried.get(group, 0) if order is None else 0
                run.carried[group] = before + onward(x + difference) - after
        if order is not None and run.rest is not None:
            run.rest = onward(run.rest)

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
        if not groups or not numbers:
            differences = stream.new_zeros(len(groups), *stream.shape)
        else:
            stacked, columns = self._stacked(run, numbers, stream)
            member = stream.new_tensor([[number in group for number in columns] for group in groups])
            differences = torch.einsum("gs,sbpd->gbpd", member, stacked)
        carried = [run.carried.get(group) for group in groups]
        if any(one is not None for one in carried):
            none = stream.new_zeros(())
            differences = differences + torch.stack(
                [_like(none if one is None else one, stream) for one in carried]
            )
        if groups and run.rest is not None:
            differences = torch.where(self._silent(run, groups)[..., None], run.rest - stream, differences)
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
        differences, replaced = {}, {}
        for number in self._at.get(hook, ()):
            sender = self._senders[number]
            new, selected = replacement_for(sender.write, sender.call, output)
            differences[number] = torch.where(selected, new - output, torch.zeros_like(output))
            run.seen.add(number)
            # In a part of a sweep's examples, prompts may all be shorter than those of other parts.
            if isinstance(sender.write.positions, Span) and sender.call.state.rows is None:
                reached = sender.call.reached if bool(selected.any()) else sender.call.missed
                reached.add(id(sender.write))
            replaced[number] = new, selected
        if run.rest is not None and hook in self._nodes:
            self._listen(run, hook, output, replaced)
        return differences

    def _listen(
        self, run: _CutRun, hook: str, output: Tensor, replaced: Mapping[int, tuple[Tensor, Tensor]]
    ) -> None:
        """Notes where the nodes at a hook are silent in the run, and where their replacements silence them."""

        def by_node(mask: Tensor) -> Tensor:
            return mask.any(-1, keepdim=output.ndim == _WITHOUT_HEADS)

        speaks = by_node(output != 0)  # [batch pos node]
        nodes, quiet = speaks.shape[-1], (~speaks).sum(-1)
        run.quiet[hook] = nodes, quiet
        for number, (new, selected) in replaced.items():
            here, heard = by_node(selected), by_node(new != 0)
            silenced = (speaks & here & ~heard).sum(-1)
            run.silenced[number] = silenced - (~speaks & here & heard).sum(-1)
            quiet = quiet + silenced
        if not bool((quiet >= nodes).any()):
            run.rest = None

    def _silent(self, run: _CutRun, groups: Sequence[Group], hook: str | None = None) -> Tensor:
        """Tells where groups hear no sender so far, or none at a hook, boolean [group batch pos]."""
        quiet = [run.quiet[one] for one in (run.quiet if hook is None else [hook])]
        silent = torch.stack([count for _, count in quiet]).sum(0).expand(len(groups), -1, -1)
        numbers = [number for number in run.silenced if hook is None or number in self._at[hook]]
        if numbers:
            silenced = torch.stack([run.silenced[number] for number in numbers]).float()
            member = silenced.new_tensor([[number in group for number in numbers] for group in groups])
            silent = silent + torch.einsum("gs,sbp->gbp", member, silenced)
        return silent >= sum(nodes for nodes, _ in quiet)

    def _outward(self, number: int, change: Tensor, weight: Tensor) -> Tensor:
        """Returns what a difference at z or mlp_post adds to the stream, by the rows of the weights that it meets."""
        heads = self._senders[number].write.heads
        if heads is None:
            return change.flatten(2) @ weight
        at = _rows(heads)
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


def _rows(indices: Sequence[int]) -> slice | list[int]:
    """Returns an index of these rows: a slice, which copies nothing, where one follows the other."""
    first, count = indices[0], len(indices)
    return (
        slice(first, first + count) if list(indices) == list(range(first, first + count)) else list(indices)
    )


@lru_cache(maxsize=16)
def _signs(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a fixed vector of random signs: products with it tell two activations apart, at a fraction of the cost of
    computing both.
    """
    # It is kept for later calls, which may need gradients.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
        return signs.to(dtype=dtype, device=device)


def _hook(site: str, layer: int) -> str:
    return KINDS[site].hook.format(layer)
