"""Screens edges: gradient estimates of the effect of patching every direct path, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.base import Replacement
from circuits.interventions.edges import MAX_CHANGE_ENTRIES, SENDERS, order_of, receivers_of
from circuits.interventions.edits import Edit, Place
from circuits.interventions.paths import Path
from circuits.interventions.replacements import DIRECTION
from circuits.model.heads import HeadSpec, at_index, index_of, label_in
from circuits.model.sites import KINDS, Site
from circuits.model.state import unwritten
from circuits.model.surface import Surface
from circuits.patch._doubt import Arrival, Extremes, attention_hooks, carried, recomputed_z
from circuits.patch._gradients import (
    EXAMPLES_PER_PASS,
    Pair,
    Run,
    between,
    difference,
    midpoints,
    ready_for_gradients,
    vector_jacobian_products,
)
from circuits.patch._ranking import Candidate, Counts, ranked, read_steps, refuse_inside_blocks
from circuits.patch._result import ScreenResult
from circuits.patch._screen import INPUTS, LINES, METHODS
from circuits.sweeps.measurements import BASELINE, Row
from circuits.sweeps.metrics import PerExample, read_values
from circuits.validate import read_choice

CALLER = "patch.edges"

#: The sites of the residual stream itself.
STREAMS = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True)
class Endpoint:
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
    how: str = "resample",
    method: str = "integrated",
    steps: int = 5,
    line: str = "input",
    exact: int | str = 10,
    budget: int | None = None,
    rank: str = "mean",
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
        source: as in `patch.screen`; for how="mean" any batch, for "zero" None.
        how: what an edge carries, as in `circuit.keep`: "resample", what the sender has on the source; "mean", the mean
            of that over the source's examples, per position; "zero", nothing. "Source" above is then a run in which
            every sender has that value.
        metric: as in `patch.screen`.
        batch: as in `patch.screen`.
        exact: as in `patch.screen`; or "verified", the `budget` edges whose estimates are the most doubtful, and no
            others. Estimates then are those of `method`, but for queries and keys with the softmax computed anew
            (AtP*: Kramár et al. 2024, arXiv:2403.00745). An edge is in doubt unless what it changes does not arrive, or
            the gradients at base, on the way and at source agree. `frame` also has `verified`, whether the effect was
            measured, and `doubt`, how far the estimate may be off by that rule, in units of the metric; 0 is trusted.
        budget: the largest number of exact effects of "verified"; by default a third of the edges.
        rank: as in `patch.screen`.
        seed: as in `patch.screen`.
        draws: as in `patch.screen`.
        flips: as in `patch.screen`.

    Heads that share keys and values are one receiver at k and v, their key-value group. In parallel blocks the MLP
    does not hear the heads of its layer. Position embeddings (pos_embed) are a sender under "zero"; on a source, and in
    the mean over sources, they are what they are on base. Refused inside a block of `intervene` that edits the model.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch, how)
    read_choice(method, METHODS, CALLER, "method")
    read_choice(line, LINES, CALLER, "line")
    steps, counts = read_steps(steps, CALLER), Counts.read(CALLER, exact, seed, draws, flips, rank, budget)
    if counts.verified and pair.surface.post_norm:
        raise CircuitsError(
            f'{CALLER}: exact="verified" is not supported where the residual stream itself is normalised; give a '
            'number or "all"'
        )
    if counts.verified and how != "resample":
        raise CircuitsError(
            f'{CALLER}: exact="verified" follows changes to the run of a source; give how="resample", or exact= a '
            'number or "all"'
        )
    senders, receivers = _senders(pair.surface, how), _receivers(pair.surface)
    refuse_inside_blocks(pair)

    baseline: list[PerExample] = []
    candidates: dict[tuple[str, str], Candidate] = {}
    per_example = len(senders) * pair.base.shape[1] * (pair.surface.sizes["d_model"] or 1)
    per_example *= 2 * pair.surface.n_layers if counts.verified else 1  # changes of z, of queries and of keys
    for piece in pair.pieces(max(1, min(EXAMPLES_PER_PASS, MAX_CHANGE_ENTRIES // per_example))):
        with ready_for_gradients(pair.surface), unwritten(pair.surface.model, CALLER):
            _refuse_edited_streams(piece)
            values, estimates, evidence = _estimates(
                piece, senders, receivers, steps if method == "integrated" else None, line, counts.verified
            )
        baseline.append(values)
        # Senders are in order of computation; `shifts` ends before the receiver, so zip stops there.
        for receiver in receivers:
            for name, shifts in estimates[receiver.name].items():
                for sender, shift in zip(senders, shifts, strict=False):
                    edge = sender.name, receiver.name
                    if edge not in candidates:
                        candidates[edge] = Candidate(
                            _description(*edge, pair.how), partial(_path, sender, receiver, pair.replacement)
                        )
                    candidates[edge].add(name, shift.cpu().numpy())
            for name, rows in evidence.get(receiver.name, {}).items():
                for sender, row in zip(senders, rows, strict=False):
                    candidates[sender.name, receiver.name].add_evidence(name, row)
    settings: Row = {"method": method, "how": how}
    settings |= {"direction": DIRECTION} if how == "resample" else {}
    settings |= {"steps": steps, "line": line} if method == "integrated" else {}
    return ranked(pair, list(candidates.values()), baseline, counts, settings)


def _estimates(
    piece: Pair,
    senders: list[Endpoint],
    receivers: list[Endpoint],
    steps: int | None,
    line: str,
    verified: bool,
) -> tuple[PerExample, dict[str, dict[str, Tensor]], dict[str, dict[str, np.ndarray]]]:
    """Returns the metrics at base, estimates [sender n] by receiver and metric, for senders before the receiver; and,
    if `verified`, evidence [sender field] for doubts, in the same way.
    """
    streams = {one.hook: _stream(piece.surface, one) for one in receivers}
    by_hook = {hook: [one for one in receivers if one.hook == hook] for hook in streams}
    sum_sites = _sums(piece.surface)
    sender_hooks = dict.fromkeys([sender.hook for sender in senders])
    attn_outs = [KINDS["attn_out"].hook.format(layer) for layer in range(piece.surface.n_layers)]
    input_hooks = [hook for hook in INPUTS if hook in piece.surface.hooks]
    normed_hooks = [site.hook() for site in sum_sites[1:] if piece.surface.stream_norm(site.name, site.layer)]
    receiver_hooks = dict.fromkeys([*(stream.hook() for stream in streams.values()), *streams, *normed_hooks])
    read_hooks = [_read_hook(piece.surface, one) for one in receivers] if verified else []
    source_activations = piece.patched(dict.fromkeys([*sender_hooks, *input_hooks, *read_hooks]))
    # A norm after attention makes the change at attn_out depend on the run, so z is recorded in each.
    z_hooks = [KINDS["z"].hook.format(layer) for layer in range(piece.surface.n_layers)]
    attn_out_has_norm = piece.surface.sublayer_norm("attn_out", 0) is not None
    hooks_of_each_run = [*z_hooks, *attn_outs] if attn_out_has_norm else []
    base_hooks = [*sender_hooks, *input_hooks, *attn_outs, *receiver_hooks, *read_hooks]
    if verified:
        base_hooks += [
            hook for layer in range(piece.surface.n_layers) for hook in attention_hooks(layer).values()
        ]
        hooks_of_each_run += z_hooks
    base_run = piece.run(
        piece.base, [hook for hook in dict.fromkeys(base_hooks) if hook in piece.surface.hooks], graph=True
    )
    clean = base_run.output.detach()
    gaps = {
        hook: piece.without_padding(difference(base_run.activations[hook], source_activations[hook]), hook)
        for hook in sender_hooks
    }
    changes = _changes(senders, base_run, gaps)
    arrivals = _arrivals(piece, senders, receivers, base_run, source_activations, changes) if verified else {}

    estimates: dict[str, dict[str, Tensor]] = {one.name: {} for one in receivers}
    extremes: dict[str, dict[str, Extremes]] = {one.name: {} for one in receivers}
    metric_gaps: dict[str, np.ndarray] = {}
    baseline = read_values(piece.values(clean, clean), "metric", len(piece.base), BASELINE)
    points = _integration_points(senders, input_hooks, steps, line, verified)
    for moving, on_line, fraction, weight in points:
        run = base_run
        if fraction is not None:
            interpolated = {
                hook: between(base_run.activations[hook], source_activations[hook], fraction)
                for hook in moving
            }
            recorded = dict.fromkeys([*input_hooks, *receiver_hooks, *hooks_of_each_run])
            run = piece.run(piece.base, recorded, interpolated, graph=True)
            changes = _changes(senders, run, gaps) if attn_out_has_norm else changes
        values = piece.values(run.output, clean)
        if fraction == 1.0:
            at_source = read_values(values, "metric", len(piece.base), BASELINE)
            metric_gaps = {name: np.abs(at_source[name][0] - baseline[name][0]) for name in baseline}
        gradient_hooks = [*streams, *(z_hooks if verified else ())]
        for name, gradients in piece.gradients(run, values, gradient_hooks).items():
            for hook, together in by_hook.items():
                n_senders = sum(sender.order < together[0].order for sender in senders)
                if on_line.start >= n_senders:
                    continue
                stream = streams[hook]
                found = _to_stream(run, together, stream.hook(), gradients[hook])
                found = torch.stack([piece.without_padding(one, stream.hook()) for one in found])
                at_sum = _at_sums(piece.surface, run, sum_sites, stream, found)
                linear = [
                    (changes_at_sum, at_sum[sum_site].double())
                    for sum_site, changes_at_sum in _by_sum(piece.surface, senders[:n_senders], changes)
                ]
                shifts = torch.cat([_products(*pair) for pair in linear], 1)
                elsewhere = torch.ones_like(shifts[0, :, :1], dtype=torch.bool)
                elsewhere[on_line.start : on_line.stop] = False
                sizes = shifts
                if verified:
                    sizes = torch.cat([_products(changed.abs(), by.abs()) for changed, by in linear], 1)
                for receiver, shift, size in zip(together, shifts, sizes, strict=True):
                    arrival = arrivals.get(receiver.name)
                    if arrival is not None and arrival.z is not None:
                        # AtP*: what queries and keys make of z, and linear from there.
                        z_gradient = gradients[z_hooks[receiver.layer or 0]][:, :, arrival.heads]
                        z_gradient = piece.without_padding(z_gradient, z_hooks[0]).double()
                        z_change = arrival.z.double()
                        shift, size = (
                            torch.einsum("s b p h d, b p h d -> s b", *pair)
                            for pair in ((z_change, z_gradient), (z_change.abs(), z_gradient.abs()))
                        )
                    if verified:
                        extremes[receiver.name].setdefault(name, Extremes()).add(shift, size, elsewhere)
                    shift = shift.masked_fill(elsewhere, 0.0)
                    total = estimates[receiver.name].get(name, 0) + weight * shift
                    estimates[receiver.name][name] = piece.finite(total, name, receiver.name)
    evidence = {
        receiver.name: {
            name: np.concatenate(
                [
                    arrivals[receiver.name].sizes,
                    found.summed(),
                    np.full((len(found.summed()), 1), metric_gaps[name].sum()),
                ],
                1,
            )
            for name, found in extremes[receiver.name].items()
        }
        for receiver in receivers
    }
    return baseline, estimates, evidence


def _integration_points(
    senders: list[Endpoint], input_hooks: list[str], steps: int | None, line: str, verified: bool
) -> list[tuple[list[str], range, float | None, float]]:
    """Lists the runs whose gradients are taken: the hooks that move together, the senders whose estimates are those of
    their line, how far the hooks move (None: the run at base), and the weight of the gradient.
    """
    every = range(len(senders))
    lines = [(input_hooks, every)]
    if line == "site":
        hooks = [sender.hook for sender in senders]  # senders of a hook are adjacent
        lines = [
            ([hook], range(hooks.index(hook), hooks.index(hook) + hooks.count(hook)))
            for hook in dict.fromkeys(hooks)
        ]
    at_base = steps is None
    points: list[tuple[list[str], range, float | None, float]] = [
        (moving, on_line, fraction, 1 / (steps or 1))
        for moving, on_line in ([] if at_base else lines)
        for fraction in midpoints(steps or 1)
    ]
    if at_base or verified:
        points.append(([], every, None, float(at_base)))
    if verified:
        points.append((input_hooks, every, 1.0, 0.0))
    return points


def _read_hook(surface: Surface, receiver: Endpoint) -> str:
    """Returns the hook of what a receiver reads; of an MLP with more reads than one, that of the stream."""
    if receiver.place.site.name != "mlp_pre":
        return receiver.hook
    pre = KINDS["mlp_pre"].hook.format(receiver.layer)
    gated = (
        getattr(surface.model.cfg, "gated_mlp", False)
        or pre.replace("hook_pre", "hook_pre_linear") in surface.hooks
    )
    return _stream(surface, receiver).hook() if gated else pre


def _arrivals(
    piece: Pair,
    senders: list[Endpoint],
    receivers: list[Endpoint],
    run: Run,
    source_activations: dict[str, Tensor],
    changes: Tensor,
) -> dict[str, Arrival]:
    """Returns what arrives of every sender's change at each receiver, at base."""
    found: dict[str, Arrival] = {}

    def size(x: Tensor, hook: str, head: int | slice) -> Tensor:
        """Returns squared sizes [...], of x [... batch pos (head) d]."""
        kept = torch.stack([piece.without_padding(one, hook) for one in x])
        kept = kept if Site(hook).kind.head_axis is None else kept[:, :, :, head]
        return kept.double().square().flatten(1).sum(1)

    arrived: dict[str, Tensor] = {}
    z_arrived: dict[str, Tensor | None] = {}
    for receiver in receivers:
        hook, stream = _read_hook(piece.surface, receiver), _stream(piece.surface, receiver).hook()
        n_senders = sum(sender.order < receiver.order for sender in senders)
        if hook not in arrived:
            carried_there = None
            if hook != stream:
                carried_there = carried(run.activations[hook], run.activations[stream], changes[:n_senders])
            arrived[hook] = changes[:n_senders] if carried_there is None else carried_there
            site, shown = receiver.place.site.name, attention_hooks(receiver.layer or 0)
            z_arrived[hook] = None
            if site in ("q", "k") and all(one in run.activations for one in shown.values()):
                z_arrived[hook] = recomputed_z(run, receiver.layer or 0, site, arrived[hook])
        head = slice(None) if receiver.head is None else receiver.head
        base, z = run.activations[hook].detach(), z_arrived[hook]
        source = source_activations[hook].expand_as(base)
        whole = size(torch.stack([base, source]), hook, head).sum()
        moved = size(difference(base, source)[None], hook, head)[0]
        sizes = [size(arrived[hook], hook, head), whole, moved]
        heads = slice(None)
        if z is not None and receiver.head is not None:
            z_hook = attention_hooks(receiver.layer or 0)["z"]
            per_group = z.shape[3] // run.activations[hook].shape[2]
            heads = slice(receiver.head * per_group, (receiver.head + 1) * per_group)
            z_base, z_source = run.activations[z_hook].detach(), source_activations[z_hook]
            z_source = z_source.expand_as(z_base)
            sizes += [
                size(z, z_hook, heads),
                size(torch.stack([z_base, z_source]), z_hook, heads).sum(),
                size(difference(z_base, z_source)[None], z_hook, heads)[0],
            ]
            z = z[:, :, :, heads]
        else:
            sizes += [torch.tensor(torch.nan)] * 3
        rows = torch.stack([one.double().cpu().expand(n_senders) for one in sizes], 1)
        found[receiver.name] = Arrival(z, heads, rows.numpy())
    return found


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


