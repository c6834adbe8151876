"""Screens edges: gradient estimates of the effect of patching every direct path, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.cuts import SENDERS, order_of, receivers_of
from circuits.interventions.edits import Edit, Place
from circuits.interventions.paths import Path
from circuits.interventions.replacements import DIRECTION, FromTokens
from circuits.model.heads import HeadSpec, at_index, index_of, label_in
from circuits.model.sites import KINDS, Site
from circuits.model.surface import Surface
from circuits.patch._gradients import (
    EXAMPLES_PER_PASS,
    Pair,
    Run,
    between,
    difference,
    midpoints,
    ready_for_gradients,
)
from circuits.patch._ranking import Candidate, Counts, ranked, read_steps, refuse_inside_blocks
from circuits.patch._result import ScreenResult
from circuits.patch._screen import INPUTS, LINES, METHODS
from circuits.sweeps.metrics import PerExample, read_values
from circuits.sweeps.table import BASELINE, Row
from circuits.validate import read_choice

CALLER = "patch.edges"
#: The most entries of all senders' changes in memory at once.
NUMBERS = 2**27

#: The sites of the residual stream itself.
STREAMS = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True)
class End:
    """A component as the sender or the receiver of an edge; without a site, the output."""

    name: str
    place: Place
    layer: int | None
    hook: str  # where it is read; for an MLP as receiver, the hook of its output
    order: int  # position in the order of computation

    @property
    def head(self) -> int | None:
        """The place on the head axis, of a head or a key-value group; None for a whole site."""
        chosen = None if self.place.heads is None else self.place.heads.heads
        return None if chosen is None else index_of(chosen[0])


def edges(
    model: Any,
    base: Any,
    source: Any,
    metric: Any = None,
    *,
    batch: Any = None,
    method: str = "integrated",
    steps: int = 5,
    line: str = "input",
    exact: int | str = 10,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimates the effect of `patch.path` from `source` along every edge, and measures the largest exactly.

    An edge leads from a sender (embed, a head, an MLP) to a receiver computed after it (a head's q, k or v, the
    pre-activations of an MLP, the output), past everything between. The estimate is the change, source − base, of the
    sender's output to the residual stream, times ∂metric/∂(the residual stream as read by this receiver only),
    summed over positions (edge attribution patching: Syed et al. 2023, arXiv:2310.10348). Where a norm stands between a
    head and the stream, the change is what the norm makes of it to first order, in the run of the gradient.

    Args:
        method: "gradient", the gradient at base: the derivative of the metric along `patch.path`. "integrated", the
            mean of the gradients at `steps` midpoints from base to source.
        line: what moves under "integrated". "input", the network's embeddings (Hanna et al. 2024, arXiv:2403.17806):
            `steps` passes in all. "site", the sender's site (a layer's heads, an MLP, embed) as a whole, all before it
            as at base: `steps` passes per site.
        base: as in `patch.screen`.
        source: as in `patch.screen`.
        metric: as in `patch.screen`.
        batch: as in `patch.screen`.
        exact: as in `patch.screen`.
        seed: as in `patch.screen`.
        draws: as in `patch.screen`.
        flips: as in `patch.screen`.

    Heads that share keys and values are one receiver at k and v, their key-value group. In parallel blocks the MLP
    does not hear the heads of its layer. Position embeddings are equal in both runs and are no senders. Refused inside
    a block of `intervene` that edits the model.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch)
    read_choice(method, METHODS, CALLER, "method")
    read_choice(line, LINES, CALLER, "line")
    steps, counts = read_steps(steps, CALLER), Counts.read(CALLER, exact, seed, draws, flips)
    senders, receivers = _senders(pair.surface), _receivers(pair.surface)
    refuse_inside_blocks(pair)

    source_value = FromTokens(pair.source)
    baseline: list[PerExample] = []
    candidates: dict[tuple[str, str], Candidate] = {}
    per_example = len(senders) * pair.base.shape[1] * (pair.surface.sizes["d_model"] or 1)
    for piece in pair.pieces(max(1, min(EXAMPLES_PER_PASS, NUMBERS // per_example))):
        with ready_for_gradients(pair.surface):
            _refuse_edited_streams(piece)
            values, estimates = _estimates(
                piece, senders, receivers, steps if method == "integrated" else None, line
            )
        baseline.append(values)
        for receiver in receivers:
            for name, shifts in estimates[receiver.name].items():
                for sender, shift in zip(senders, shifts, strict=False):
                    edge = sender.name, receiver.name
                    if edge not in candidates:
                        candidates[edge] = Candidate(
                            _description(*edge), partial(_path, sender, receiver, source_value)
                        )
                    candidates[edge].add(name, shift.cpu().numpy())
    settings: Row = {"method": method, "direction": DIRECTION}
    settings |= {"steps": steps, "line": line} if method == "integrated" else {}
    return ranked(pair, list(candidates.values()), baseline, counts, settings)


def _estimates(
    piece: Pair, senders: list[End], receivers: list[End], steps: int | None, line: str
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """Returns the metrics at base, and estimates [sender n] by receiver and metric, for senders before the receiver."""
    streams = {one.hook: _stream(piece.surface, one) for one in receivers}
    sum_sites = _sums(piece.surface)
    sender_hooks = dict.fromkeys([sender.hook for sender in senders])
    attn_outs = [KINDS["attn_out"].hook.format(layer) for layer in range(piece.surface.n_layers)]
    input_hooks = [hook for hook in INPUTS if hook in piece.surface.hooks]
    normed_hooks = [site.hook() for site in sum_sites[1:] if piece.surface.stream_norm(site.name, site.layer)]
    receiver_hooks = dict.fromkeys([*(stream.hook() for stream in streams.values()), *streams, *normed_hooks])
    source_activations = piece.run(piece.source, dict.fromkeys([*sender_hooks, *input_hooks])).activations
    # Where a norm follows, what a head's change adds depends on the run.
    z_hooks = [KINDS["z"].hook.format(layer) for layer in range(piece.surface.n_layers)]
    bent_hooks = [*z_hooks, *attn_outs] if piece.surface.sublayer_norm("attn_out", 0) else []
    base_run = piece.run(
        piece.base, dict.fromkeys([*sender_hooks, *input_hooks, *attn_outs, *receiver_hooks]), graph=True
    )
    clean = base_run.output.detach()
    gaps = {
        hook: piece.without_padding(difference(base_run.activations[hook], source_activations[hook]), hook)
        for hook in sender_hooks
    }
    changes = _changes(senders, base_run, gaps)

    # Which hooks move together, and the senders whose estimates are those of their line.
    lines = [(input_hooks, range(len(senders)))]
    if line == "site":
        hooks = [sender.hook for sender in senders]  # senders of a hook are adjacent
        lines = [
            ([hook], range(hooks.index(hook), hooks.index(hook) + hooks.count(hook))) for hook in sender_hooks
        ]
    points: list[tuple[list[str], range, float | None]] = [
        (moving, on_line, fraction) for moving, on_line in lines for fraction in midpoints(steps or 1)
    ]
    if steps is None:
        points = [([], range(len(senders)), None)]

    estimates: dict[str, dict[str, Tensor]] = {one.name: {} for one in receivers}
    for moving, on_line, fraction in points:
        run = base_run
        if fraction is not None:
            interpolated = {
                hook: between(base_run.activations[hook], source_activations[hook], fraction)
                for hook in moving
            }
            recorded = dict.fromkeys([*input_hooks, *receiver_hooks, *bent_hooks])
            run = piece.run(piece.base, recorded, interpolated, graph=True)
            changes = _changes(senders, run, gaps) if bent_hooks else changes
        for name, gradients in piece.gradients(run, piece.values(run.output, clean), streams).items():
            for receiver in receivers:
                n_senders = sum(sender.order < receiver.order for sender in senders)
                if on_line.start >= n_senders:
                    continue
                stream = streams[receiver.hook]
                gradient = _to_stream(run, receiver, stream.hook(), gradients[receiver.hook])
                gradient = piece.without_padding(gradient, stream.hook())
                gradient_at_sum = _at_sums(piece.surface, run, sum_sites, stream, gradient)
                shifts = [
                    torch.einsum("s b p d, b p d -> s b", changes_at_sum, gradient_at_sum[sum_site].double())
                    for sum_site, changes_at_sum in _by_sum(piece.surface, senders[:n_senders], changes)
                ]
                shift = torch.cat(shifts)
                elsewhere = torch.ones_like(shift[:, :1], dtype=torch.bool)
                elsewhere[on_line.start : on_line.stop] = False
                shift = shift.masked_fill(elsewhere, 0.0)
                total = estimates[receiver.name].get(name, 0) + shift / (steps or 1)
                estimates[receiver.name][name] = piece.finite(total, name, receiver.name)
    return read_values(piece.values(clean, clean), "metric", len(piece.base), BASELINE), estimates


def _refuse_edited_streams(piece: Pair) -> None:
    """Refuses user hooks that change the residual stream itself, because estimates would ignore them.

    Hooks on the outputs of components count as part of the components.
    """
    surface = piece.surface
    blocks = [surface.model.get_submodule(f"blocks.{layer}") for layer in range(surface.n_layers)]
    names = [Site(name, layer).hook() for layer in range(surface.n_layers) for name in STREAMS]
    names = [hook for hook in names if hook in surface.hooks]
    if not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in (*blocks, *(surface.hooks[hook] for hook in names))
    ):
        return
    stream_in: dict[str, Tensor] = {}
    last_out: list[Tensor] = []

    def arrive(hook: str, x: Tensor) -> None:
        stream_in[hook] = x.clone()
        if hook.endswith("resid_pre") and last_out and not surface.post_norm:
            refuse(hook, x, last_out.pop())

    def leave(hook: str, x: Tensor) -> None:
        refuse(hook, x, stream_in.pop(hook))
        last_out[:] = [x.clone()] if hook.endswith("resid_post") else []

    def refuse(hook: str, x: Tensor, expected: Tensor) -> None:
        if not torch.equal(x, expected):
            raise CircuitsError(
                f"{CALLER}: a hook changes the residual stream at {hook}, past which estimates would carry what "
                "senders change as it is, and patch.path would not; take it off"
            )

    with torch.no_grad(), ExitStack() as stack:
        for hook in names:
            stack.callback(surface.before(hook, partial(arrive, hook)).remove)
            stack.callback(surface.on_forward(hook, partial(leave, hook)).remove)
        surface.call(piece.base)


def _changes(senders: list[End], run: Run, gaps: dict[str, Tensor]) -> Tensor:
    """Returns each sender's change of the residual stream, source − base: [sender batch pos d_model], float64.

    Args:
        run: the run in which a change of z is carried to the stream.
        gaps: source − base by hook.
    """
    changes = [
        gaps[sender.hook] if sender.head is None else _through_output(run, sender, gaps[sender.hook])
        for sender in senders
    ]
    return torch.stack([gap.expand_as(changes[-1]) for gap in changes])


def _through_output(run: Run, sender: End, gap: Tensor) -> Tensor:
    """Carries a change of one head's z forward to attn_out, to first order: through W_O, a norm that follows it, and
    any hooks on the way.

    The Jacobian-vector product is computed by backward passes: the vector-Jacobian product is linear in its vector, and
    its gradient there is the Jacobian-vector product.
    """
    z, out = (
        run.activations[sender.hook],
        run.activations[sender.hook.replace("attn.hook_z", "hook_attn_out")],
    )
    head_change = torch.zeros_like(z)
    head_change[:, :, sender.head] = gap[:, :, sender.head].to(z.dtype)
    vector = torch.zeros_like(out, requires_grad=True)
    with torch.enable_grad():
        (vjp,) = torch.autograd.grad(out, z, vector, create_graph=True)
    (jvp,) = torch.autograd.grad(vjp, vector, head_change)
    return jvp.double()


def _to_stream(run: Run, receiver: End, stream: str, gradient: Tensor) -> Tensor:
    """Carries the gradient at a receiver (a head's own part of it) back to the residual stream that it reads."""
    if stream == receiver.hook:
        return gradient
    if receiver.head is not None:
        head_gradient = torch.zeros_like(gradient)
        head_gradient[:, :, receiver.head] = gradient[:, :, receiver.head]
        gradient = head_gradient
    # In between are the LayerNorm and a projection, or the MLP, in the graph of the model's own run.
    (stream_gradient,) = torch.autograd.grad(
        run.activations[receiver.hook], run.activations[stream], gradient, retain_graph=True
    )
    return stream_gradient


def _stream(surface: Surface, receiver: End) -> Site:
    """Returns the site of the residual stream that a receiver reads."""
    before = {"resid_post": "resid_post", "mlp_pre": "resid_pre" if surface.parallel else "resid_mid"}
    return Site(before.get(receiver.place.site.name, "resid_pre"), receiver.layer)


def _sums(surface: Surface) -> list[Site]:
    """Lists the sites of sums in the residual stream, in order; "embed" stands for the sum of the embeddings."""
    places = [Site(name, layer) for layer in range(surface.n_layers) for name in ("resid_mid", "resid_post")]
    return [Site("embed"), *(place for place in places if place.hook() in surface.hooks)]


def _sum_of(surface: Surface, sender: End) -> Site:
    """Returns the site of the sum to which a sender is added."""
    site = sender.place.site.name
    if site == "embed":
        return Site(site)
    between = Site("resid_mid", sender.layer)
    return between if site == "z" and between.hook() in surface.hooks else Site("resid_post", sender.layer)


def _by_sum(surface: Surface, senders: list[End], changes: Tensor) -> Iterator[tuple[Site, Tensor]]:
    """Groups changes [sender batch pos d_model] by the sum to which they are added; such senders are adjacent."""
    start = 0
    for sum_site, senders_at_sum in groupby(_sum_of(surface, sender) for sender in senders):
        end = start + len(list(senders_at_sum))
        yield sum_site, changes[start:end]
        start = end


def _at_sums(
    surface: Surface, run: Run, sum_sites: list[Site], stream: Site, gradient: Tensor
) -> dict[Site, Tensor]:
    """Carries the gradient at the stream that a receiver reads back to each earlier sum, along the stream only.

    Where the stream itself is normalised after a sum, the gradient passes through that norm, as `patch.path` recomputes
    it.
    """
    gradient_at_sum: dict[Site, Tensor] = {}
    if stream in sum_sites:
        gradient_at_sum[stream] = gradient
    earlier = [site for site in sum_sites if site.layer is None or site.layer < (stream.layer or 0)]
    if stream.name == "resid_post" and Site("resid_mid", stream.layer) in sum_sites:
        earlier.append(Site("resid_mid", stream.layer))
    for sum_site in reversed(earlier):
        path = surface.stream_norm(sum_site.name, sum_site.layer)
        if path is not None:
            hooks = INPUTS if sum_site.layer is None else [sum_site.hook()]
            x = sum(run.activations[hook].detach() for hook in hooks if hook in run.activations)
            assert isinstance(x, Tensor)
            with torch.enable_grad():
                x.requires_grad_()
                (gradient,) = torch.autograd.grad(surface.model.get_submodule(path)(x), x, gradient)
        gradient_at_sum[sum_site] = gradient
    return gradient_at_sum


def _senders(surface: Surface) -> list[End]:
    """Lists the senders in the order in which they are computed."""
    senders: list[End] = []
    for site in ("embed", "z", "mlp_out"):
        if KINDS[site].hook.format(0) in surface.hooks:
            senders += _ends(surface, site, SENDERS)
    return sorted(senders, key=lambda sender: sender.order)


def _receivers(surface: Surface) -> list[End]:
    receivers: list[End] = []
    table = receivers_of(surface)
    for site in ("q", "k", "v"):
        receivers += _ends(surface, site, table)
    if KINDS["mlp_pre"].hook.format(0) in surface.hooks:
        # The hook is the MLP's output, because in a gated MLP hook_pre is only one of its reads of the stream.
        receivers += [
            replace(receiver, hook=KINDS["mlp_out"].hook.format(receiver.layer))
            for receiver in _ends(surface, "mlp_pre", table)
        ]
    last = Site("resid_post", surface.n_layers - 1)
    order = order_of(last.name, last.layer, table)
    receivers.append(End("output", Place(last), last.layer, last.hook(), order))
    return sorted(receivers, key=lambda receiver: receiver.order)


def _ends(surface: Surface, name: str, table: dict[str, int]) -> list[End]:
    ends: list[End] = []
    kind = KINDS[name]
    for layer, hook in surface.at(Site(name)):
        order, site = order_of(name, layer, table), Site(name, layer)
        if kind.head_axis is None:
            ends.append(End(str(site), Place(site), layer, hook, order))
            continue
        for index in range(surface.head_count(kind)):
            head = at_index(kind, layer or 0, index, surface)
            label = label_in(head, surface, "" if name == "z" else name)
            ends.append(End(label, Place(Site(name), HeadSpec(str(head), (head,))), layer, hook, order))
    return ends


def _description(sender: str, receiver: str) -> Row:
    return {
        "variant": f"{sender} -> {receiver}",
        "intervention": f"patch.path ({DIRECTION})",
        "sender": sender,
        "receiver": receiver,
    }


def _path(sender: End, receiver: End, source_value: FromTokens) -> Path:
    """Returns the `patch.path` along one edge."""
    receivers = () if receiver.name == "output" else (receiver.place,)
    return Path(Edit("patch.path", (sender.place,), source_value), receivers, None)
