"""Computes gradients of metrics at activations, in one run or at interpolations between two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.inputs import read_prompts
from circuits.model.padding import refuse_padding
from circuits.model.prompts import Prompts, by_row, check_pair
from circuits.model.record import evaluating, listening
from circuits.model.sites import Site
from circuits.model.state import suspended
from circuits.model.surface import Surface
from circuits.sweeps.answers import bound
from circuits.sweeps.metrics import called, first_choice, is_pair, read_metric, read_values
from circuits.validate import read_batch

#: Examples per gradient; all activations of a backward pass are in memory.
EXAMPLES_PER_PASS = 512


@dataclass(frozen=True)
class Run:
    """The output of one run of the model, and its activations by hook."""

    output: Tensor
    activations: dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """The inputs of a patch from `source` into `base`, and the metric of its effect."""

    caller: str
    surface: Surface
    base: Prompts
    source: Prompts  # in the layout of base, or a batch of 1
    metric: Any
    batch: Any

    @classmethod
    def read(cls, caller: str, model: Any, base: Any, source: Any, metric: Any, batch: Any) -> Pair:
        surface = Surface.of(model)
        prompts, other = (
            read_prompts(surface, base, caller, "base"),
            read_prompts(surface, source, caller, "source"),
        )
        surface.check_prompts(prompts, f"{caller}: base tokens")
        surface.check_prompts(other, f"{caller}: source tokens")
        metric, batch = bound(metric, batch, surface, prompts, caller)
        if metric is not None:
            read_metric(metric, batch is not None)
        else:
            everywhere = torch.ones(prompts.shape[:2], dtype=torch.bool)
            refuse_padding(surface, prompts, everywhere, f"{caller}, without metric=")
        check_pair(prompts, other, caller)
        other = other.like(prompts)
        batch = read_batch(batch, caller)
        if batch is not None and len(batch) != len(prompts):
            raise CircuitsError(f"{caller}: base has {len(prompts)} examples, batch has {len(batch)}")
        return cls(caller, surface, prompts, other, metric, batch)

    def pieces(self, size: int) -> Iterator[Pair]:
        """Yields pairs of at most `size` examples, in order."""
        for start in range(0, len(self.base), size):
            rows = slice(start, min(start + size, len(self.base)))
            yield replace(
                self,
                base=self.base[rows],
                source=self.source if len(self.source) == 1 else self.source[rows],
                batch=None if self.batch is None else self.batch[rows],
            )

    def values(self, output: Tensor, clean: Tensor) -> dict[str, Any]:
        """Returns the metrics of an output by name; the default one compares base's first choices, from `clean`."""
        # Gradients are enabled even if the caller has disabled them, because the output may have a graph.
        with torch.enable_grad():
            kept = self.base.real.to(output.device) if self.base.padded else None
            if self.metric is None:
                if output.shape[-1] < 2:
                    raise CircuitsError(
                        f"{self.caller}: the model's output has one column, and no first and second choice to take "
                        "the difference of; give metric="
                    )
                return {"logit_diff": first_choice(output, clean.detach(), kept)}
            if kept is not None:
                # A metric that reads there fails, instead of taking padding for tokens.
                output = output.masked_fill(~kept[..., None], torch.nan)
            return called(self.metric, output, self.batch)

    def run(
        self,
        prompts: Prompts,
        hooks: Iterable[str],
        interpolated: Mapping[str, Tensor] | None = None,
        graph: bool = False,
    ) -> Run:
        """Runs the model with some activations replaced by `interpolated` ones, by hook, and records those at `hooks`.

        Args:
            graph: keep the graph, so that gradients at `hooks` exist even where the weights are frozen.
        """
        interpolated, activations = interpolated or {}, dict[str, Tensor]()
        recorders = {
            hook: _recorder(activations, hook, interpolated.get(hook), graph)
            for hook in (*interpolated, *hooks)
        }
        with torch.set_grad_enabled(graph), listening(self.surface, recorders.items()):
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
            read_values({name: value}, name, len(run.output), self.caller)
            total = value[0] if is_pair(value) else value
            if not isinstance(total, Tensor) or not total.requires_grad:
                raise CircuitsError(
                    f"{self.caller}: metric {name} has no gradient; compute it with torch, without detach or argmax"
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
                    f"{self.caller}: metric {name} has no gradient: {str(error).splitlines()[0]}"
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
        real = by_row(self.base.real.to(estimate.device), Site(hook).kind.query_axis, estimate.ndim)
        return torch.where(real, estimate, torch.zeros_like(estimate))

    def in_order(self, estimate: Tensor, hook: str) -> Tensor:
        """Returns an estimate with each example's own tokens first, and zeros behind them."""
        if not self.base.padded:
            return estimate
        kind = Site(hook).kind
        estimate = self.base.in_order(estimate, kind.position_axes)
        reached = by_row(self.base.reached.to(estimate.device), kind.query_axis, estimate.ndim)
        return torch.where(reached, estimate, torch.zeros_like(estimate))

    def finite(self, estimate: Tensor, metric: str, description: str) -> Tensor:
        """Returns the estimate, or raises `CircuitsError` if it is not finite."""
        if not bool(estimate.isfinite().all()):
            raise CircuitsError(
                f"{self.caller}: metric {metric}: the estimate at {description} is not finite"
            )
        return estimate


@contextmanager
def ready_for_gradients(surface: Surface) -> Iterator[None]:
    """Suspends the edits of all blocks, sets eval mode and leaves inference mode, so that gradients work."""
    with torch.inference_mode(False), suspended(surface.model), evaluating(surface.model):
        yield


def difference(base: Tensor, source: Tensor) -> Tensor:
    """Returns source − base, in float64, for every example of base."""
    gap = (source.detach() - base.detach()).double()
    # Masked scores are minus infinity in both runs, so their difference is set to 0.
    return gap.masked_fill(source == base, 0.0)


def between(base: Tensor, source: Tensor, fraction: float) -> Tensor:
    """Returns base + fraction · (source − base)."""
    base, source = base.detach(), source.detach()
    return torch.where(source == base, base, base + fraction * (source - base))


def midpoints(steps: int) -> list[float]:
    """Returns the points of the midpoint rule on [0, 1], which is exact for metrics quadratic along the path."""
    return [(step + 0.5) / steps for step in range(steps)]


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
