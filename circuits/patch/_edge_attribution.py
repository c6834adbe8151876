"""Screens edges: gradient estimates of the effect of patching every direct path, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from circuits.arguments import check_renamed_args, parse_choice, parse_integers, stringify_keys
from circuits.circuit._graph_and_names import Graph, Input, Node
from circuits.errors import CircuitsError, format_value
from circuits.frozen_tensors_and_positions import positions_to_mask
from circuits.interventions.paths import Path
from circuits.interventions.places_and_edits import Edit
from circuits.interventions.replacements import DIRECTION
from circuits.model.heads import KeyValueGroup, format_head_label
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import Site
from circuits.model.types import BatchLike, MetricLike, TokensLike
from circuits.patch._activation_and_path import place_of_input, place_of_node
from circuits.patch._metric_gradients import INPUTS, Estimates, PatchExamples, RecordedRun, parse_steps
from circuits.patch._screen_result import (
    ScreenOptions,
    ScreenResult,
    measure_and_tabulate,
    parse_screen_options,
)
from circuits.sweeps.metric import PerExample, Row

CALLER = "patch.edges"
METHODS = ("gradient", "integrated", "gim")
#: The sites of the residual stream itself.
STREAMS = ("resid_pre", "resid_mid", "resid_post")


class _EdgesIntoHook(NamedTuple):
    """The receivers at one hook, with the senders before them in the order of computation."""

    inputs: tuple[Input, ...]
    senders: tuple[Node, ...]
    hook: str
    stream: Site  # what they read


@check_renamed_args
def edges(
    model: nn.Module,
    base: TokensLike,
    source: TokensLike | None,
    metric: MetricLike = None,
    *,
    batch: BatchLike = None,
    how: str = "resample",
    spans: Mapping[str, Sequence[int]] | None = None,
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
        base: tokens [batch pos] of the run that is edited, or anything that `circuits.prompts` takes.
        source: the same, with as many tokens in each row, or a single row; for "mean" any batch, for "zero" None.
        metric: `fn(output)`, or `fn(output, batch[rows])`, of torch operations: a value per example [n], or a dict of
            several. Default: `logit_diff`, of base's first and second choice.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        how: what an edge carries: "resample", what the sender has on the source; "mean", the mean of that over the
            source's examples, per position; "zero", nothing.
        spans: positions by name, {"noun": [6, 7, 8], "end": [-1]}, counted in each prompt's own tokens, from its start
            or its end: each edge then has a row for each span, patched there alone. Default: one row, at all positions.
        method: "gradient", the gradient at base: the derivative of the metric along `patch.path`. "integrated", the
            mean of the gradients at `steps` midpoints between the network's embeddings on base and on the source (Hanna
            et al. 2024, arXiv:2403.17806). "gim", the same with GIM's backward pass (Edin et al. 2025,
            arXiv:2505.17630), but for norms on the stream itself, of post-norm models.
        steps: runs between base and source, of "integrated" and "gim"; 0: the gradient at base.
        exact: how many of the first rows of each metric are also swept, from 0; or "all".
        rank: "mean", by |mean estimate|, or "size", by mean |estimate|: signs that differ cancel in the mean.
        batch_size: examples in a forward and its backward pass, and examples × patches where these are measured.
        seed: of the bootstrap and of the sign-flip test, which have `draws` resamples and `flips` flips.

    Heads that share keys and values are one receiver at k and v, their key-value group. In parallel blocks no head of
    an MLP's layer leads to it. Position embeddings are a sender under "zero" alone. Refused inside a block of edits.
    """
    pair = PatchExamples.parse(CALLER, model, base, source, metric, batch, how)
    pair = pair.with_batch_size(batch_size, of_edges=True)
    between = parse_steps(steps, parse_choice(method, METHODS, CALLER, "method"), CALLER)
    options = parse_screen_options(CALLER, exact, seed, draws, flips, rank)
    pair.check_not_inside_intervene().hooked.check_path_patching_proved()
    _check_stream_unhooked(pair.hooked)
    settings: Row = {"method": method, "how": how} | ({"direction": DIRECTION} if how == "resample" else {})
    settings |= {"steps": steps} if between else {}
    pair, named = replace(pair, gim=method == "gim"), _parse_spans(spans, pair.base.lengths)
    return _screen_edges(pair, named, between, options, settings)


