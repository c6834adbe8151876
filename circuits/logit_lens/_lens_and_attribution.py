"""The verb `lens` and its results: read-outs of the residual stream, and each component's share of a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from circuits.errors import CircuitsError
from circuits.figures.panel_grid import draw_panels
from circuits.figures.panel_kinds import bars, heatmap, rows_to_one_series
from circuits.figures.results import pivot_by_head
from circuits.frozen_tensors_and_positions import (
    Snapshot,
    parse_positions,
    positions_to_columns,
    positions_to_mask,
)
from circuits.interventions.base import Intervention
from circuits.interventions.intervene_run_cache import intervene, run_keeping_padding
from circuits.logit_lens._stream_parts_and_read_out import (
    ReadOut,
    component_contributions,
    readout_sites,
    sites_to_cache,
)
from circuits.model.activation_recording import hold_eval_mode
from circuits.model.batch_size import choose_batch_size, run_within_memory
from circuits.model.edit_state import assert_weights_unchanged, mark_running_rows
from circuits.model.hooked_model import HookedModel
from circuits.model.prompt_parsing import parse_prompts
from circuits.model.prompts_with_mask import Prompts, gather_columns
from circuits.model.sites import Site
from circuits.model.types import BatchLike, Figure, MetricLike, PositionsLike, TokensLike
from circuits.statistics import LEVEL, summary_columns
from circuits.sweeps.metric import Metric, is_sum_count_pair, metric_label
from circuits.table_printing import ci_names, short_table_text

# The rest of a metric that counts as rounding, relative to its terms.
_LINEAR = 1e-5
# Parts that stand at the end.
_LAST = ("edits", "constant", "nonlinear")


def lens(
    model: nn.Module,
    tokens: TokensLike,
    *given: Callable[..., Any] | Intervention,
    metric: MetricLike = None,
    batch: BatchLike = None,
    positions: PositionsLike = None,
    batch_size: int | None = None,
) -> DirectAttribution | Lens:
    """Returns each component's signed share of a metric; without a metric, of each logit.

        lens(model, prompts, logit_difference(" Paris", " Rome"))        # a DirectAttribution
        lens(model, tokens, positions=[-1])                              # a Lens

    Direct logit attribution (Elhage et al. 2021): what a component has added to the last residual stream, through the
    final norm with its scale held at that of this run, and the unembedding. A share is this times the gradient of the
    metric at the logits: exact for differences of logits. The logit lens (nostalgebraist 2020) reads out the stream
    before and after each layer.

    Args:
        tokens: ids [batch pos], or anything that `prompts` takes.
        given: the metric, and interventions, which are in force.
        metric: `fn(output)`, or `fn(output, batch[rows])`, of torch operations: a value, or a pair (sum, count), each.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        positions: with a metric, where it reads (default: what it says itself). Without one, the positions that are
            kept, whole numbers that count in each prompt's own tokens; default: all.
        batch_size: examples in a forward; by default by the model's size. `settings` says how many.

    Norms must be LayerNorm, RMS or none, and the unembedding linear, but for a soft cap: a model whose contributions do
    not add up to its output is refused with `CircuitsError`. Eval mode, no gradients.
    """
    hooked = HookedModel(model)
    edits: list[Any] = list(given)
    if edits and metric is None and (callable(edits[0]) or isinstance(edits[0], Mapping)):
        metric = edits.pop(0)
    if any(map(callable, edits)):
        raise CircuitsError("lens: one metric at a time, and interventions; got a second function")
    prompts = parse_prompts(hooked, tokens, "lens")
    parts = hooked.n_layers * (hooked.n_heads + 4) * (hooked.sizes["d_model"] or 1)
    size = choose_batch_size(hooked, prompts.shape[1], batch_size, "lens", kept=parts)
    if metric is None and batch is not None:
        raise CircuitsError("lens: batch= goes with metric=")

    def run_with_size(size: int) -> Any:
        runs = _forward_in_batches(hooked, prompts, bool(edits), size)
        if metric is None:
            return _build_lens(hooked, prompts, runs, positions)
        of_metric = Metric.parse(metric, batch, (hooked, prompts), "lens", positions)
        return _attribute_metric(hooked, runs, of_metric, size)

    # One block spans everything, so that contributions use the weights that interventions put in.
    with intervene(model, *edits), hold_eval_mode(model):
        return run_within_memory(size, run_with_size)


@dataclass(frozen=True)
class _LensRun:
    """One forward: some examples' output, residual streams by name and what each component added to the last one."""

    rows: slice
    output: Tensor
    streams: Mapping[str, Tensor]
    last: Tensor
    parts: Mapping[str, Tensor]

    def at_columns(self, columns: Tensor) -> _LensRun:
        """Returns the same at some columns, [example position]."""
        named = (self.streams, self.parts, {"output": self.output, "last": self.last})
        streams, parts, whole = (
            {name: gather_columns(x, columns, 1) for name, x in one.items()} for one in named
        )
        return _LensRun(self.rows, whole["output"], streams, whole["last"], parts)


