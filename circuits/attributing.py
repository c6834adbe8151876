"""Attribution patching: a first-order estimate of what patching every component would do, from one gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.arguments import read_batch, read_choice, read_place, read_run_tokens, read_seed
from circuits.errors import CircuitsError
from circuits.metrics import PerExample, first_choice, metric_name, read_metric, read_values
from circuits.modes import evaluating
from circuits.recording import keep_in, listening
from circuits.results import SweepResult, make_result
from circuits.selection import Head
from circuits.sites import Site, SiteKind
from circuits.state import suspended
from circuits.surface import Surface
from circuits.tabulating import BASELINE, Measured, Row, adjust, tabulate

VERB = "patch.attribution"
DIRECTION = "source -> base"
#: Examples per gradient: activations of a whole backward pass are kept.
EXAMPLES_PER_PASS = 512


def attribution(
    model: Any,
    base: Any,
    source: Any,
    metric: Any = None,
    site: Any = "z",
    *,
    batch: Any = None,
    by: str = "auto",
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """Estimate what patching each part of `site` from `source` into `base` would do (Nanda 2023, "Attribution
    patching"): (source − base)·∂metric/∂site, the gradient taken at base.

    base: tokens [batch pos], the run that would be edited. source: tokens of the same shape, or [1 pos].
    metric: as in `sweep`, of torch operations; `batch` too. Without one, `logit_diff`: base's first choice minus its
        second. site: one site, of one layer ("resid_pre.1") or of every one ("z").
    by: what gets a row: "head", "position", "head,position", "neuron" or "layer"; "auto" takes heads where the site
        has them, else positions.

    A row's `effect` is the estimate, per example and with its interval; `value` is `baseline` plus it. Counts of
    (sum, count) pairs are taken as they are at base. The direction, source -> base, is named in `intervention`.
    It is exact where the metric is linear in the site; where a patch saturates a softmax or a LayerNorm it can be far
    off: check the largest with `patch.activations`. Edits of blocks around this call are not in force.
    """
    surface = Surface.of(model)
    place = read_place(site, None, VERB)
    base, source = read_run_tokens(base, VERB), read_run_tokens(source, VERB)
    surface.check_inputs(base, f"{VERB}: base tokens")
    surface.check_inputs(source, f"{VERB}: source tokens")
    if source.shape[1:] != base.shape[1:] or len(source) not in (1, len(base)):
        raise CircuitsError(
            f"{VERB}: source is {list(source.shape)}, base {list(base.shape)}; the source must have base's shape, or "
            "a batch of 1"
        )
    if metric is not None:
        read_metric(metric, batch is not None)
    batch = read_batch(batch, VERB)
    if batch is not None and len(batch) != len(base):
        raise CircuitsError(f"{VERB}: base has {len(base)} examples, batch has {len(batch)}")
    if any(
        isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1
        for count in (draws, flips)
    ):
        raise CircuitsError(f"{VERB}: draws and flips are positive numbers, got {draws} and {flips}")
    places, kind = surface.at(place.site), place.site.kind
    by = _read_by(by, place.site)
    settings = {
        "seed": read_seed(seed, VERB),
        "draws": draws,
        "flips": flips,
        "engine": "gradient",
        "n": len(base),
    }

    baseline = Measured(BASELINE, {})
    measured: dict[str, Measured] = {}
    for start in range(0, len(base), EXAMPLES_PER_PASS):
        rows = slice(start, min(start + EXAMPLES_PER_PASS, len(base)))
        examples = None if batch is None else batch[rows]
        taken = source if len(source) == 1 else source[rows]
        values, estimates = _estimates(surface, base[rows], taken, places, metric, examples)
        baseline.parts.append(values)
        for layer, hook in places:
            shifts = {name: _summed(shift, kind, by) for name, shift in estimates[hook].items()}
            for index in np.ndindex(next(iter(shifts.values())).shape[1:]):
                row = _row(kind, layer, by, index)
                one = measured.setdefault(row["variant"], Measured(row["variant"], row))
                at = (slice(None), *index)
                one.parts.append(
                    {name: (total + shifts[name][at], count) for name, (total, count) in values.items()}
                )
    found, unedited = tabulate(baseline, list(measured.values()), settings)
    adjust(found)
    described = {"intervention": VERB, "direction": DIRECTION, "site": str(place.site), "by": by}
    return make_result(found, unedited, {name: [described] for name in measured}, settings)


def _estimates(
    surface: Surface,
    base: Tensor,
    source: Tensor,
    places: list[tuple[int | None, str]],
    metric: Any,
    batch: Any,
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """The metrics at base; and by hook and metric (source − base)·gradient, [n ...] as the activation."""
    hooks = [hook for _, hook in places]
    theirs: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}
    with torch.inference_mode(False), suspended(surface.model), evaluating(surface.model):
        with torch.no_grad():
            _run(surface, source, {hook: keep_in(theirs, hook) for hook in hooks}, theirs)
        with torch.enable_grad():
            output = _run(surface, base, {hook: _leaf_in(ours, hook) for hook in hooks}, ours)
            if metric is None:
                values: Any = {"logit_diff": first_choice(output, output.detach())}
            else:
                values = metric(output) if batch is None else metric(output, batch)
                values = values if isinstance(values, Mapping) else {metric_name(metric): values}
            found: dict[str, dict[str, Tensor]] = {hook: {} for hook in hooks}
            for name, value in values.items():
                total = value[0] if isinstance(value, tuple) else value
                if not isinstance(total, Tensor) or not total.requires_grad:
                    raise CircuitsError(
                        f"{VERB}: metric {name} has no gradient; compute it with torch, without detach or argmax"
                    )
                slopes = torch.autograd.grad(
                    total.double().sum(), [ours[hook] for hook in hooks], retain_graph=True, allow_unused=True
                )
                for hook, slope in zip(hooks, slopes, strict=True):
                    change = (theirs[hook] - ours[hook].detach()).double()
                    # Masked scores are minus infinity on both sides: no change.
                    change = change.masked_fill(theirs[hook] == ours[hook], 0.0)
                    estimate = change * (0 if slope is None else slope.double())
                    if not bool(estimate.isfinite().all()):
                        raise CircuitsError(f"{VERB}: metric {name}: the estimate at {hook} is not finite")
                    found[hook][str(name)] = estimate
    return read_values(values, "metric", len(base), BASELINE), found


def _run(
    surface: Surface,
    tokens: Tensor,
    functions: Mapping[str, Callable[[Tensor], Tensor | None]],
    seen: Mapping[str, Tensor],
) -> Tensor:
    with listening(surface, functions.items()):
        output: Tensor = surface.model(tokens.to(surface.device))
    silent = [hook for hook in functions if hook not in seen]
    if silent:
        raise CircuitsError(f"{VERB}: {silent[0]} never fired; this model has it switched off")
    return output


def _leaf_in(seen: dict[str, Tensor], hook: str) -> Callable[[Tensor], Tensor]:
    """Put a copy in the activation's place whose gradient can be asked for, even where the weights are frozen."""

    def keep(activation: Tensor) -> Tensor:
        seen[hook] = (
            activation.clone() if activation.requires_grad else activation.detach().clone().requires_grad_()
        )
        return seen[hook]

    return keep


def _summed(shift: Tensor, kind: SiteKind, by: str) -> np.ndarray:
    """Summed over all axes but the examples and those that `by` names: [n ...], in the order of `by`."""
    kept = [0, *(_axis(kind, part) for part in by.split(",") if part != "layer")]
    others = [axis for axis in range(shift.ndim) if axis not in kept]
    total = shift.sum(others) if others else shift
    order = [sorted(kept).index(axis) for axis in kept]
    return total.permute(order).cpu().numpy()


def _axis(kind: SiteKind, part: str) -> int:
    return {"head": kind.head_axis, "position": kind.query_axis, "neuron": len(kind.axes) - 1}[part] or 0


def _row(kind: SiteKind, layer: int | None, by: str, index: tuple[int, ...]) -> Row:
    parts = dict(zip([part for part in by.split(",") if part != "layer"], index, strict=True))
    where = kind.name if layer is None else f"{kind.name}.{layer}"
    labels = [Head(layer or 0, parts["head"]).label if "head" in parts else where]
    labels += [f"{part} {number}" for part, number in parts.items() if part != "head"]
    return {
        "variant": ", ".join(labels),
        "intervention": f"{VERB} ({DIRECTION})",
        "site": kind.name,
        "layer": layer,
        "head": parts.get("head"),
        "position": parts.get("position"),
    }


def _read_by(by: str, site: Site) -> str:
    by = read_choice(by, ("auto", "head", "position", "head,position", "neuron", "layer"), VERB, "by")
    kind = site.kind
    if by == "auto":
        return "position" if kind.head_axis is None else "head"
    if "head" in by and kind.head_axis is None:
        raise CircuitsError(f"{VERB}: site {site} has no heads; by= position, neuron or layer")
    if by == "neuron" and kind.axes[-1] != "d_mlp":
        raise CircuitsError(f"{VERB}: site {site} has no neurons; those are at mlp_pre and mlp_post")
    return by
