"""Gradients of metrics at activations: at one run, or on the way from it to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.model.padding import refuse_default_metrics_over_padding
from circuits.model.record import evaluating, listening
from circuits.model.state import suspended
from circuits.model.surface import Surface
from circuits.sweeps.metrics import called, first_choice, is_pair, read_metric, read_values
from circuits.validate import read_batch, read_run_tokens

#: Examples per gradient: activations of a whole backward pass are kept.
EXAMPLES_PER_PASS = 512


@dataclass(frozen=True)
class Run:
    """What one run of the model gave: its output, and activations by hook."""

    output: Tensor
    at: dict[str, Tensor]


@dataclass(frozen=True)
class Pair:
    """Two runs, of which base would be edited with what source has, and the metrics that are asked of it."""

    caller: str
    surface: Surface
    base: Tensor  # [batch pos ...]
    source: Tensor  # the same, or a batch of 1
    metric: Any
    batch: Any

    @classmethod
    def read(cls, caller: str, model: Any, base: Any, source: Any, metric: Any, batch: Any) -> Pair:
        surface = Surface.of(model)
        base, source = read_run_tokens(base, caller), read_run_tokens(source, caller)
        surface.check_inputs(base, f"{caller}: base tokens")
        surface.check_inputs(source, f"{caller}: source tokens")
        if source.shape[1:] != base.shape[1:] or len(source) not in (1, len(base)):
            raise CircuitsError(
                f"{caller}: source is {list(source.shape)}, base {list(base.shape)}; the source must have base's "
                "shape, or a batch of 1"
            )
        if metric is not None:
            read_metric(metric, batch is not None)
        else:
            refuse_default_metrics_over_padding(
                surface, base, None, caller, "give a metric that leaves it out"
            )
        batch = read_batch(batch, caller)
        if batch is not None and len(batch) != len(base):
            raise CircuitsError(f"{caller}: base has {len(base)} examples, batch has {len(batch)}")
        return cls(caller, surface, base, source, metric, batch)

    def pieces(self, size: int) -> Iterator[Pair]:
        """At most `size` examples at a time, in order."""
        for start in range(0, len(self.base), size):
            rows = slice(start, min(start + size, len(self.base)))
            yield replace(
                self,
                base=self.base[rows],
                source=self.source if len(self.source) == 1 else self.source[rows],
                batch=None if self.batch is None else self.batch[rows],
            )

    def values(self, output: Tensor, clean: Tensor) -> dict[str, Any]:
        """The metrics of an output, by name; clean: base's own output, whose first choices serve without a metric."""
        # Gradients on, for outputs that have them, wherever this is called.
        with torch.enable_grad():
            if self.metric is None:
                if output.shape[-1] < 2:
                    raise CircuitsError(
                        f"{self.caller}: the model's output has one column, and no first and second choice to take "
                        "the difference of; give metric="
                    )
                return {"logit_diff": first_choice(output, clean.detach())}
            return called(self.metric, output, self.batch)

    def run(
        self,
        tokens: Tensor,
        hooks: Iterable[str],
        moved: Mapping[str, Tensor] | None = None,
        graph: bool = False,
    ) -> Run:
        """Run the model with the activations `moved` put in place, by hook.

        Args:
            graph: gradients can be asked for at `hooks`, even where the weights are frozen.
        """
        moved, seen = moved or {}, dict[str, Tensor]()
        functions = {hook: _held(seen, hook, moved.get(hook), graph) for hook in (*moved, *hooks)}
        with torch.set_grad_enabled(graph), listening(self.surface, functions.items()):
            output: Tensor = self.surface.model(tokens.to(self.surface.device, copy=True))
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise CircuitsError(
                f"{self.caller}: the model's output is {type(output).__name__}, not a tensor of numbers"
            )
        silent = [hook for hook in functions if hook not in seen]
        if silent:
            raise CircuitsError(f"{self.caller}: {silent[0]} never fired; this model has it switched off")
        return Run(output, seen)

    def slopes(
        self, run: Run, values: Mapping[str, Any], hooks: Iterable[str]
    ) -> dict[str, dict[str, Tensor]]:
        """By metric and hook, the gradient of the sum of its `values` over examples at the activation there."""
        hooks = list(hooks)
        found: dict[str, dict[str, Tensor]] = {}
        for name, value in values.items():
            # Its shape, and whether it is made of numbers, before its gradient.
            read_values({name: value}, name, len(run.output), self.caller)
            total = value[0] if is_pair(value) else value
            if not isinstance(total, Tensor) or not total.requires_grad:
                raise CircuitsError(
                    f"{self.caller}: metric {name} has no gradient; compute it with torch, without detach or argmax"
                )
            try:
                slopes = torch.autograd.grad(
                    total.double().sum(),
                    [run.at[hook] for hook in hooks],
                    retain_graph=True,
                    allow_unused=True,
                )
            except RuntimeError as error:
                raise CircuitsError(
                    f"{self.caller}: metric {name} has no gradient: {str(error).splitlines()[0]}"
                ) from error
            found[name] = {
                hook: torch.zeros_like(run.at[hook]) if slope is None else slope
                for hook, slope in zip(hooks, slopes, strict=True)
            }
        return found

    def finite(self, estimate: Tensor, metric: str, where: str) -> Tensor:
        if not bool(estimate.isfinite().all()):
            raise CircuitsError(f"{self.caller}: metric {metric}: the estimate at {where} is not finite")
        return estimate


@contextmanager
def undisturbed(surface: Surface) -> Iterator[None]:
    """The model as it is outside all of our blocks, in eval mode, where gradients can be switched on."""
    with torch.inference_mode(False), suspended(surface.model), evaluating(surface.model):
        yield


def change(base: Tensor, source: Tensor) -> Tensor:
    """source − base, in float64, for every example of base."""
    gap = (source.detach() - base.detach()).double()
    # Masked scores are minus infinity on both sides: no change.
    return gap.masked_fill(source == base, 0.0)


def between(base: Tensor, source: Tensor, fraction: float) -> Tensor:
    """base + fraction · (source − base)."""
    base, source = base.detach(), source.detach()
    return torch.where(source == base, base, base + fraction * (source - base))


def midpoints(steps: int) -> list[float]:
    """Where the integrand is taken on [0, 1]: the midpoint rule, exact for metrics that are quadratic on the way."""
    return [(step + 0.5) / steps for step in range(steps)]


def _held(
    seen: dict[str, Tensor], hook: str, moved: Tensor | None, graph: bool
) -> Callable[[Tensor], Tensor | None]:
    def keep(activation: Tensor) -> Tensor | None:
        if moved is not None:
            activation = moved
        if graph:
            # A copy in its place, as part of the graph; the first of it where the weights are frozen.
            activation = activation.clone()
            if not activation.requires_grad:
                activation.requires_grad_()
        seen[hook] = activation
        # Not what goes on, which a hook of the user's may write to.
        return activation.clone()

    return keep