def _forward_in_batches(hooked: HookedModel, prompts: Prompts, edited: bool, size: int) -> Iterator[_LensRun]:
    """Yields the forwards of all examples."""
    named, last = readout_sites(hooked), Site("resid_post", hooked.n_layers - 1)
    sites = list(dict.fromkeys([*sites_to_cache(hooked), *named.values(), last]))
    for start in range(0, len(prompts), size):
        rows = slice(start, min(start + size, len(prompts)))
        with mark_running_rows(hooked.model, rows, len(prompts)):
            output, seen = run_keeping_padding(hooked.model, prompts[rows], cache=sites)
        ends = {name: seen[site] for name, site in named.items()}
        yield _LensRun(rows, output, ends, seen[last], component_contributions(hooked, seen, edited))


def _build_lens(hooked: HookedModel, prompts: Prompts, runs: Iterator[_LensRun], positions: Any) -> Lens:
    """Returns the output, the streams and their parts at the positions that are kept."""
    at, columns = parse_positions(positions, "lens, positions"), None
    if isinstance(at, Snapshot):
        raise CircuitsError("lens, positions: without a metric whole numbers, the same in every example")
    if at is not None:
        # Refuses those that are not there.
        positions_to_mask(at, prompts.shape[1], "lens, positions", prompts.real)
        columns = positions_to_columns(at, prompts.real)
    kept = [one if columns is None else one.at_columns(columns[one.rows]) for one in runs]
    read_out = ReadOut.fit(hooked, kept[0].last, kept[0].output)
    for one in kept:
        read_out.check_output(one.last, one.output)
    output, last = torch.cat([one.output for one in kept]), torch.cat([one.last for one in kept])
    ends = _concatenate_runs([one.streams for one in kept])
    parts = _concatenate_runs([one.parts for one in kept])
    of_streams = ReadOut.fit(hooked, [*ends.values()][-1], output, False) if hooked.post_norm else read_out
    if columns is None:
        output = prompts.nan_at_padding(output)
        ends = {name: prompts.nan_at_padding(x) for name, x in ends.items()}
        parts = {name: prompts.nan_at_padding(x) for name, x in parts.items()}
    return Lens(output, read_out, prompts, at, ends, parts, of_streams, read_out.norm.scale(last))


def _attribute_metric(
    hooked: HookedModel, runs: Iterator[_LensRun], metric: Metric, size: int
) -> DirectAttribution:
    """Returns the share that each component has in the metric of each example."""
    found: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []
    read_out: ReadOut | None = None
    linear = True
    for one in runs:
        with assert_weights_unchanged(hooked.model, metric_label(metric.name)):
            name, total, count, gradient = _compute_metric_and_gradient(metric.for_rows(one.rows), one.output)
        # Only where it reads: most metrics read a few positions and logits.
        columns = gradient.ne(0).any(-1).any(0).nonzero().flatten().expand(len(gradient), -1)
        gradient, one = gather_columns(gradient, columns, 1), one.at_columns(columns)
        shares, rounding = dict.fromkeys([*one.parts, "constant"], torch.zeros_like(total)), 0 * total
        shares["nonlinear"] = total
        if columns.shape[1]:
            if read_out is None:
                read_out = ReadOut.fit(hooked, one.last, one.output)
            read_out.check_output(one.last, one.output)
            shares, rounding = _component_shares(one, read_out, gradient, total)
        linear &= bool((shares["nonlinear"].abs() <= rounding).all())
        found.append((shares, total, count))
    by_run, totals, counts = zip(*found, strict=True)
    joined = _concatenate_runs(by_run)
    if linear:
        del joined["nonlinear"]
    settings = {"batch_size": size, **hooked.setting_if_unchecked}
    return DirectAttribution(joined, torch.cat(totals), torch.cat(counts), name, settings)


