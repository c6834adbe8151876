"""Screens edges: gradient estimates of the effect of patching every direct path, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.base import Replacement
from circuits.interventions.edits import Edit, Place
from circuits.interventions.paths import SENDERS, Path, order_of, receivers_of
from circuits.interventions.replacements import DIRECTION
from circuits.model.edit_state import assert_weights_unchanged
from circuits.model.heads import HeadSpec, at_index, index_of, label_in
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS, Site
from circuits.patch._gradients import (
    Pair,
    Run,
    between,
    difference,
    midpoints,
    ready_for_gradients,
    vector_jacobian_products,
)
from circuits.patch._result import (
    Candidate,
    ScreenOptions,
    ScreenResult,
    check_outside_blocks,
    parse_steps,
    ranked,
)
from circuits.patch._screen import INPUTS
from circuits.sweeps.measurements import Row
from circuits.sweeps.metrics import PerExample
from circuits.validate import answers_former_names, parse_choice


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


def senders_of(surface: HookedModel, how: str = "resample") -> list[Endpoint]:
    """Lists the senders in the order in which they are computed."""
    senders: list[Endpoint] = []
    # Any two prompts, and so their mean, have the same position embeddings.
    positions = ["pos_embed"] if how == "zero" and "pos_embed" in surface.embeddings else []
    for site in ("embed", *positions, "z", "mlp_out"):
        if KINDS[site].hook.format(0) in surface.hooks:
            senders += _endpoints(surface, site, SENDERS)
    return sorted(senders, key=lambda sender: sender.order)


def inputs_of(surface: HookedModel) -> list[Endpoint]:
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


def _endpoints(surface: HookedModel, name: str, table: dict[str, int]) -> list[Endpoint]:
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


def stream_of(surface: HookedModel, receiver: Endpoint) -> Site:
    """Returns the site of the residual stream that a receiver reads."""
    before = {"resid_post": "resid_post", "mlp_pre": "resid_pre" if surface.parallel else "resid_mid"}
    return Site(before.get(receiver.place.site.name, "resid_pre"), receiver.layer)


def sums_of(surface: HookedModel) -> list[Site]:
    """Lists the sites of sums in the residual stream, in order; "embed" stands for the sum of the embeddings."""
    places = [Site(name, layer) for layer in range(surface.n_layers) for name in ("resid_mid", "resid_post")]
    return [Site("embed"), *(place for place in places if place.hook() in surface.hooks)]


def sum_of(surface: HookedModel, sender: Endpoint) -> Site:
    """Returns the site of the sum to which a sender is added."""
    site = sender.place.site.name
    if sender.layer is None:
        return Site("embed")
    between = Site("resid_mid", sender.layer)
    return between if site == "z" and between.hook() in surface.hooks else Site("resid_post", sender.layer)


def hooks_of(surface: HookedModel, senders: list[Endpoint], receivers: list[Endpoint]) -> list[str]:
    """Lists the hooks whose activations estimates between these need."""
    layers = range(surface.n_layers)
    attention = [KINDS[site].hook.format(layer) for layer in layers for site in ("z", "attn_out")]
    normed = [site.hook() for site in sums_of(surface)[1:] if surface.stream_norm(site.name, site.layer)]
    received = [hook for one in receivers for hook in (stream_of(surface, one).hook(), one.hook)]
    needed = dict.fromkeys([*INPUTS, *(one.hook for one in senders), *attention, *received, *normed])
    return [hook for hook in needed if hook in surface.hooks]


def estimated(
    piece: Pair, senders: list[Endpoint], receivers: list[Endpoint], steps: int | None
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """Returns the metrics at base, and estimates [sender n] by receiver and metric, for senders before the receiver.

    Args:
        steps: runs between base and source whose gradients are averaged; None: the gradient at base.
    """
    hooks, sent = hooks_of(piece.surface, senders, receivers), dict.fromkeys(one.hook for one in senders)
    inputs = [hook for hook in INPUTS if hook in hooks]
    source_activations = piece.patched(dict.fromkeys([*sent, *inputs]))
    base_run = piece.run(piece.base, hooks, graph=True)
    clean = base_run.output.detach()
    gaps = {
        hook: piece.without_padding(difference(base_run.activations[hook], source_activations[hook]), hook)
        for hook in sent
    }
    changes = _changes(senders, base_run, gaps)
    changes_in_each_run = piece.surface.sublayer_norm("attn_out", 0) is not None
    found: dict[str, dict[str, Tensor]] = {one.name: {} for one in receivers}
    by_hook = {one.hook: [other for other in receivers if other.hook == one.hook] for one in receivers}
    for fraction in [None] if steps is None else midpoints(steps):
        run = base_run
        if fraction is not None:
            line = {
                hook: between(base_run.activations[hook], source_activations[hook], fraction)
                for hook in inputs
            }
            run = piece.run(piece.base, hooks, line, graph=True)
            changes = _changes(senders, run, gaps) if changes_in_each_run else changes
        values = piece.values(run.output, clean)
        for metric, gradients in piece.gradients(run, values, by_hook).items():
            for together in by_hook.values():
                shifts = _shifts(piece, run, senders, changes, together, gradients[together[0].hook])
                for receiver, shift in zip(together, shifts, strict=True):
                    total = found[receiver.name].get(metric, 0) + (1 / (steps or 1)) * shift
                    found[receiver.name][metric] = piece.finite(total, metric, receiver.name)
    return piece.baseline(clean), found


def _shifts(
    piece: Pair,
    run: Run,
    senders: list[Endpoint],
    changes: Tensor,
    receivers: list[Endpoint],
    gradient: Tensor,
) -> Tensor:
    """Returns the estimates [receiver sender n] of one run, for receivers of one hook and the senders before them.

    Args:
        changes: of the stream by each sender, [sender batch pos d_model].
        gradient: of the metric at the receivers' hook.
    """
    surface = piece.surface
    earlier = [sender for sender in senders if sender.order < receivers[0].order]
    stream = stream_of(surface, receivers[0])
    read = _to_stream(run, receivers, stream.hook(), gradient)
    read = torch.stack([piece.without_padding(one, stream.hook()) for one in read])
    at_sum = _at_sums(surface, run, sums_of(surface), stream, read)
    by_sum = _by_sum(surface, earlier, changes[: len(earlier)])
    return torch.cat([_products(at_one, at_sum[sum_site].double()) for sum_site, at_one in by_sum], 1)


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
    return _carried(out, z, head_changes).double()


def _carried(out: Tensor, x: Tensor, changes: Tensor) -> Tensor:
    """Carries changes of x [sender ...] forward to `out`, to first order.

    The Jacobian-vector product is computed by backward passes: the vector-Jacobian product is linear in its vector, and
    its gradient there is the Jacobian-vector product.
    """
    vector = torch.zeros_like(out, requires_grad=True)
    with torch.enable_grad():
        (vjp,) = torch.autograd.grad(out, x, vector, create_graph=True)
    return vector_jacobian_products(vjp, vector, changes.to(x.dtype)).detach()


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


def _by_sum(surface: HookedModel, senders: list[Endpoint], changes: Tensor) -> Iterator[tuple[Site, Tensor]]:
    """Groups changes [sender batch pos d_model] by the sum to which they are added; such senders are adjacent."""
    start = 0
    for sum_site, senders_at_sum in groupby(sum_of(surface, sender) for sender in senders):
        end = start + len(list(senders_at_sum))
        yield sum_site, changes[start:end]
        start = end


def _at_sums(
    surface: HookedModel, run: Run, sum_sites: list[Site], stream: Site, gradient: Tensor
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


CALLER = "patch.edges"

METHODS = ("gradient", "integrated", "gim")

#: The sites of the residual stream itself.
STREAMS = ("resid_pre", "resid_mid", "resid_post")


@answers_former_names
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
    exact: int | str = 10,
    rank: str = "mean",
    batch_size: int | None = None,
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
        base: as in `patch.screen`.
        source: as in `patch.screen`; for how="mean" any batch, for "zero" None.
        metric: as in `patch.screen`; likewise the arguments that are not named here.
        how: what an edge carries, as in `circuit.keep`: "resample", what the sender has on the source; "mean", the mean
            of that over the source's examples, per position; "zero", nothing. "Source" is then a run in which every
            sender has that value.
        method: "gradient", the gradient at base: the derivative of the metric along `patch.path`. "integrated", the
            mean of the gradients at `steps` midpoints between the network's embeddings on base and on the source (Hanna
            et al. 2024, arXiv:2403.17806). "gim", the same with GIM's backward pass (Edin et al. 2025,
            arXiv:2505.17630; of a HookedTransformer), but for norms on the stream itself, of post-norm models.

    Heads that share keys and values are one receiver at k and v, their key-value group. In parallel blocks the MLP does
    not hear the heads of its layer. Position embeddings are a sender under "zero" alone: on a source, and in the mean
    over sources, they are what they are on base. Refused inside a block of `intervene` that edits the model.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch, how, batch_size=batch_size, of_edges=True)
    parse_choice(method, METHODS, CALLER, "method")
    pair, integrated = replace(pair, gim=method == "gim"), method != "gradient"
    steps, counts = parse_steps(steps, CALLER), ScreenOptions.read(CALLER, exact, seed, draws, flips, rank)
    senders, receivers = senders_of(pair.surface, how), inputs_of(pair.surface)
    check_outside_blocks(pair)
    _check_streams(pair.surface)

    def estimates(size: int) -> tuple[Pair, list[PerExample], list[Candidate]]:
        sized = pair.of_size(size)
        return sized, *_candidates(sized, senders, receivers, steps if integrated else None)

    sized, baseline, candidates = within_memory(pair.batch_size, estimates)
    settings: Row = {"method": method, "how": how}
    settings |= {"direction": DIRECTION} if how == "resample" else {}
    settings |= {"steps": steps} if integrated else {}
    return ranked(sized, candidates, baseline, counts, settings)


def _candidates(
    pair: Pair, senders: list[Endpoint], receivers: list[Endpoint], steps: int | None
) -> tuple[list[PerExample], list[Candidate]]:
    """Returns the metrics at base, batch by batch, and every edge with its estimates."""
    baseline: list[PerExample] = []
    candidates: dict[tuple[str, str], Candidate] = {}
    for piece in pair.batches():
        with ready_for_gradients(pair.surface), assert_weights_unchanged(pair.surface.model, CALLER):
            values, estimates = estimated(piece, senders, receivers, steps)
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
    return baseline, list(candidates.values())


def _check_streams(surface: HookedModel) -> None:
    """Refuses hooks of the user's on the residual stream itself: estimates carry changes past it as they are.

    Hooks on the outputs of components count as part of the components.
    """
    for layer in range(surface.n_layers):
        block = surface.model.get_submodule(f"blocks.{layer}")
        names = [Site(name, layer).hook() for name in STREAMS]
        points = [surface.hooks[hook] for hook in names if hook in surface.hooks]
        # Those that come before the first block may be our own, which see that the model runs.
        before = [one._forward_pre_hooks for one in (*points, *([block] if layer else []))]
        if any(before) or any(one._forward_hooks for one in (*points, block)):
            raise CircuitsError(
                f"{CALLER}: a hook of yours is on the residual stream in layer {layer}, which estimates would pass by; "
                "take it off"
            )


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