def _screen_edges(
    examples: PatchExamples,
    spans: dict[str, tuple[int, ...]],
    steps: int | None,
    options: ScreenOptions,
    settings: Row,
) -> ScreenResult:
    """Returns a row for each edge, or for each edge and span, its estimate and the exact effects of the largest."""
    hooked, places = examples.hooked, [*spans.values(), *([] if spans else [None])]
    # Any two prompts, and so their mean, have the same position embeddings.
    senders = [
        node for node in Graph.of_model(hooked).nodes if node.site != "pos_embed" or examples.how == "zero"
    ]
    receivers = _list_edges_by_hook(hooked, senders)
    spanned = tuple(spans.values())
    estimate = partial(
        _base_metrics_and_edge_effects, senders=senders, receivers=receivers, steps=steps, spans=spanned
    )
    found = examples.estimate_in_batches(estimate)
    ends = [(u, v) for group in receivers for v in group.inputs for u in group.senders]
    direction = DIRECTION if examples.how == "resample" else examples.how
    rows: list[Row] = []
    for both in ends:
        sender, receiver = (_node_or_input_label(end, hooked) for end in both)
        row = {"variant": f"{sender} -> {receiver}", "intervention": f"patch.path ({direction})"}
        row |= {"sender": sender, "receiver": receiver}
        at_spans = [
            {"variant": f"{row['variant']} @ {name}", "span": name, "positions": ",".join(map(str, where))}
            for name, where in spans.items()
        ]
        rows += [row | at for at in at_spans or [{}]]

    def make_edge_path(at: int) -> Path:
        (sender, receiver), where = ends[at // len(places)], places[at % len(places)]
        edit = Edit("patch.path", (place_of_node(sender),), found[0].replacement, where)
        return Path(edit, (place_of_input(receiver),), None)

    settings |= {"spans": {name: list(where) for name, where in spans.items()}} if spans else {}
    return measure_and_tabulate(*found, rows, make_edge_path, options, settings)


def _parse_spans(spans: Mapping[str, Sequence[int]] | None, lengths: Tensor) -> dict[str, tuple[int, ...]]:
    """Returns the positions of each span by its name, in order; refuses those that a prompt lacks or has twice."""
    if spans is None:
        return {}
    if not isinstance(spans, Mapping) or not spans:
        raise CircuitsError(f'{CALLER}: spans name positions, {{"noun": [6, 7]}}; got {format_value(spans)}')
    named = {name: () if at is None else at for name, at in stringify_keys(spans, CALLER, "spans").items()}
    read = {
        name: parse_integers(at, CALLER, f"span {name!r}", least=None) or () for name, at in named.items()
    }
    shortest, least = int(lengths.argmin()), int(lengths.min())
    for name, where in read.items():
        if missing := [at for at in where if not -least <= at < least]:
            raise CircuitsError(f"{CALLER}: span {name!r}: prompt {shortest} has no position {missing[0]}")
    every = {at for where in read.values() for at in where}
    for prompt, length in enumerate(lengths.tolist()):
        if twice := [at for at in every if at < 0 and at + length in every]:
            raise CircuitsError(
                f"{CALLER}: spans: {twice[0]} and {twice[0] + length} are one position of prompt {prompt}; name one"
            )
    return {name: tuple(sorted(where)) for name, where in read.items()}


def _list_edges_by_hook(hooked: HookedModel, senders: Sequence[Node]) -> list[_EdgesIntoHook]:
    """Lists what receives edges, in the order of computation."""
    streams = {"resid_post": "resid_post", "mlp_pre": "resid_pre" if hooked.parallel else "resid_mid"}
    found: list[_EdgesIntoHook] = []
    for layer in Graph.of_model(hooked).edges_by_site:
        number = hooked.n_layers - 1 if layer.layer is None else layer.layer
        # An MLP is read at its output, because in a gated MLP hook_pre is only one of its reads of the stream.
        hook = Site("mlp_out" if layer.site == "mlp_pre" else layer.site, number).hook()
        earlier = tuple(node for node, _ in layer.edges if node in senders)
        inputs = tuple(edge.receiver for edge in layer.edges[0][1])
        found.append(
            _EdgesIntoHook(inputs, earlier, hook, Site(streams.get(layer.site, "resid_pre"), number))
        )
    return found


def _node_or_input_label(end: Node | Input, hooked: HookedModel) -> str:
    """Returns an end's name in tables: of an MLP the site, of a group with the heads that it serves."""
    if end.site in ("mlp_out", "mlp_pre"):
        return str(Site(end.site, end.layer))
    if isinstance(end, Input) and end.grouped:
        return format_head_label(KeyValueGroup(end.layer or 0, end.head or 0), hooked, end.site)
    return str(end)


def _residual_sum_sites(hooked: HookedModel) -> list[Site]:
    """Lists the sites of sums in the residual stream, in order; "embed" stands for the sum of the embeddings."""
    places = [Site(name, layer) for layer in range(hooked.n_layers) for name in ("resid_mid", "resid_post")]
    return [Site("embed"), *(place for place in places if place.hook() in hooked.hooks)]


def _find_residual_sum(node: Node, hooked: HookedModel) -> Site:
    """Returns the site of the sum to which a sender is added."""
    if node.layer is None:
        return Site("embed")
    between = Site("resid_mid", node.layer)
    return between if node.site == "z" and between.hook() in hooked.hooks else Site("resid_post", node.layer)


def _base_metrics_and_edge_effects(
    chunk: PatchExamples,
    senders: Sequence[Node],
    receivers: Sequence[_EdgesIntoHook],
    steps: int | None,
    spans: Sequence[tuple[int, ...]] = (),
) -> tuple[PerExample, Estimates]:
    """Returns the metrics at base, and estimates by receiver, sender before it and span.

    Args:
        steps: runs between base and source whose gradients are averaged; None: the gradient at base.
    """
    hooked, sent = chunk.hooked, list(dict.fromkeys(sender.hook for sender in senders))
    attention = [Site(site, layer).hook() for layer in range(hooked.n_layers) for site in ("z", "attn_out")]
    later = _residual_sum_sites(hooked)[1:]
    normed = [site.hook() for site in later if hooked.post_norm_path_after(site.name, site.layer)]
    received = [hook for group in receivers for hook in (group.stream.hook(), group.hook)]
    recorded = dict.fromkeys([*INPUTS, *sent, *attention, *received, *normed])
    hooks = [hook for hook in recorded if hook in hooked.hooks]
    source = chunk.patched_activations([hook for hook in hooks if hook in (*sent, *INPUTS)])
    base = chunk.run(chunk.base, hooks, graph=True)
    clean = base.output.detach()
    real = chunk.base.real
    chosen = [positions_to_mask(span, real.shape[1], CALLER, real) for span in spans]
    gaps = {hook: chunk.source_minus_base(base.activations[hook], source[hook]) for hook in sent}
    changes = _sender_changes(chunk, senders, base, gaps)
    changes_in_each_run = hooked.sublayer_norm_path("attn_out", 0) is not None
    found: Estimates = {}
    for run in chunk.runs_between(base, source, hooks, steps):
        if changes_in_each_run and run is not base:
            changes = _sender_changes(chunk, senders, run, gaps)
        for metric, gradients in chunk.metric_gradients(
            run, clean, [group.hook for group in receivers]
        ).items():
            shifts = [
                _edge_estimates_at_hook(chunk, run, changes, group, gradients[group.hook], chosen)
                for group in receivers
            ]
            found[metric] = found.get(metric, 0) + (1 / (steps or 1)) * torch.cat(shifts)
    return chunk.metrics_at_base(clean), found


def _zero_padding(chunk: PatchExamples, x: Tensor) -> Tensor:
    """Returns x [component batch pos d_model] with zeros at padding."""
    return torch.where(chunk.base.real[..., None].to(x.device), x, 0.0) if chunk.base.padded else x


def _sender_changes(
    chunk: PatchExamples, senders: Sequence[Node], run: RecordedRun, gaps: dict[str, Tensor]
) -> Tensor:
    """Returns each sender's change of the residual stream, source − base: [sender batch pos d_model], float64.

    Args:
        run: the run in which a change of z is carried to the stream.
        gaps: source − base by hook.
    """
    changes: list[Tensor] = []
    for hook, group in groupby(senders, key=lambda sender: sender.hook):
        heads = [sender.head for sender in group if sender.head is not None]
        changes += _jvp_z_to_attn_out(run, hook, heads, gaps[hook]) if heads else [gaps[hook]]
    # In memory each example's changes of all senders lie together, as products with gradients read them.
    together = torch.stack([gap.expand_as(changes[-1]) for gap in changes], 1).transpose(0, 1)
    return _zero_padding(chunk, together)


def _jvp_z_to_attn_out(run: RecordedRun, hook: str, heads: Sequence[int], gap: Tensor) -> Tensor:
    """Carries changes of z of single heads forward to attn_out, to first order: through W_O, a norm that follows it,
    and any hooks on the way. [head batch pos d_model]

    The Jacobian-vector product is computed by backward passes: the vector-Jacobian product is linear in its vector, and
    its gradient there is the Jacobian-vector product.
    """
    z, out = run.activations[hook], run.activations[hook.replace("attn.hook_z", "hook_attn_out")]
    vector = torch.zeros_like(out, requires_grad=True)
    with torch.enable_grad():
        (vjp,) = torch.autograd.grad(out, z, vector, create_graph=True)
    changes = _isolate_heads(gap.to(z.dtype), heads)
    return _vector_jacobian_products(vjp, vector, changes).detach().double()


def _isolate_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Returns copies of x [batch pos head d_head], each with one of the heads alone: [copy batch pos head d_head]."""
    parts = x.new_zeros(len(heads), *x.shape)
    for part, head in zip(parts, heads, strict=True):
        part[:, :, head] = x[:, :, head]
    return parts


def _edge_estimates_at_hook(
    chunk: PatchExamples,
    run: RecordedRun,
    changes: Tensor,
    receivers: _EdgesIntoHook,
    gradient: Tensor,
    spans: Sequence[Tensor],
) -> Tensor:
    """Returns the estimates of one run for receivers of one hook and the senders before them, [edge example], or of
    each edge as many as there are spans.

    Args:
        changes: of the stream by each sender, [sender batch pos d_model].
        gradient: of the metric at the receivers' hook.
        spans: bool [batch pos], by span.
    """
    read, hook, stream = gradient[None], receivers.hook, receivers.stream
    if stream.hook() != hook:
        heads = [one.head for one in receivers.inputs if one.head is not None]
        parts = _isolate_heads(gradient, heads) if heads else read
        # In between are the LayerNorm and a projection, or the MLP, in the graph of the model's own run.
        read = _vector_jacobian_products(run.activations[hook], run.activations[stream.hook()], parts)
    at_sum = _backprop_along_stream(chunk.hooked, run, stream, _zero_padding(chunk, read))
    in_double = cache(Tensor.double)  # sums of the stream share a gradient, but for norms between them
    parts_by_sum: list[Tensor] = []
    start = 0
    for sum_site, group in groupby(receivers.senders, partial(_find_residual_sum, hooked=chunk.hooked)):
        end = start + len(list(group))
        sent, gradients = changes[start:end], in_double(at_sum[sum_site])
        kept = [sent.where(span[..., None].to(sent.device), 0.0) for span in spans] or [sent]
        # Changes [sender batch pos d] times gradients [receiver batch pos d], summed over positions.
        turned = gradients.flatten(2).permute(1, 2, 0)
        by_example = [part.transpose(0, 1).flatten(2) @ turned for part in kept]
        parts_by_sum.append(torch.stack([products.permute(2, 1, 0) for products in by_example], 2))
        start = end
    return torch.cat(parts_by_sum, 1).flatten(0, 2)


def _backprop_along_stream(
    hooked: HookedModel, run: RecordedRun, stream: Site, gradient: Tensor
) -> dict[Site, Tensor]:
    """Carries gradients [receiver batch pos d_model] at the stream that receivers read back to each earlier sum, along
    the stream only.

    Where the stream itself is normalised after a sum, the gradient passes through that norm, as `patch.path` recomputes
    it.
    """
    sums = _residual_sum_sites(hooked)
    gradient_at_sum: dict[Site, Tensor] = {}
    if stream in sums:
        gradient_at_sum[stream] = gradient
    earlier = [site for site in sums if site.layer is None or site.layer < (stream.layer or 0)]
    if stream.name == "resid_post" and Site("resid_mid", stream.layer) in sums:
        earlier.append(Site("resid_mid", stream.layer))
    for sum_site in reversed(earlier):
        path = hooked.post_norm_path_after(sum_site.name, sum_site.layer)
        if path is not None:
            hooks = INPUTS if sum_site.layer is None else [sum_site.hook()]
            x = sum(run.activations[hook].detach() for hook in hooks if hook in run.activations)
            assert isinstance(x, Tensor)
            with torch.enable_grad():
                x.requires_grad_()
                gradient = _vector_jacobian_products(hooked.model.get_submodule(path)(x), x, gradient)
        gradient_at_sum[sum_site] = gradient
    return gradient_at_sum


def _vector_jacobian_products(out: Tensor, x: Tensor, vectors: Tensor) -> Tensor:
    """Returns the gradients at x of several vectors [vector ...] at `out`, in one backward pass where all operations
    between them can be batched.
    """
    if len(vectors) > 1:
        try:
            (found,) = torch.autograd.grad(out, x, vectors, retain_graph=True, is_grads_batched=True)
            products: Tensor = found
            return products
        except RuntimeError:
            pass  # a function of the user's, in a hook, may have a backward that knows no batch
    return torch.stack([torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in vectors])


def _check_stream_unhooked(hooked: HookedModel) -> None:
    """Refuses hooks of the user's on the residual stream itself: estimates carry changes past it as they are.

    Hooks on the outputs of components count as part of the components.
    """
    for layer in range(hooked.n_layers):
        block = hooked.block_modules[layer]
        names = [Site(name, layer).hook() for name in STREAMS]
        points = [hooked.hooks[hook] for hook in names if hook in hooked.hooks]
        # Those that come before the first block may be our own, which see that the model runs.
        before = [one._forward_pre_hooks for one in (*points, *([block] if layer else []))]
        if any(before) or any(one._forward_hooks for one in (*points, block)):
            raise CircuitsError(
                f"{CALLER}: a hook of yours is on the residual stream in layer {layer}, which estimates would pass by; "
                "take it off"
            )
