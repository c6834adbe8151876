"""Screening of edges: gradient estimates of what patching every direct path would do, and the exact effect of some."""

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
from circuits.interventions.cuts import RECEIVERS, SENDERS, order_of
from circuits.interventions.edits import Edit, Place
from circuits.interventions.paths import Path
from circuits.interventions.replacements import DIRECTION, FromTokens
from circuits.model.heads import Head, HeadSpec
from circuits.model.sites import KINDS, Site
from circuits.model.surface import Surface
from circuits.patch._gradients import EXAMPLES_PER_PASS, Pair, Run, between, change, midpoints, undisturbed
from circuits.patch._ranking import Candidate, Counts, ranked, read_steps, refuse_inside_blocks
from circuits.patch._result import ScreenResult
from circuits.patch._screen import INPUTS, METHODS
from circuits.sweeps.metrics import PerExample, read_values
from circuits.sweeps.table import BASELINE, Row
from circuits.tensors import Snapshot
from circuits.validate import read_choice

CALLER = "patch.edges"
#: Numbers of all senders' changes that are held at once.
NUMBERS = 2**27

#: Where the residual stream itself passes.
STREAMS = ("resid_pre", "resid_mid", "resid_post")


@dataclass(frozen=True)
class End:
    """A component as the sender or the receiver of an edge; without a site, the output."""

    name: str
    place: Place
    layer: int | None
    hook: str  # where it is read or, of an MLP that receives, what comes of that
    order: int  # in which it is computed

    @property
    def head(self) -> int | None:
        return (
            None
            if self.place.heads is None or self.place.heads.heads is None
            else self.place.heads.heads[0].head
        )