def _compute_metric_and_gradient(metric: Metric, output: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    """Returns the metric's name, it of each example, what it is divided by, and its gradient at the output."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = output.clone().requires_grad_()
        values = metric.compute_values(leaf, output)
        if len(values) > 1:
            raise CircuitsError(f"lens: one metric at a time; this one gives {', '.join(values)}")
        ((name, value),) = values.items()
        total, count = metric.parse_sums_and_counts(value, name, len(output), "lens")
        value = value[0] if is_sum_count_pair(value) else value
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise CircuitsError(
                f"lens: {metric_label(name)} has no gradient; compute it with torch, without detach or argmax"
            )
        (gradient,) = torch.autograd.grad(value.double().sum(), leaf)
    return name, torch.as_tensor(total), torch.as_tensor(count), gradient


def _component_shares(
    one: _LensRun, read_out: ReadOut, gradient: Tensor, total: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the share of each component for each example, [example] in float64, "nonlinear" the rest; and what of
    that may be rounding.
    """
    used = gradient.ne(0).flatten(0, 1).any(0).nonzero().flatten()
    gradient, weight, constant = gradient[..., used], read_out.weight[:, used], read_out.constant[used]
    output, norm = one.output[..., used], read_out.norm
    scale = norm.scale(one.last)
    if read_out.soft_cap is not None:
        gradient = gradient * (1 - (output / read_out.soft_cap).square())
        output = norm.apply_at_scale(one.last, scale) @ weight + constant
    # A part is centred, scaled and unembedded, all of which are linear: the same is done to the gradient instead.
    direction = (norm.centre(gradient @ weight.T * norm.gain) / scale).double()
    shares = {name: (part.double() * direction).sum((1, 2)).cpu() for name, part in one.parts.items()}
    terms, biases = (
        torch.where(gradient == 0, 0.0, gradient.double() * x.double()) for x in (output, constant)
    )
    shares["constant"] = biases.sum((1, 2)).cpu()
    shares["nonlinear"] = total - terms.sum((1, 2)).cpu()
    return shares, _LINEAR * terms.abs().sum((1, 2)).cpu()


def _concatenate_runs(runs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of all runs by name, one behind the other; zeros where a run has no such part."""
    names = dict.fromkeys(name for one in runs for name in one)
    # What only some runs have comes last, in its order.
    order = sorted(names, key=lambda name: _LAST.index(name) + 1 if name in _LAST else 0)
    return {
        name: torch.cat([one.get(name, torch.zeros_like(next(iter(one.values())))) for one in runs])
        for name in order
    }


#: Bootstrap draws of an interval.
_DRAWS = 1000


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each computed from a part of the residual stream whenever it is asked for."""

    def __init__(self, streams: Mapping[str, Tensor], compute: Callable[[Tensor], Tensor]) -> None:
        self._streams, self._compute = streams, compute

    def __getitem__(self, name: str) -> Tensor:
        return self._compute(self._streams[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __len__(self) -> int:
        return len(self._streams)


@dataclass(frozen=True, repr=False)
class Lens:
    """The result of `lens` without a metric; every tensor is [batch pos out], as the model's output, unless stated.

    Attributes:
        output: the model's own output.
        readouts: "embed", "layer 0", "layer 1", ...: the read-out (final norm and unembedding) of the residual stream
            before the first layer and after each. The last is `output`. In a post-norm model it is the unembedding
            alone, applied to the normalised output of the embeddings and of each layer. Computed when asked for.
        contributions: "embed", "pos_embed", "0.0", ..., "b_O.0", "mlp_out.0", ..., in the order they are added: each
            component's direct contribution to the output, along the residual stream, with the scale of every norm on
            the way fixed at its value in this run: that of the final norm; of the norm that attention's output passes
            before it is added, where there is one (Gemma 2, OLMo 2), so that heads have a share of it; in a post-norm
            model also those after each sum, whose biases are "ln_embed", "ln1.0", "ln2.0", .... "edits" is the
            contribution of interventions on the residual stream itself. Computed when asked for.
        constant: [out], the biases of the read-out. Contributions and constant add up to `output`; where logits pass a
            soft cap, to what comes to the cap.
        soft_cap: the bound c of a soft cap, output = c·tanh(logits / c); None where there is none.
        prompts: the inputs; at their padding every tensor is NaN.
        positions: those that are kept, along the axis pos, in each prompt's own tokens; None: every column.
    """

    output: Tensor
    read_out: ReadOut
    prompts: Prompts
    positions: tuple[int, ...] | None
    _streams: Mapping[str, Tensor]
    _parts: Mapping[str, Tensor]
    _of_streams: ReadOut
    _scale: Tensor | float  # of the last stream's norm

    @property
    def readouts(self) -> Mapping[str, Tensor]:
        *_, last = self._streams.values()
        return _LazyTensors(self._streams, lambda x: self.output if x is last else self._of_streams.output(x))

    @property
    def contributions(self) -> Mapping[str, Tensor]:
        return _LazyTensors(self._parts, lambda part: self.read_out.share_of_output(part, self._scale))

    @property
    def constant(self) -> Tensor:
        return self.read_out.constant

    @property
    def soft_cap(self) -> float | None:
        return self.read_out.soft_cap

    def __repr__(self) -> str:
        parts, (*_, last) = list(self._parts), self._streams
        return (
            f"Lens of output {list(self.output.shape)}: .readouts of embed to {last}, .contributions of {len(parts)} "
            f"components, {parts[0]} to {parts[-1]}"
        )

    def without(self, name: str) -> Tensor:
        """Returns the output without one component's direct contribution."""
        if not isinstance(name, str) or name not in self._parts:
            raise CircuitsError(f"lens: no contribution {name!r}; there are {', '.join(self._parts)}")
        if self.soft_cap is None:
            return self.output - self.contributions[name]
        others = (part for other, part in self.contributions.items() if other != name)
        return self.read_out.apply_soft_cap(sum(others, self.constant))


@dataclass(frozen=True, repr=False)
class DirectAttribution:
    """The result of `lens` with a metric: how much of it each component adds directly.

    Attributes:
        shares: by component, as in `Lens.contributions`, its share for each example, [example]; then "constant", that
            of the biases of the read-out, and, where the metric is not linear in the logits or these pass a soft cap,
            "nonlinear", which is the rest. They add up to `metric`.
        metric: the metric itself, [example]; of pairs (sum, count), the sum.
        counts: [example], what values and shares are divided by in a mean; 1 where the metric gives no pairs.
        name: the metric's.
        settings: `batch_size`, the examples in a forward.
    """

    shares: Mapping[str, Tensor]
    metric: Tensor
    counts: Tensor
    name: str
    settings: dict[str, Any]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row for each component: `layer`, `head`, its mean `share` with a 95% interval over examples, and `n`."""
        return self._tabulate_shares(self.shares)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """The same with one row for the attention and one for the MLP of each layer, biases included."""
        sums: dict[str, Tensor] = {}
        for name, share in self.shares.items():
            sums[_sublayer_name(name)] = sums.get(_sublayer_name(name), 0) + share
        return self._tabulate_shares(sums)

    def _tabulate_shares(self, shares: Mapping[str, Tensor]) -> pd.DataFrame:
        sums = np.stack([share.numpy() for share in shares.values()])
        found = summary_columns(sums, np.broadcast_to(self.counts.numpy(), sums.shape), 0, _DRAWS, 1, LEVEL)
        rows = [(name, *_layer_and_head(name)) for name in shares]
        table = pd.DataFrame(rows, columns=["component", "layer", "head"])
        table = table.astype({"layer": "Int64", "head": "Int64"})
        shown = {name.replace("value", "share"): found[name] for name in ci_names("value")}
        return table.assign(**shown, n=len(self.metric))

    def __repr__(self) -> str:
        mean = float(self.metric.sum() / self.counts.sum())
        table = short_table_text(self.frame, ("component", "share", "share_ci_low", "share_ci_high"))
        return f"Direct shares of {self.name}, {mean:.4g} on average:\n{table}"

    def plot(self) -> Figure:
        """Returns a plotly figure of the shares: of each layer's attention and MLP as bars, of each head as a map."""
        heads = pivot_by_head(self.frame[self.frame["head"].notna()], "share")
        panels = [
            bars({"share": rows_to_one_series(self.layers, "component", "share")}, y=f"share of {self.name}"),
            heatmap(heads, unit="share", signed=True, row=26),
        ]
        subtitle = "What each part adds directly, with the 95% interval over examples; below, each head."
        return draw_panels(panels, f"Direct attribution of {self.name}", subtitle)


def _sublayer_name(name: str) -> str:
    """Returns "attention 0", "mlp 0" or, for what belongs to no layer, the name itself."""
    layer, head = _layer_and_head(name)
    if layer is None:
        return name
    return f"{'mlp' if head is None and name.startswith(('mlp', 'ln2')) else 'attention'} {layer}"


def _layer_and_head(name: str) -> tuple[int | None, int | None]:
    """Returns the layer and head of a component: of "0.1", "mlp_out.0", "attention 0", "embed"."""
    first, _, last = name.replace(" ", ".").partition(".")
    return (int(first), int(last)) if first.isdigit() else (int(last) if last else None, None)