def _changes(senders: list[Endpoint], run: Run, gaps: dict[str, Tensor]) -> Tensor:
    """Returns each sender's change of the residual stream, source − base: [sender batch pos d_model], float64.

    Args:
        run: the run in which a change of z is carried to the stream.
        gaps: source − base by hook.
    """
    changes: list[Tensor] = []
    for hook, group in groupby(senders, key=lambda sender: sender.hook):
        heads = [sender.head for sender in group if sender.head is not None]
        changes += _through_output(run, hook, heads, gaps[hook]) if heads else [gaps[hook]]
    # In memory each example's changes of all senders lie together, as products with gradients read them.
    return torch.stack([gap.expand_as(changes[-1]) for gap in changes], 1).transpose(0, 1)


def _products(changes: Tensor, gradients: Tensor) -> Tensor:
    """Returns the sums over positions of changes [sender batch pos d] times gradients [receiver batch pos d], as
    [receiver sender batch].
    """
    by_example = changes.transpose(0, 1).flatten(2) @ gradients.flatten(2).permute(1, 2, 0)
    return by_example.permute(2, 1, 0)


def _through_output(run: Run, hook: str, heads: Sequence[int], gap: Tensor) -> Tensor:
    """Carries changes of z of single heads forward to attn_out, to first order: through W_O, a norm that follows it,
    and any hooks on the way. [head batch pos d_model]
    """
    z, out = run.activations[hook], run.activations[hook.replace("attn.hook_z", "hook_attn_out")]
    head_changes = z.new_zeros(len(heads), *z.shape)
    for change, head in zip(head_changes, heads, strict=True):
        change[:, :, head] = gap[:, :, head].to(z.dtype)
    changes = carried(out, z, head_changes)
    assert changes is not None
    return changes.double()


