"""Estimates, from gradients, what patching each direct path would do to a metric."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from circuits.model.hooked_model import HookedModel
from circuits.model.sites import KINDS, Site
from circuits.patch._endpoints import Endpoint, stream_of, sum_of, sums_of
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
    def of(cls, surface: HookedModel, senders: list[Endpoint], receivers: list[Endpoint]) -> Recorded:
        """Lists the hooks that estimates between these need."""
        layers = range(surface.n_layers)
        sent = [sender.hook for sender in senders]
        inputs = [hook for hook in INPUTS if hook in surface.hooks]
        attn_outs, z = ([KINDS[site].hook.format(layer) for layer in layers] for site in ("attn_out", "z"))
        normed = [site.hook() for site in sums_of(surface)[1:] if surface.stream_norm(site.name, site.layer)]
        received = [one.hook for one in receivers]
        reached = [*(stream_of(surface, one).hook() for one in receivers), *received, *normed]
        # A norm after attention makes the change at attn_out depend on the run, so z is recorded in each.
        changing = [*z, *attn_outs] if surface.sublayer_norm("attn_out", 0) is not None else []
        of_base = [*sent, *inputs, *attn_outs, *reached]
        return cls(
            inputs,
            list(dict.fromkeys([*sent, *inputs])),
            [hook for hook in dict.fromkeys(of_base) if hook in surface.hooks],
            list(dict.fromkeys([*inputs, *reached, *changing])),
            list(dict.fromkeys(received)),
        )


@dataclass
class EdgeEstimates:
    """What patching each edge would do to first order, summed up over the runs of an integration.

    Attributes:
        piece: the examples.
        senders: in order of computation.
        found: the estimates [sender n] by receiver and metric, of senders before the receiver.
        sums: the sites of sums in the residual stream.
    """

    piece: Pair
    senders: list[Endpoint]
    found: dict[str, dict[str, Tensor]]
    sums: list[Site] = field(init=False)

    def __post_init__(self) -> None:
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
        by_sum = _by_sum(surface, self.senders[:n_senders], changes)
        shifts = torch.cat([_products(at_one, at_sum[sum_site].double()) for sum_site, at_one in by_sum], 1)
        elsewhere = torch.ones_like(shifts[0, :, :1], dtype=torch.bool)
        elsewhere[point.on_line.start : point.on_line.stop] = False
        for receiver, shift in zip(receivers, shifts.masked_fill(elsewhere, 0.0), strict=True):
            total = self.found[receiver.name].get(metric, 0) + point.weight * shift
            self.found[receiver.name][metric] = self.piece.finite(total, metric, receiver.name)


def estimated(
    piece: Pair,
    senders: list[Endpoint],
    receivers: list[Endpoint],
    steps: int | None,
    line: str,
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """Returns the metrics at base, and estimates [sender n] by receiver and metric, for senders before the receiver."""
    hooks = Recorded.of(piece.surface, senders, receivers)
    source_activations = piece.patched(dict.fromkeys(hooks.of_source))
    base_run = piece.run(piece.base, hooks.of_base, graph=True)
    clean = base_run.output.detach()
    gaps = {
        hook: piece.without_padding(difference(base_run.activations[hook], source_activations[hook]), hook)
        for hook in dict.fromkeys(sender.hook for sender in senders)
    }
    changes = _changes(senders, base_run, gaps)
    changes_in_each_run = piece.surface.sublayer_norm("attn_out", 0) is not None
    estimates = EdgeEstimates(piece, senders, {one.name: {} for one in receivers})
    baseline = read_values(
        piece.values(clean, clean), "metric", len(piece.base), BASELINE, piece.metric.advice
    )
    received = dict.fromkeys(one.hook for one in receivers)
    by_hook = [[one for one in receivers if one.hook == hook] for hook in received]
    for point in _points(senders, hooks.inputs, steps, line):
        run = base_run
        if point.fraction is not None:
            interpolated = {
                hook: between(base_run.activations[hook], source_activations[hook], point.fraction)
                for hook in point.moving
            }
            run = piece.run(piece.base, dict.fromkeys(hooks.of_each_run), interpolated, graph=True)
            changes = _changes(senders, run, gaps) if changes_in_each_run else changes
        values = piece.values(run.output, clean)
        for metric, gradients in piece.gradients(run, values, hooks.gradients).items():
            for together in by_hook:
                estimates.add(point, run, changes, together, metric, gradients)
    return baseline, estimates.found


def _points(senders: list[Endpoint], input_hooks: list[str], steps: int | None, line: str) -> list[Point]:
    """Lists the runs whose gradients are taken."""
    every = range(len(senders))
    if steps is None:
        return [Point([], every, None, 1.0)]
    lines = [(input_hooks, every)]
    if line == "site":
        hooks = [sender.hook for sender in senders]  # senders of a hook are adjacent
        lines = [
            ([hook], range(hooks.index(hook), hooks.index(hook) + hooks.count(hook)))
            for hook in dict.fromkeys(hooks)
        ]
    return [
        Point(moving, on_line, fraction, 1 / steps)
        for moving, on_line in lines
        for fraction in midpoints(steps)
    ]


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
