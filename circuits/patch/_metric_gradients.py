"""Computes gradients of metrics at activations, in one run or in runs on the way between two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.arguments import is_whole
from circuits.circuit._circuit_runner import PatchSetup, concat_per_example
from circuits.errors import CircuitsError
from circuits.interventions.base import Replacement
from circuits.interventions.replacements import FromTokens, Mean, Zero, align_means_to_prompts
from circuits.model.activation_recording import attach_to_hooks, hold_eval_mode
from circuits.model.batch_size import choose_batch_size, run_within_memory
from circuits.model.edit_state import assert_weights_unchanged, edits_suspended
from circuits.model.hooks import Function
from circuits.model.prompts_with_mask import Prompts, broadcast_mask
from circuits.model.sites import Site
from circuits.patch._gim_gradients import add_gim_hooks
from circuits.sweeps.metric import BASELINE, PerExample, is_sum_count_pair, metric_label

#: What the unembedding reads.
UNEMBED = "unembed.hook_in"
#: The hooks at which the network's input is interpolated.
INPUTS = ("hook_embed", "hook_pos_embed")

#: By metric, the estimated effect of each patch on the metric's sum over an example's entries, [patch example].
Estimates = dict[str, Tensor]


@dataclass(frozen=True)
class RecordedRun:
    """The output of one run of the model, and its activations by hook."""

    output: Tensor
    activations: dict[str, Tensor]


@dataclass(frozen=True)
class PatchExamples(PatchSetup):
    """The examples of a patch whose effects are estimated from gradients.

    Attributes:
        batch_size: examples in a forward and its backward pass.
        gim: whether backward passes are GIM's.
    """

    batch_size: int = 1
    gim: bool = False
    #: Means over the whole source by hook, which all batches share.
    _means: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def with_batch_size(self, given: Any, of_edges: bool = False) -> PatchExamples:
        """Returns the pair with as many examples in a forward as are asked for, or fit."""
        hooked = self.hooked
        # Changes of the stream by all senders are in float64, in each order that products need.
        changes = 8 * hooked.n_layers * (hooked.n_heads + 1) * (hooked.sizes["d_model"] or 1)
        kept, layers, length = changes * of_edges, hooked.n_layers, self.base.shape[1]
        size = choose_batch_size(hooked, length, given, self.caller, held_layers=layers, kept=kept)
        return replace(self, batch_size=size)

    @property
    def replacement(self) -> Replacement:
        """The patch of an activation."""
        if self.source is None:
            return Zero()
        return FromTokens(self.source) if self.how == "resample" else Mean(self.source)

    @property
    def setting_of_words(self) -> dict[str, Any]:
        """The setting of a result that names positions, where the prompts have words."""
        return {} if self.base.words is None else {"words": self.base.labels()}

    def estimate_in_batches(
        self, estimate: Callable[[PatchExamples], tuple[PerExample, Estimates]]
    ) -> tuple[PatchExamples, PerExample, dict[str, np.ndarray]]:
        """Returns the pair with the batch size that fits, the metrics at base, and the estimates of all examples.

        Args:
            estimate: returns both for the pair of one batch.
        """

        def estimate_with_size(size: int) -> tuple[PatchExamples, PerExample, dict[str, np.ndarray]]:
            pair, hooked = replace(self, batch_size=size), self.hooked
            name = metric_label(self.metric.name)
            baseline: list[PerExample] = []
            parts: dict[str, list[np.ndarray]] = {}
            for part in pair.iter_chunks(size):
                with (
                    torch.inference_mode(False),
                    edits_suspended(hooked.model),
                    hold_eval_mode(hooked.model),
                    assert_weights_unchanged(hooked.model, name),
                ):
                    values, found = estimate(part)
                baseline.append(values)
                for metric, one in found.items():
                    parts.setdefault(metric, []).append(one.cpu().numpy())
            unedited = concat_per_example(baseline)
            whole = {metric: np.concatenate(parts[metric], 1) for metric in unedited}
            if bad := [metric for metric, one in whole.items() if not np.isfinite(one).all()]:
                raise CircuitsError(f"{self.caller}: {metric_label(bad[0])}: an estimate is not finite")
            return pair, unedited, whole

        return run_within_memory(self.batch_size, estimate_with_size)

    @staticmethod
    def source_minus_base(base: Tensor, source: Tensor) -> Tensor:
        """Returns source − base in float64, for every example."""
        gap = (source.detach() - base.detach()).double()
        # Masked scores are minus infinity in both runs, so their difference is set to 0.
        return gap.masked_fill(source == base, 0.0)

    def own_tokens_first(self, estimate: Tensor, hook: str) -> Tensor:
        """Returns an estimate with each example's own tokens first, and zeros behind them."""
        if not self.base.padded:
            return estimate
        kind = Site(hook).kind
        estimate = self.base.in_order(estimate, kind.position_axes)
        reached = broadcast_mask(self.base.reached.to(estimate.device), kind.query_axis, estimate.ndim)
        return torch.where(reached, estimate, torch.zeros_like(estimate))

    def patched_activations(self, hooks: Iterable[str]) -> dict[str, Tensor]:
        """Returns what a patch puts in the place of whole activations, by hook; it broadcasts to them."""
        if self.source is None:
            return dict.fromkeys(hooks, torch.zeros((), device=self.hooked.device))
        if self.how == "resample":
            return self.run(self.source, hooks, columns=torch.zeros(1, dtype=torch.long)).activations
        if not self._means:
            self._means.update(self.source_means(hooks, self.batch_size))
        return {hook: align_means_to_prompts(self._means[hook], self.base) for hook in hooks}

    def runs_between(
        self, base: RecordedRun, source: Mapping[str, Tensor], hooks: Iterable[str], steps: int | None
    ) -> Iterator[RecordedRun]:
        """Yields the runs whose gradients are averaged: that on base, or those at midpoints between the embeddings.

        The midpoint rule is exact for metrics that are quadratic on the way.

        Args:
            steps: the number of midpoints; None: the gradient at base.
        """
        if steps is None:
            yield base
            return
        inputs = [hook for hook in INPUTS if hook in source and hook in base.activations]
        for step in range(steps):
            fraction = (step + 0.5) / steps
            line = {hook: _interpolate(base.activations[hook], source[hook], fraction) for hook in inputs}
            yield self.run(self.base, hooks, line, graph=True)

    def metrics_at_base(self, clean: Tensor) -> PerExample:
        """Returns the metrics at base as sums and counts per example."""
        values, n = self._metric_values(clean, clean), len(self.base)
        return {
            name: self.metric.parse_sums_and_counts(value, name, n, BASELINE)
            for name, value in values.items()
        }

    def _metric_values(self, output: Tensor, clean: Tensor) -> dict[str, Any]:
        """Returns the metrics of an output of `run` by name, with their gradients; `clean` is the output at base."""
        # Gradients are enabled even if the caller has disabled them, because the output may have a graph.
        with torch.enable_grad():
            return self.metric.compute_values(output, clean, self.logit_columns)

    @cached_property
    def logit_columns(self) -> Tensor | None:
        """The columns at which logits are computed; None: all."""
        columns, model = self.metric.columns_read, self.hooked.model
        if columns is None or UNEMBED not in self.hooked.hooks or len(columns) == self.base.shape[1]:
            return None
        # A hook of the user's on what the logits pass may count in all positions.
        passed = (
            model,
            *model.get_submodule("unembed").modules(),
            model.__dict__.get("original_model", model),
        )
        has_hooks = any(one._forward_hooks or one._forward_pre_hooks for one in passed)
        return None if has_hooks else columns

    def run(
        self,
        prompts: Prompts,
        hooks: Iterable[str],
        interpolated: Mapping[str, Tensor] | None = None,
        graph: bool = False,
        columns: Tensor | None = None,
    ) -> RecordedRun:
        """Runs the model with some activations replaced by `interpolated` ones, by hook, and records those at `hooks`.

        Args:
            graph: keep the graph, so that gradients at `hooks` exist even where the weights are frozen.
            columns: those at which logits are computed, where not all are; by default those of the metric.
        """
        interpolated, activations = interpolated or {}, dict[str, Tensor]()
        recorders = {
            hook: _make_recorder(activations, hook, interpolated.get(hook), graph)
            for hook in (*interpolated, *hooks)
        }
        functions: list[tuple[str, Function]] = list(recorders.items())
        if graph and self.gim:
            functions = add_gim_hooks(functions, self.hooked)
        if self.logit_columns is not None:
            read = (self.logit_columns if columns is None else columns).to(self.hooked.device)
            functions.append((UNEMBED, lambda x: x.index_select(1, read)))
        with torch.set_grad_enabled(graph), attach_to_hooks(self.hooked, functions):
            output: Tensor = self.hooked.run_forward(prompts)
        if missing := [hook for hook in recorders if hook not in activations]:
            raise CircuitsError(f"{self.caller}: {missing[0]} never fired; this model has it switched off")
        return RecordedRun(self.check_output(output), activations)

    def metric_gradients(
        self, run: RecordedRun, clean: Tensor, hooks: Iterable[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Returns gradients by metric and hook: of the metric's sum over examples, at the activation.

        Args:
            clean: the output at base.
        """
        hooks, values = list(hooks), self._metric_values(run.output, clean)
        by_metric: dict[str, dict[str, Tensor]] = {}
        for name, value in values.items():
            # Shape and type are checked before the gradient, so that the error names them.
            self.metric.parse_sums_and_counts(value, name, len(run.output), self.caller)
            total = value[0] if is_sum_count_pair(value) else value
            if not isinstance(total, Tensor) or not total.requires_grad:
                others = "; or leave it out here" if len(values) > 1 else ""
                raise CircuitsError(
                    f"{self.caller}: {metric_label(name)} has no gradient; compute it with torch, without detach or "
                    f"argmax{others}"
                )
            at = [run.activations[hook] for hook in hooks]
            try:
                found = torch.autograd.grad(total.double().sum(), at, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                raise CircuitsError(
                    f"{self.caller}: {metric_label(name)} has no gradient: {str(error).splitlines()[0]}"
                ) from error
            by_metric[name] = {
                hook: torch.zeros_like(x) if gradient is None else gradient
                for hook, x, gradient in zip(hooks, at, found, strict=True)
            }
        return by_metric


def parse_steps(steps: Any, method: str, caller: str) -> int | None:
    """Returns the number of runs on the way between base and source; None for the gradient at base."""
    if not is_whole(steps, 0):
        raise CircuitsError(f"{caller}: steps={steps!r}; give a number of points, 0 for the gradient at base")
    return None if method == "gradient" else int(steps) or None


def _interpolate(base: Tensor, source: Tensor, fraction: float) -> Tensor:
    """Returns base + fraction · (source − base), in the precision of base; a mean is a source in float64."""
    base, source = base.detach(), source.detach()
    return torch.where(source == base, base, base + fraction * (source - base)).to(base.dtype)


def _make_recorder(
    activations: dict[str, Tensor], hook: str, value: Tensor | None, graph: bool
) -> Callable[[Tensor], Tensor | None]:
    """Returns a hook that records the activation, or `value` in its place, and passes it on."""

    def record_and_pass_on(activation: Tensor) -> Tensor | None:
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

    return record_and_pass_on