def _to_stream(run: Run, receivers: Sequence[Endpoint], stream: str, gradient: Tensor) -> Tensor:
    """Carries the gradient at receivers of one hook (of heads each its own part) back to the residual stream that they
    read: [receiver batch pos d_model].
    """
    hook = receivers[0].hook
    if stream == hook:
        return gradient[None]
    heads = [one.head for one in receivers if one.head is not None]
    parts = gradient[None]
    if heads:
        parts = gradient.new_zeros(len(heads), *gradient.shape)
        for part, head in zip(parts, heads, strict=True):
            part[:, :, head] = gradient[:, :, head]
    # In between are the LayerNorm and a projection, or the MLP, in the graph of the model's own run.
    return vector_jacobian_products(run.activations[hook], run.activations[stream], parts)


def _stream(surface: Surface, receiver: Endpoint) -> Site:
    """Returns the site of the residual stream that a receiver reads."""
    before = {"resid_post": "resid_post", "mlp_pre": "resid_pre" if surface.parallel else "resid_mid"}
    return Site(before.get(receiver.place.site.name, "resid_pre"), receiver.layer)


def _sums(surface: Surface) -> list[Site]:
    """Lists the sites of sums in the residual stream, in order; "embed" stands for the sum of the embeddings."""
    places = [Site(name, layer) for layer in range(surface.n_layers) for name in ("resid_mid", "resid_post")]
    return [Site("embed"), *(place for place in places if place.hook() in surface.hooks)]