def edges(
    model: Any,
    base: Any,
    source: Any,
    metric: Any = None,
    *,
    batch: Any = None,
    method: str = "integrated",
    steps: int = 5,
    exact: int | str = 10,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimate what `patch.path` from `source` would do along every edge, and measure it for the largest.

    An edge leads from a sender (embed, a head, an MLP) to a receiver computed after it (a head's q, k or v, the
    pre-activations of an MLP, the output), past everything between. Its estimate is the change of what the sender
    adds to the residual stream, source − base, times ∂metric/∂(the residual stream as this receiver alone sees it),
    summed over positions (edge attribution patching: Syed et al. 2023, arXiv:2310.10348).

    Args:
        method: "gradient", the gradient at base: the derivative of the metric along `patch.path`. "integrated", the
            mean of the gradients at `steps` midpoints as the network's embeddings move from base to source (Hanna et
            al. 2024, arXiv:2403.17806).
        base: as in `patch.screen`.
        source: see `base`.
        metric: see `base`.
        batch: see `base`.
        exact: see `base`.
        seed: see `base`.
        draws: see `base`.
        flips: see `base`.

    Heads that share key-value heads receive at k and v as a layer, as `patch.path` has it. Position embeddings are the
    same in both runs and send nothing. Refused inside a block of `intervene` that edits the model.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch)
    read_choice(method, METHODS, CALLER, "method")
    steps, counts = read_steps(steps, CALLER), Counts.read(CALLER, exact, seed, draws, flips)
    senders, receivers = _senders(pair.surface), _receivers(pair.surface)
    refuse_inside_blocks(pair)

    taken = FromTokens(Snapshot(pair.source))
    baseline: list[PerExample] = []
    candidates: dict[tuple[str, str], Candidate] = {}
    per_example = len(senders) * pair.base.shape[1] * (pair.surface.sizes["d_model"] or 1)
    for piece in pair.pieces(max(1, min(EXAMPLES_PER_PASS, NUMBERS // per_example))):
        with undisturbed(pair.surface):
            _refuse_edited_streams(piece)
            values, estimates = _estimates(
                piece, senders, receivers, steps if method == "integrated" else None
            )
        baseline.append(values)
        for receiver in receivers:
            for name, shifts in estimates[receiver.name].items():
                for sender, shift in zip(senders, shifts, strict=False):
                    ends = sender.name, receiver.name
                    if ends not in candidates:
                        candidates[ends] = Candidate(_about(*ends), partial(_path, sender, receiver, taken))
                    candidates[ends].add(name, shift.cpu().numpy())
    settings: Row = {"method": method, "direction": DIRECTION}
    settings |= {"steps": steps, "line": "input"} if method == "integrated" else {}
    return ranked(pair, list(candidates.values()), baseline, counts, settings)


def _estimates(
    piece: Pair, senders: list[End], receivers: list[End], steps: int | None
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """The metrics at base; and by receiver and metric the estimates [sender n], of the senders before it."""
    streams = {one.hook: _stream(one) for one in receivers}
    sums = _sums(piece.surface)
    sending = dict.fromkeys([sender.hook for sender in senders])
    outs = [KINDS["attn_out"].hook.format(layer) for layer in range(piece.surface.n_layers)]
    moving = [hook for hook in INPUTS if hook in piece.surface.hooks]
    normed = [site.hook() for site in sums[1:] if piece.surface.stream_norm(site.name, site.layer)]
    reading = dict.fromkeys([*(stream.hook() for stream in streams.values()), *streams, *normed])
    theirs = piece.run(piece.source, dict.fromkeys([*sending, *moving])).at
    ours = piece.run(piece.base, dict.fromkeys([*sending, *moving, *outs, *reading]), graph=True)
    clean = ours.output.detach()
    changes = _changes(senders, ours, theirs)

    found: dict[str, dict[str, Tensor]] = {one.name: {} for one in receivers}
    for fraction in [None] if steps is None else midpoints(steps):
        run = ours
        if fraction is not None:
            way = {hook: between(ours.at[hook], theirs[hook], fraction) for hook in moving}
            run = piece.run(piece.base, reading, way, graph=True)
        for name, slopes in piece.slopes(run, piece.values(run.output, clean), streams).items():
            for receiver in receivers:
                before = sum(sender.order < receiver.order for sender in senders)
                stream = streams[receiver.hook]
                slope = _to_stream(run, receiver, stream.hook(), slopes[receiver.hook])
                at = _at_sums(piece.surface, run, sums, stream, slope)
                shifts = [
                    torch.einsum("s b p d, b p d -> s b", alike, at[place].double())
                    for place, alike in _by_sum(piece.surface, senders[:before], changes)
                ]
                shift = torch.cat(shifts)
                total = found[receiver.name].get(name, 0) + shift / (steps or 1)
                found[receiver.name][name] = piece.finite(total, name, receiver.name)
    return read_values(piece.values(clean, clean), "metric", len(piece.base), BASELINE), found


def _refuse_edited_streams(piece: Pair) -> None:
    """Refuse hooks of the user's on the residual stream itself: estimates carry a change past them as it is.

    Hooks on what components add to the stream are part of them.
    """
    surface = piece.surface
    blocks = [surface.model.get_submodule(f"blocks.{layer}") for layer in range(surface.n_layers)]
    names = [Site(name, layer).hook() for layer in range(surface.n_layers) for name in STREAMS]
    names = [hook for hook in names if hook in surface.hooks]
    if not any(
        one._forward_hooks or one._forward_pre_hooks
        for one in (*blocks, *(surface.hooks[hook] for hook in names))
    ):
        return
    came: dict[str, Tensor] = {}
    last: list[Tensor] = []

    def arrive(hook: str, x: Tensor) -> None:
        came[hook] = x.clone()
        if hook.endswith("resid_pre") and last and not surface.post_norm:
            refuse(hook, x, last.pop())

    def leave(hook: str, x: Tensor) -> None:
        refuse(hook, x, came.pop(hook))
        last[:] = [x.clone()] if hook.endswith("resid_post") else []

    def refuse(hook: str, x: Tensor, own: Tensor) -> None:
        if not torch.equal(x, own):
            raise CircuitsError(
                f"{CALLER}: a hook changes the residual stream at {hook}, past which estimates would carry what "
                "senders change as it is, and patch.path would not; take it off"
            )

    with torch.no_grad(), ExitStack() as stack:
        for hook in names:
            stack.callback(surface.before(hook, partial(arrive, hook)).remove)
            stack.callback(surface.on_forward(hook, partial(leave, hook)).remove)
        surface.model(piece.base.to(surface.device, copy=True))


def _changes(senders: list[End], ours: Run, theirs: dict[str, Tensor]) -> Tensor:
    """What each sender would add to the residual stream, source − base: [sender batch pos d_model], float64."""
    found: list[Tensor] = []
    for sender in senders:
        gap = change(ours.at[sender.hook], theirs[sender.hook])
        if sender.head is not None:
            gap = _through_output(ours, sender, gap)
        found.append(gap)
    return torch.stack([gap.expand_as(found[-1]) for gap in found])


def _through_output(ours: Run, sender: End, gap: Tensor) -> Tensor:
    """A change of one head's z, as it arrives in attn_out: z @ W_O, and whatever hooks make of it.

    Forward along a graph that runs backward: the vector-Jacobian product is linear in its vector, and the gradient of
    that is the Jacobian-vector product.
    """
    z, out = ours.at[sender.hook], ours.at[sender.hook.replace("attn.hook_z", "hook_attn_out")]
    alone = torch.zeros_like(z)
    alone[:, :, sender.head] = gap[:, :, sender.head].to(z.dtype)
    vector = torch.zeros_like(out, requires_grad=True)
    with torch.enable_grad():
        (back,) = torch.autograd.grad(out, z, vector, create_graph=True)
    (forward,) = torch.autograd.grad(back, vector, alone)
    return forward.double()


def _to_stream(run: Run, receiver: End, stream: str, slope: Tensor) -> Tensor:
    """The gradient at a receiver, of one head where it is a head's, taken back to the residual stream it reads."""
    if stream == receiver.hook:
        return slope
    if receiver.head is not None:
        alone = torch.zeros_like(slope)
        alone[:, :, receiver.head] = slope[:, :, receiver.head]
        slope = alone
    # Between the two there is the LayerNorm and one projection, or the MLP: the model's own, as it has just run.
    (found,) = torch.autograd.grad(run.at[receiver.hook], run.at[stream], slope, retain_graph=True)
    return found


def _stream(receiver: End) -> Site:
    """The residual stream that a receiver reads."""
    site = receiver.place.site.name
    before = {"mlp_pre": "resid_mid", "resid_post": "resid_post"}.get(site, "resid_pre")
    return Site(before, receiver.layer)


def _sums(surface: Surface) -> list[Site]:
    """Where something is added to the residual stream, in order; "embed" stands for the sum of the embeddings."""
    places = [Site(name, layer) for layer in range(surface.n_layers) for name in ("resid_mid", "resid_post")]
    return [Site("embed"), *(place for place in places if place.hook() in surface.hooks)]


def _sum_of(surface: Surface, sender: End) -> Site:
    """Where a sender is added."""
    site = sender.place.site.name
    if site == "embed":
        return Site(site)
    between = Site("resid_mid", sender.layer)
    return between if site == "z" and between.hook() in surface.hooks else Site("resid_post", sender.layer)


def _by_sum(surface: Surface, senders: list[End], changes: Tensor) -> Iterator[tuple[Site, Tensor]]:
    """The changes [sender batch pos d_model] of senders that are added at one place, which lie side by side."""
    first = 0
    for place, some in groupby(_sum_of(surface, sender) for sender in senders):
        end = first + len(list(some))
        yield place, changes[first:end]
        first = end


def _at_sums(surface: Surface, run: Run, sums: list[Site], stream: Site, slope: Tensor) -> dict[Site, Tensor]:
    """A gradient at the stream that a receiver reads, at each sum before it, along the stream alone.

    Where the stream itself is normalised after a sum, the way leads back through that norm, which `patch.path` computes
    anew.
    """
    found: dict[Site, Tensor] = {}
    if stream in sums:
        found[stream] = slope
    earlier = [one for one in sums if one.layer is None or one.layer < (stream.layer or 0)]
    if stream.name == "resid_post" and Site("resid_mid", stream.layer) in sums:
        earlier.append(Site("resid_mid", stream.layer))
    for place in reversed(earlier):
        path = surface.stream_norm(place.name, place.layer)
        if path is not None:
            hooks = INPUTS if place.layer is None else [place.hook()]
            x = sum(run.at[hook].detach() for hook in hooks if hook in run.at)
            assert isinstance(x, Tensor)
            with torch.enable_grad():
                x.requires_grad_()
                (slope,) = torch.autograd.grad(surface.model.get_submodule(path)(x), x, slope)
        found[place] = slope
    return found


def _senders(surface: Surface) -> list[End]:
    """In the order in which they are computed."""
    found: list[End] = []
    for site in ("embed", "z", "mlp_out"):
        if KINDS[site].hook.format(0) in surface.hooks:
            found += _ends(surface, site, SENDERS, heads=site == "z")
    return sorted(found, key=lambda one: one.order)


def _receivers(surface: Surface) -> list[End]:
    found: list[End] = []
    for site in ("q", "k", "v"):
        found += _ends(surface, site, RECEIVERS, heads=surface.head_count(KINDS[site]) == surface.n_heads)
    if KINDS["mlp_pre"].hook.format(0) in surface.hooks:
        # Of all that reads from the stream, and not of what a gated MLP calls hook_pre alone.
        found += [
            replace(one, hook=KINDS["mlp_out"].hook.format(one.layer))
            for one in _ends(surface, "mlp_pre", RECEIVERS, heads=False)
        ]
    last = Site("resid_post", surface.n_layers - 1)
    order = order_of(last.name, last.layer, RECEIVERS)
    found.append(End("output", Place(last), last.layer, last.hook(), order))
    return sorted(found, key=lambda one: one.order)


def _ends(surface: Surface, name: str, table: dict[str, int], heads: bool) -> list[End]:
    found: list[End] = []
    for layer, hook in surface.at(Site(name)):
        order, site = order_of(name, layer, table), Site(name, layer)
        if not heads:
            found.append(End(str(site), Place(site), layer, hook, order))
            continue
        for number in range(surface.n_heads):
            head = Head(layer or 0, number)
            label = head.label + ("" if name == "z" else f".{name}")
            found.append(End(label, Place(Site(name), HeadSpec(str(head), (head,))), layer, hook, order))
    return found


def _about(sender: str, receiver: str) -> Row:
    return {
        "variant": f"{sender} -> {receiver}",
        "intervention": f"patch.path ({DIRECTION})",
        "sender": sender,
        "receiver": receiver,
    }


def _path(sender: End, receiver: End, taken: FromTokens) -> Path:
    """`patch.path` along one edge."""
    receivers = () if receiver.name == "output" else (receiver.place,)
    return Path(Edit("patch.path", (sender.place,), taken), receivers, None)
