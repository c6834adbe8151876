"""Computes gradients of metrics at activations, in one run or at interpolations between two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.engine.batch_size import batch_size as rows_in_a_forward
from circuits.errors import CircuitsError
from circuits.interventions.alignment import chosen_columns
from circuits.interventions.base import Replacement
from circuits.interventions.clean_passes import MeanOver, Reference, References
from circuits.interventions.replacements import FromTokens, Mean, Zero
from circuits.interventions.sources import align_mean, parse_source
from circuits.model.contexts import model_block
from circuits.model.edit_state import suspended
from circuits.model.hooked_model import HookedModel
from circuits.model.hooks import Function
from circuits.model.inputs import parse_prompts
from circuits.model.prompts import Prompts, broadcast_mask
from circuits.model.record import evaluating, listening
from circuits.model.sites import Site
from circuits.patch._gim import gim_functions
from circuits.sweeps.measurements import BASELINE
from circuits.sweeps.metrics import Metric, PerExample, first_choice, in_errors, is_pair, parse_metric_values
from circuits.tensors import Positions, Snapshot, parse_positions

#: What the unembedding reads.
UNEMBED = "unembed.hook_in"


@dataclass(frozen=True)
class Run:
    """The output of one run of the model, and its activations by hook."""

    output: Tensor
    activations: dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """The inputs of a patch from `source` into `base`, and the metric of its effect."""

    caller: str
    surface: HookedModel
    base: Prompts
    source: Prompts | None  # in the layout of base, or a batch of 1; for means any batch, for zeros none
    metric: Metric
    how: str = "resample"
    batch_size: int = 1  # examples in a forward and its backward pass
    #: Of means over the whole source, which all batches share.
    means: References | None = field(default=None, compare=False)
    at: Positions | Snapshot | None = None  # the positions that are patched; None: all
    gim: bool = False  # whether backward passes are GIM's

    @classmethod
    def read(
        cls,
        caller: str,
        model: Any,
        base: Any,
        source: Any,
        metric: Any,
        batch: Any,
        how: str = "resample",
        positions: Any = None,
        batch_size: Any = None,
        of_edges: bool = False,
    ) -> Pair:
        """Reads the arguments of an attribution into base, source and metric, and refuses what does not fit."""
        surface = HookedModel.of(model)
        prompts = parse_prompts(surface, base, caller, "base")
        surface.check_prompts(prompts, f"{caller}: base tokens")
        other = parse_source(source, prompts, surface, how, caller)
        measured = Metric.of(metric, batch, (surface, prompts), caller, default=first_choice)
        at = parse_positions(positions, caller)
        # Changes of the stream by all senders are in float64, in each order that products need.
        changes = 8 * surface.n_layers * (surface.n_heads + 1) * (surface.sizes["d_model"] or 1)
        kept, layers = changes * of_edges, surface.n_layers
        size = rows_in_a_forward(surface, prompts.shape[1], batch_size, caller, layers=layers, kept=kept)
        pair = cls(caller, surface, prompts, other, measured, how, at=at).of_size(size)
        pair.patched_columns()  # positions that are not there are refused before anything runs
        return pair

    @property
    def replacement(self) -> Replacement:
        """The patch of an activation."""
        if self.source is None:
            return Zero()
        return FromTokens(self.source) if self.how == "resample" else Mean(self.source)

    @property
    def words(self) -> dict[str, Any]:
        """The setting of a result that names positions, where the prompts have words."""
        return {} if self.base.words is None else {"words": self.base.labels()}

    def of_size(self, batch_size: int) -> Pair:
        """Returns the same pair with so many examples in a forward."""
        means = References(self.surface, batch_size * self.base.shape[1])
        return replace(self, batch_size=batch_size, means=means)

    def batches(self) -> Iterator[Pair]:
        """Yields pairs of at most `batch_size` examples, in order."""
        for start in range(0, len(self.base), self.batch_size):
            rows = slice(start, min(start + self.batch_size, len(self.base)))
            yield replace(
                self,
                base=self.base[rows],
                source=self._source_of(rows),
                metric=self.metric.at(rows),
                at=_of_rows(self.at, rows),
            )

    def patched_columns(self) -> Tensor:
        """Returns which columns of base are patched, bool [batch pos]."""
        patched = torch.zeros_like(self.base.real)
        for row, columns in enumerate(chosen_columns(self.at, self.base.real, f"{self.caller}, positions")):
            patched[row, columns] = True
        return patched

    def at_positions(self, base: Tensor, source: Tensor, hook: str) -> Tensor:
        """Returns the activation at a hook with the source's at the positions that are patched, base's elsewhere."""
        if self.at is None:
            return source
        chosen = self.patched_columns().to(base.device)
        return torch.where(broadcast_mask(chosen, Site(hook).kind.query_axis, base.ndim), source, base)

    def _source_of(self, rows: slice) -> Prompts | None:
        whole = self.source is None or self.how == "mean" or len(self.source) == 1
        return self.source if whole or self.source is None else self.source[rows]

    def patched(self, hooks: Iterable[str]) -> dict[str, Tensor]:
        """Returns what a patch puts in the place of whole activations, by hook; it broadcasts to them."""
        if self.source is None:
            return dict.fromkeys(hooks, torch.zeros((), device=self.surface.device))
        if self.how == "resample":
            return self.run(self.source, hooks, columns=torch.zeros(1, dtype=torch.long)).activations
        assert self.means is not None
        means = {hook: Reference(self.source, hook, Site(hook).kind, MeanOver()) for hook in hooks}
        self.means.fetch(means.values())
        return {hook: align_mean(self.means[mean], self.base) for hook, mean in means.items()}

    def values(self, output: Tensor, clean: Tensor) -> dict[str, Any]:
        """Returns the metrics of an output of `run` by name, with their gradients; `clean` is the output at base."""
        # Gradients are enabled even if the caller has disabled them, because the output may have a graph.
        with torch.enable_grad():
            return self.metric.values(output, clean, self.logit_columns)

    def baseline(self, clean: Tensor) -> PerExample:
        """Returns the metrics at base as sums and counts per example."""
        values = self.values(clean, clean)
        return parse_metric_values(values, "metric", len(self.base), BASELINE, self.metric.advice)

    @cached_property
    def logit_columns(self) -> Tensor | None:
        """The columns at which logits are computed; None: all."""
        columns, model = self.metric.columns, self.surface.model
        unembed = model.get_submodule(UNEMBED.partition(".")[0]) if UNEMBED in self.surface.hooks else None
        if columns is None or unembed is None or len(columns) == self.base.shape[1]:
            return None
        # A hook of the user's there may count in all positions.
        hooked = any(one._forward_hooks or one._forward_pre_hooks for one in (model, *unembed.modules()))
        return None if hooked else columns

    def run(
        self,
        prompts: Prompts,
        hooks: Iterable[str],
        interpolated: Mapping[str, Tensor] | None = None,
        graph: bool = False,
        columns: Tensor | None = None,
    ) -> Run:
        """Runs the model with some activations replaced by `interpolated` ones, by hook, and records those at `hooks`.

        Args:
            graph: keep the graph, so that gradients at `hooks` exist even where the weights are frozen.
            columns: those at which logits are computed, where not all are; by default those of the metric.
        """
        interpolated, activations = interpolated or {}, dict[str, Tensor]()
        recorders = {
            hook: _recorder(activations, hook, interpolated.get(hook), graph)
            for hook in (*interpolated, *hooks)
        }
        functions: list[tuple[str, Function]] = list(recorders.items())
        if graph and self.gim:
            functions += gim_functions(self.surface, self.caller)
        if self.logit_columns is not None:
            read = (self.logit_columns if columns is None else columns).to(self.surface.device)
            functions.append((UNEMBED, lambda x: x.index_select(1, read)))
        with torch.set_grad_enabled(graph), listening(self.surface, functions):
            output: Tensor = self.surface.call(prompts)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise CircuitsError(
                f"{self.caller}: the model's output is {type(output).__name__}, not a tensor of numbers"
            )
        never_fired = [hook for hook in recorders if hook not in activations]
        if never_fired:
            raise CircuitsError(
                f"{self.caller}: {never_fired[0]} never fired; this model has it switched off"
            )
        return Run(output, activations)

    def gradients(
        self, run: Run, values: Mapping[str, Any], hooks: Iterable[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Returns gradients by metric and hook: of the sum of `values` over examples, at the activation."""
        hooks = list(hooks)
        by_metric: dict[str, dict[str, Tensor]] = {}
        for name, value in values.items():
            # Shape and type are checked before the gradient, so that the error names them.
            parse_metric_values({name: value}, name, len(run.output), self.caller, self.metric.advice)
            total = value[0] if is_pair(value) else value
            if not isinstance(total, Tensor) or not total.requires_grad:
                others = "; or leave it out here" if len(values) > 1 else ""
                raise CircuitsError(
                    f"{self.caller}: {in_errors(name)} has no gradient; compute it with torch, without detach or "
                    f"argmax{others}"
                )
            try:
                gradients = torch.autograd.grad(
                    total.double().sum(),
                    [run.activations[hook] for hook in hooks],
                    retain_graph=True,
                    allow_unused=True,
                )
            except RuntimeError as error:
                raise CircuitsError(
                    f"{self.caller}: {in_errors(name)} has no gradient: {str(error).splitlines()[0]}"
                ) from error
            by_metric[name] = {
                hook: torch.zeros_like(run.activations[hook]) if gradient is None else gradient
                for hook, gradient in zip(hooks, gradients, strict=True)
            }
        return by_metric

    def without_padding(self, estimate: Tensor, hook: str) -> Tensor:
        """Returns an estimate shaped as the activation at a hook, with zeros at padding."""
        if not self.base.padded:
            return estimate
        real = broadcast_mask(self.base.real.to(estimate.device), Site(hook).kind.query_axis, estimate.ndim)
        return torch.where(real, estimate, torch.zeros_like(estimate))

    def in_order(self, estimate: Tensor, hook: str) -> Tensor:
        """Returns an estimate with each example's own tokens first, and zeros behind them."""
        if not self.base.padded:
            return estimate
        kind = Site(hook).kind
        estimate = self.base.in_order(estimate, kind.position_axes)
        reached = broadcast_mask(self.base.reached.to(estimate.device), kind.query_axis, estimate.ndim)
        return torch.where(reached, estimate, torch.zeros_like(estimate))

    def finite(self, estimate: Tensor, metric: str, description: str) -> Tensor:
        """Returns the estimate, or raises `CircuitsError` if it is not finite."""
        if not bool(estimate.isfinite().all()):
            raise CircuitsError(
                f"{self.caller}: {in_errors(metric)}: the estimate at {description} is not finite"
            )
        return estimate


