"""The logit lens and direct logit attribution: read-outs after each layer, and what each component adds directly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.apply import intervene, run_with_padding
from circuits.logit_lens._result import Computed, DirectAttribution, Lens
from circuits.logit_lens._stream import ReadOut, components, needed, streams
from circuits.model.edit_state import running_rows
from circuits.model.hooked_model import HookedModel
from circuits.model.inputs import parse_prompts
from circuits.model.prompts import Prompts, taken
from circuits.model.sites import Site
from circuits.model.types import MetricLike, PositionsLike, TokensLike
from circuits.sweeps.metrics import Metric, in_errors, is_pair, parse_metric_values
from circuits.tensors import Snapshot, columns_of, parse_positions, select_positions

__all__ = ["DirectAttribution", "Lens", "lens"]

# The rest of a metric that counts as rounding, relative to its terms.
_LINEAR = 1e-5
# Parts that stand at the end.
_LAST = ("edits", "constant", "nonlinear")


def lens(
    model: nn.Module,
    tokens: TokensLike,
    *given: Any,
    metric: MetricLike = None,
    batch: Any = None,
    positions: PositionsLike = None,
    batch_size: int | None = None,
) -> Any:
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
        metric: as in `sweep`, made of torch operations; it gives one value, or one pair (sum, count), per example.
        batch: as in `sweep`.
        positions: with a metric, where it reads (default: what it says itself). Without one, the positions that are
            kept, whole numbers that count in each prompt's own tokens; default: all.
        batch_size: examples in a forward, by default as in `sweep`; `settings` says how many.

    Norms must be LayerNorm, RMS or none, and the unembedding linear, but for a soft cap: a model whose contributions do
    not add up to its output is refused with `CircuitsError`. Eval mode, no gradients.
    """
    surface = HookedModel.of(model)
    if given and metric is None and callable(given[0]):
        metric, *given = given  # type: ignore[assignment]
    prompts = parse_prompts(surface, tokens, "lens")
    surface.check_prompts(prompts, "lens: tokens")
    parts = surface.n_layers * (surface.n_heads + 4) * (surface.sizes["d_model"] or 1)
    size = rows_in_a_forward(surface, prompts.shape[1], batch_size, "lens", kept=parts)
    if metric is None and batch is not None:
        raise CircuitsError("lens: batch= goes with metric=")

    def measured(size: int) -> Any:
        runs = _runs(surface, prompts, bool(given), size)
        if metric is None:
            return _read_out(surface, prompts, runs, positions)
        return _attributed(
            surface, runs, Metric.of(metric, batch, (surface, prompts), "lens", positions), size
        )

    # One block spans everything, so that contributions use the weights that interventions put in.
    with intervene(model, *given):
        return within_memory(size, measured)


@dataclass(frozen=True)
class _Run:
    """One forward: some examples' output, residual streams by name and what each component added to the last one."""

    rows: slice
    output: Tensor
    streams: Mapping[str, Tensor]
    last: Tensor
    parts: Mapping[str, Tensor]

    def at(self, columns: Tensor) -> _Run:
        """Returns the same at some columns, [example position]."""

        streams, parts = (
            {name: taken(x, columns, 1) for name, x in named.items()} for named in (self.streams, self.parts)
        )
        output, last = (taken(x, columns, 1) for x in (self.output, self.last))
        return _Run(self.rows, output, streams, last, parts)


def _runs(surface: HookedModel, prompts: Prompts, edited: bool, size: int) -> Iterator[_Run]:
    """Yields the forwards of all examples."""
    named = streams(surface)
    last = Site("resid_post", surface.n_layers - 1)
    sites = list(dict.fromkeys([*needed(surface), *named.values(), last]))
    for start in range(0, len(prompts), size):
        rows = slice(start, min(start + size, len(prompts)))
        with running_rows(surface.model, rows, len(prompts)):
            output, seen = run_with_padding(surface.model, prompts[rows], cache=sites)
        parts = components(surface, seen, edited)
        yield _Run(rows, output, {name: seen[site] for name, site in named.items()}, seen[last], parts)


def _final_norm(surface: HookedModel) -> str:
    return surface.stream_norm("resid_post", surface.n_layers - 1) or "ln_final"