def _sum_of(surface: Surface, sender: Endpoint) -> Site:
    """Returns the site of the sum to which a sender is added."""
    site = sender.place.site.name
    if sender.layer is None:
        return Site("embed")
    between = Site("resid_mid", sender.layer)
    return between if site == "z" and between.hook() in surface.hooks else Site("resid_post", sender.layer)


def _by_sum(surface: Surface, senders: list[Endpoint], changes: Tensor) -> Iterator[tuple[Site, Tensor]]:
    """Groups changes [sender batch pos d_model] by the sum to which they are added; such senders are adjacent."""
    start = 0
    for sum_site, senders_at_sum in groupby(_sum_of(surface, sender) for sender in senders):
        end = start + len(list(senders_at_sum))
        yield sum_site, changes[start:end]
        start = end


def _at_sums(
    surface: Surface, run: Run, sum_sites: list[Site], stream: Site, gradient: Tensor
) -> dict[Site, Tensor]:
    """Carries gradients [receiver batch pos d_model] at the stream that receivers read back to each earlier sum, along
    the stream only.

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
                gradient = vector_jacobian_products(surface.model.get_submodule(path)(x), x, gradient)
        gradient_at_sum[sum_site] = gradient
    return gradient_at_sum


def _senders(surface: Surface, how: str = "resample") -> list[Endpoint]:
    """Lists the senders in the order in which they are computed."""
    senders: list[Endpoint] = []
    # Any two prompts, and so their mean, have the same position embeddings.
    for site in ("embed", *(["pos_embed"] if how == "zero" else []), "z", "mlp_out"):
        if KINDS[site].hook.format(0) in surface.hooks:
            senders += _endpoints(surface, site, SENDERS)
    return sorted(senders, key=lambda sender: sender.order)


def _receivers(surface: Surface) -> list[Endpoint]:
    """Returns every place that receives an edge, in the order in which the model computes them."""
    receivers: list[Endpoint] = []
    table = receivers_of(surface)
    for site in ("q", "k", "v"):
        receivers += _endpoints(surface, site, table)
    if KINDS["mlp_pre"].hook.format(0) in surface.hooks:
        # The hook is the MLP's output, because in a gated MLP hook_pre is only one of its reads of the stream.
        receivers += [
            replace(receiver, hook=KINDS["mlp_out"].hook.format(receiver.layer))
            for receiver in _endpoints(surface, "mlp_pre", table)
        ]
    last = Site("resid_post", surface.n_layers - 1)
    order = order_of(last.name, last.layer, table)
    receivers.append(Endpoint("output", Place(last), last.layer, last.hook(), order))
    return sorted(receivers, key=lambda receiver: receiver.order)


def _endpoints(surface: Surface, name: str, table: dict[str, int]) -> list[Endpoint]:
    ends: list[Endpoint] = []
    kind = KINDS[name]
    for layer, hook in surface.at(Site(name)):
        order, site = order_of(name, layer, table), Site(name, layer)
        if kind.head_axis is None:
            ends.append(Endpoint(str(site), Place(site), layer, hook, order))
            continue
        for index in range(surface.head_count(kind)):
            head = at_index(kind, layer or 0, index, surface)
            label = label_in(head, surface, "" if name == "z" else name)
            ends.append(Endpoint(label, Place(Site(name), HeadSpec(str(head), (head,))), layer, hook, order))
    return ends


def _description(sender: str, receiver: str, how: str) -> Row:
    return {
        "variant": f"{sender} -> {receiver}",
        "intervention": f"patch.path ({DIRECTION if how == 'resample' else how})",
        "sender": sender,
        "receiver": receiver,
    }


def _path(sender: Endpoint, receiver: Endpoint, replacement: Replacement) -> Path:
    """Returns the `patch.path` along one edge."""
    receivers = (None if receiver.name == "output" else receiver.place,)
    return Path(Edit("patch.path", (sender.place,), replacement), receivers, None)