def _of_rows(at: Positions | Snapshot | None, rows: slice) -> Positions | Snapshot | None:
    """Returns positions for some of the examples: those of a mask [batch pos] are different in each."""
    return Snapshot(at.tensor[rows]) if isinstance(at, Snapshot) and at.tensor.ndim == 2 else at


@model_block
def ready_for_gradients(surface: HookedModel) -> Iterator[None]:
    """Suspends the edits of all blocks, sets eval mode and leaves inference mode, so that gradients work."""
    with torch.inference_mode(False), suspended(surface.model), evaluating(surface.model):
        yield


def difference(base: Tensor, source: Tensor) -> Tensor:
    """Returns source − base, in float64, for every example of base."""
    gap = (source.detach() - base.detach()).double()
    # Masked scores are minus infinity in both runs, so their difference is set to 0.
    return gap.masked_fill(source == base, 0.0)


def summed(estimate: Tensor, kept_axes: list[int]) -> np.ndarray:
    """Sums over all axes but the examples and `kept_axes`; returns [n ...], in their order."""
    summed_axes = [axis for axis in range(1, estimate.ndim) if axis not in kept_axes]
    total = estimate.sum(summed_axes) if summed_axes else estimate
    order = [1 + sorted(kept_axes).index(axis) for axis in kept_axes]
    return total.permute(0, *order).cpu().numpy()


def between(base: Tensor, source: Tensor, fraction: float) -> Tensor:
    """Returns base + fraction · (source − base), in the precision of base; a mean is a source in float64."""
    base, source = base.detach(), source.detach()
    return torch.where(source == base, base, base + fraction * (source - base)).to(base.dtype)


def midpoints(steps: int) -> list[float]:
    """Returns the points of the midpoint rule on [0, 1], which is exact for metrics quadratic along the path."""
    return [(step + 0.5) / steps for step in range(steps)]


def vector_jacobian_products(out: Tensor, x: Tensor, vectors: Tensor) -> Tensor:
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


def _recorder(
    activations: dict[str, Tensor], hook: str, value: Tensor | None, graph: bool
) -> Callable[[Tensor], Tensor | None]:
    """Returns a hook that records the activation, or `value` in its place, and passes it on."""

    def keep(activation: Tensor) -> Tensor | None:
        if value is not None:
            activation = value
        if graph:
            # A copy takes its place in the graph, and is a leaf of it where the weights are frozen.
            activation = activation.clone()
            if not activation.requires_grad:
                activation.requires_grad_()
        activations[hook] = activation
        # The model gets another copy, because a hook of the user may write to it in place.
        return activation.clone()

    return keep