def _read_out(surface: HookedModel, prompts: Prompts, runs: Iterator[_Run], positions: Any) -> Lens:
    """Returns the output, the streams and their parts at the positions that are kept."""
    at, columns = parse_positions(positions, "lens, positions"), None
    if isinstance(at, Snapshot):
        raise CircuitsError(
            "lens, positions: without a metric they are whole numbers, the same in every example"
        )
    if at is not None:
        # Refuses those that are not there.
        select_positions(at, prompts.shape[1], "lens, positions", prompts.real)
        columns = columns_of(at, prompts.real)
    model_read_out: ReadOut | None = None
    kept: list[_Run] = []
    for one in runs:
        if columns is not None:
            one = one.at(columns[one.rows])
        if model_read_out is None:
            model_read_out = ReadOut.of(surface, one.last, one.output, _final_norm(surface))
        model_read_out.check(one.last, one.output)
        kept.append(one)
    assert model_read_out is not None
    output, last = torch.cat([one.output for one in kept]), torch.cat([one.last for one in kept])
    ends = _joined([one.streams for one in kept])
    *_, name = ends
    stream_read_out = ReadOut.of(surface, ends[name], output, "") if surface.post_norm else model_read_out
    parts = _joined([one.parts for one in kept])
    if columns is None:
        output = prompts.nan_at_padding(output)
        ends, parts = (
            {part: prompts.nan_at_padding(x) for part, x in tensors.items()} for tensors in (ends, parts)
        )
    return Lens(
        output,
        Computed(ends, partial(_of_stream, stream_read_out, ends[name], output)),
        Computed(parts, partial(model_read_out.linear, scale=model_read_out.norm.scale(last))),
        model_read_out,
        prompts,
        at,
    )


def _of_stream(read_out: ReadOut, last: Tensor, output: Tensor, stream: Tensor) -> Tensor:
    return output if stream is last else read_out.output(stream)


def _attributed(surface: HookedModel, runs: Iterator[_Run], metric: Metric, size: int) -> DirectAttribution:
    """Returns the share that each component has in the metric of each example."""
    found: list[tuple[dict[str, Tensor], Tensor, Tensor]] = []
    read_out: ReadOut | None = None
    for one in runs:
        total, count, gradient = _gradient(metric.at(one.rows), one.output)
        # Only where it reads: most metrics read a few positions and logits.
        columns = gradient.ne(0).any(-1).any(0).nonzero().flatten().expand(len(gradient), -1)
        gradient, one = taken(gradient, columns, 1), one.at(columns)
        if columns.shape[1]:
            if read_out is None:
                read_out = ReadOut.of(surface, one.last, one.output, _final_norm(surface))
            read_out.check(one.last, one.output)
        found.append((_shares(one, read_out, gradient, total), total, count))
    shares, totals, counts = zip(*found, strict=True)
    settings = {"batch_size": size, **surface.settings}
    return DirectAttribution(_joined(shares), torch.cat(totals), torch.cat(counts), metric.name, settings)


def _gradient(metric: Metric, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the metric of each example, what it is divided by, and its gradient at the output."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = output.clone().requires_grad_()
        values = metric.values(leaf, output)
        if len(values) > 1:
            raise CircuitsError(f"lens: one metric at a time; this one gives {', '.join(values)}")
        ((name, (total, count)),) = parse_metric_values(
            values, metric.name, len(output), "lens", metric.advice
        ).items()
        value = values[name][0] if is_pair(values[name]) else values[name]
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise CircuitsError(
                f"lens: {in_errors(name)} has no gradient; compute it with torch, without detach or argmax"
            )
        (gradient,) = torch.autograd.grad(value.double().sum(), leaf)
    return torch.as_tensor(total), torch.as_tensor(count), gradient


def _shares(one: _Run, read_out: ReadOut | None, gradient: Tensor, total: Tensor) -> dict[str, Tensor]:
    """Returns the share of each component for each example, [example] in float64."""
    if read_out is None:  # a metric that reads nothing
        zeros = torch.zeros_like(total)
        return {**dict.fromkeys(one.parts, zeros), "constant": zeros, "nonlinear": total}
    used = gradient.ne(0).flatten(0, 1).any(0).nonzero().flatten()
    gradient, weight, constant = gradient[..., used], read_out.weight[:, used], read_out.constant[used]
    output = one.output[..., used]
    norm, scale = read_out.norm, read_out.norm.scale(one.last)
    if read_out.soft_cap is not None:
        gradient = gradient * (1 - (output / read_out.soft_cap).square())
        output = norm.linear(one.last, scale) @ weight + constant
    # A part is centred, scaled and unembedded, all of which are linear: the same is done to the gradient instead.
    direction = (norm.centre(gradient @ weight.T * norm.gain) / scale).double()
    shares = {name: (part.double() * direction).sum((1, 2)).cpu() for name, part in one.parts.items()}
    terms = torch.where(gradient == 0, 0.0, gradient.double() * output.double())
    biases = torch.where(gradient == 0, 0.0, gradient.double() * constant.double())
    shares["constant"] = biases.sum((1, 2)).cpu()
    rest = total - terms.sum((1, 2)).cpu()
    if bool((rest.abs() > _LINEAR * terms.abs().sum((1, 2)).cpu()).any()):
        shares["nonlinear"] = rest
    return shares


def _joined(runs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of all runs by name, one behind the other; zeros where a run has no such part."""
    names = dict.fromkeys(name for one in runs for name in one)
    # What only some runs have comes last, in its order.
    order = sorted(names, key=lambda name: (name in _LAST, _LAST.index(name) if name in _LAST else 0))
    return {
        name: torch.cat([one.get(name, torch.zeros_like(next(iter(one.values())))) for one in runs])
        for name in order
    }
