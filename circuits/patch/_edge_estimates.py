"""Estimates, from gradients, what patching each direct path would do to a metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from circuits.model.sites import KINDS, Site
from circuits.model.surface import Surface
from circuits.patch._doubt import Arrival, Extremes, attention_hooks, carried, recomputed_z
from circuits.patch._endpoints import Endpoint, read_hook, stream_of, sum_of, sums_of
from circuits.patch._gradients import Pair, Run, between, difference, midpoints, vector_jacobian_products
from circuits.patch._screen import INPUTS
from circuits.sweeps.measurements import BASELINE
from circuits.sweeps.metrics import PerExample, read_values


class Point(NamedTuple):
    """A run whose gradients are taken.

    Attributes:
        moving: the hooks that move together.
        on_line: the senders whose estimates are those of their line.
        fraction: how far the hooks move; None: the run at base.
        weight: of its gradient in the estimate.
    """

    moving: list[str]
    on_line: range
    fraction: float | None
    weight: float


@dataclass(frozen=True)
class Recorded:
    """The hooks whose activations estimates need.

    Attributes:
        inputs: the network's embeddings.
        of_source: in the source's run.
        of_base: in the run at base.
        of_each_run: in the runs between the two.
        gradients: whose gradients are taken in each.
    """

    inputs: list[str]
    of_source: list[str]
    of_base: list[str]
    of_each_run: list[str]
    gradients: list[str]

    @classmethod
    def of(
        cls, surface: Surface, senders: list[Endpoint], receivers: list[Endpoint], verified: bool
    ) -> Recorded:
        """Lists the hooks that estimates between these need; doubts of them, if `verified`, need more."""
        layers = range(surface.n_layers)
        sent = [sender.hook for sender in senders]
        inputs = [hook for hook in INPUTS if hook in surface.hooks]
        attn_outs, z = ([KINDS[site].hook.format(layer) for layer in layers] for site in ("attn_out", "z"))
        normed = [site.hook() for site in sums_of(surface)[1:] if surface.stream_norm(site.name, site.layer)]
        received = [one.hook for one in receivers]
        reached = [*(stream_of(surface, one).hook() for one in receivers), *received, *normed]
        read = [read_hook(surface, one) for one in receivers] if verified else []
        # A norm after attention makes the change at attn_out depend on the run, so z is recorded in each.
        changing = [*z, *attn_outs] if surface.sublayer_norm("attn_out", 0) is not None else []
        within = [hook for layer in layers for hook in attention_hooks(layer).values()] if verified else []
        own = z if verified else []
        of_base = [*sent, *inputs, *attn_outs, *reached, *read, *within]
        return cls(
            inputs,
            list(dict.fromkeys([*sent, *inputs, *read])),
            [hook for hook in dict.fromkeys(of_base) if hook in surface.hooks],
            list(dict.fromkeys([*inputs, *reached, *changing, *own])),
            list(dict.fromkeys([*received, *own])),
        )


@dataclass
class EdgeEstimates:
    """What patching each edge would do to first order, summed up over the runs of an integration.

    Attributes:
        piece: the examples.
        senders: in order of computation.
        arrivals: what arrives of the senders' changes, by receiver, where doubts are asked for.
        found: the estimates [sender n] by receiver and metric, of senders before the receiver.
        extremes: those of single runs, in the same way.
        sums: the sites of sums in the residual stream.
    """

    piece: Pair
    senders: list[Endpoint]
    arrivals: dict[str, Arrival]
    found: dict[str, dict[str, Tensor]]
    extremes: dict[str, dict[str, Extremes]] = field(init=False)
    sums: list[Site] = field(init=False)

    def __post_init__(self) -> None:
        self.extremes = {name: {} for name in self.found}
        self.sums = sums_of(self.piece.surface)

    def add(
        self,
        point: Point,
        run: Run,
        changes: Tensor,
        receivers: list[Endpoint],
        metric: str,
        gradients: dict[str, Tensor],
    ) -> None:
        """Adds the estimates of one run for receivers of one hook.

        Args:
            changes: of the stream by each sender, [sender batch pos d_model].
            gradients: of the metric in this run, by hook.
        """
        surface = self.piece.surface
        n_senders = sum(sender.order < receivers[0].order for sender in self.senders)
        if point.on_line.start >= n_senders:
            return
        stream = stream_of(surface, receivers[0])
        read = _to_stream(run, receivers, stream.hook(), gradients[receivers[0].hook])
        read = torch.stack([self.piece.without_padding(one, stream.hook()) for one in read])
        at_sum = _at_sums(surface, run, self.sums, stream, read)
        linear = [
            (changes_at_sum, at_sum[sum_site].double())
            for sum_site, changes_at_sum in _by_sum(surface, self.senders[:n_senders], changes)
        ]
        shifts = torch.cat([_products(*pair) for pair in linear], 1)
        elsewhere = torch.ones_like(shifts[0, :, :1], dtype=torch.bool)
        elsewhere[point.on_line.start : point.on_line.stop] = False
        sizes = shifts
        if self.arrivals:
            sizes = torch.cat([_products(changed.abs(), by.abs()) for changed, by in linear], 1)
        for receiver, shift, size in zip(receivers, shifts, sizes, strict=True):
            if self.arrivals:
                shift, size = self._through_softmax(receiver, gradients) or (shift, size)
                self.extremes[receiver.name].setdefault(metric, Extremes()).add(shift, size, elsewhere)
            shift = shift.masked_fill(elsewhere, 0.0)
            total = self.found[receiver.name].get(metric, 0) + point.weight * shift
            self.found[receiver.name][metric] = self.piece.finite(total, metric, receiver.name)

    def _through_softmax(
        self, receiver: Endpoint, gradients: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Returns estimates by what queries or keys make of z, and linear from there (AtP*), and the sums of their
        absolute terms; None of other receivers.
        """
        arrival = self.arrivals[receiver.name]
        if arrival.z is None:
            return None
        z_hook = KINDS["z"].hook.format(receiver.layer or 0)
        z_gradient = self.piece.without_padding(gradients[z_hook][:, :, arrival.heads], z_hook).double()
        z_change = arrival.z.double()
        shift, size = (
            torch.einsum("s b p h d, b p h d -> s b", *pair)
            for pair in ((z_change, z_gradient), (z_change.abs(), z_gradient.abs()))
        )
        return shift, size

    def evidence(self, metric_gaps: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        """Returns the evidence for doubts, [sender field] by receiver and metric.

        Args:
            metric_gaps: |metric at source − at base| by example.
        """
        return {
            receiver: {
                metric: np.concatenate(
                    [
                        self.arrivals[receiver].sizes,
                        extremes.summed(),
                        np.full((len(extremes.summed()), 1), metric_gaps[metric].sum()),
                    ],
                    1,
                )
                for metric, extremes in by_metric.items()
            }
            for receiver, by_metric in self.extremes.items()
        }


def estimated(
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
    hooks = Recorded.of(piece.surface, senders, receivers, verified)
    source_activations = piece.patched(dict.fromkeys(hooks.of_source))
    base_run = piece.run(piece.base, hooks.of_base, graph=True)
    clean = base_run.output.detach()
    gaps = {
        hook: piece.without_padding(difference(base_run.activations[hook], source_activations[hook]), hook)
        for hook in dict.fromkeys(sender.hook for sender in senders)
    }
    changes = _changes(senders, base_run, gaps)
    changes_in_each_run = piece.surface.sublayer_norm("attn_out", 0) is not None
    arrivals = _arrivals(piece, senders, receivers, base_run, source_activations, changes) if verified else {}
    estimates = EdgeEstimates(piece, senders, arrivals, {one.name: {} for one in receivers})
    metric_gaps: dict[str, np.ndarray] = {}
    baseline = read_values(
        piece.values(clean, clean), "metric", len(piece.base), BASELINE, piece.metric.advice
    )
    received = dict.fromkeys(one.hook for one in receivers)
    by_hook = [[one for one in receivers if one.hook == hook] for hook in received]
    for point in _points(senders, hooks.inputs, steps, line, verified):
        run = base_run
        if point.fraction is not None:
            interpolated = {
                hook: between(base_run.activations[hook], source_activations[hook], point.fraction)
                for hook in point.moving
            }
            run = piece.run(piece.base, dict.fromkeys(hooks.of_each_run), interpolated, graph=True)
            changes = _changes(senders, run, gaps) if changes_in_each_run else changes
        values = piece.values(run.output, clean)
        if point.fraction == 1.0:
            at_source = read_values(values, "metric", len(piece.base), BASELINE, piece.metric.advice)
            metric_gaps = {name: np.abs(at_source[name][0] - baseline[name][0]) for name in baseline}
        for metric, gradients in piece.gradients(run, values, hooks.gradients).items():
            for together in by_hook:
                estimates.add(point, run, changes, together, metric, gradients)
    return baseline, estimates.found, estimates.evidence(metric_gaps)


def _points(
    senders: list[Endpoint], input_hooks: list[str], steps: int | None, line: str, verified: bool
) -> list[Point]:
    """Lists the runs whose gradients are taken."""
    every = range(len(senders))
    lines = [(input_hooks, every)]
    if line == "site":
        hooks = [sender.hook for sender in senders]  # senders of a hook are adjacent
        lines = [
            ([hook], range(hooks.index(hook), hooks.index(hook) + hooks.count(hook)))
            for hook in dict.fromkeys(hooks)
        ]
    at_base = steps is None
    points = [
        Point(moving, on_line, fraction, 1 / (steps or 1))
        for moving, on_line in ([] if at_base else lines)
        for fraction in midpoints(steps or 1)
    ]
    if at_base or verified:
        points.append(Point([], every, None, float(at_base)))
    if verified:
        points.append(Point(input_hooks, every, 1.0, 0.0))
    return points


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
        hook, stream = read_hook(piece.surface, receiver), stream_of(piece.surface, receiver).hook()
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


def _by_sum(surface: Surface, senders: list[Endpoint], changes: Tensor) -> Iterator[tuple[Site, Tensor]]:
    """Groups changes [sender batch pos d_model] by the sum to which they are added; such senders are adjacent."""
    start = 0
    for sum_site, senders_at_sum in groupby(sum_of(surface, sender) for sender in senders):
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
