"""Estimates the effect of patching every component from gradients, and measures the largest exactly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from circuits.arguments import check_renamed_args, parse_choice
from circuits.frozen_tensors_and_positions import Snapshot
from circuits.interventions.places_and_edits import Edit, Place, check_has_neurons_or_features, parse_place
from circuits.interventions.replacements import DIRECTION
from circuits.model.heads import AnyHead, Head, HeadSpec, format_head_label, head_or_kv_group_at_index
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts_with_mask import positions_from_mask
from circuits.model.sites import UNITS, Site
from circuits.model.types import BatchLike, MetricLike, SiteLike, SitesLike, TokensLike
from circuits.patch._metric_gradients import INPUTS, Estimates, PatchExamples, parse_steps
from circuits.patch._screen_result import ScreenResult, measure_and_tabulate, parse_screen_options
from circuits.sweeps.metric import Measurements, PerExample, Row
from circuits.sweeps.sweep_result import SweepResult, parse_resampling, tabulate_runs

CALLER = "patch.screen"
#: The default sites: those that write to the residual stream and can differ between source and base.
SITES = ("embed", "z", "mlp_out")
METHODS = ("gradient", "integrated")


class _SiteAndRowAxes(NamedTuple):
    """A site in one layer, and the axes of it of which each entry has a row: head, position, neuron or feature."""

    site: Site
    hook: str
    axes: tuple[str, ...]


class _PatchTarget(NamedTuple):
    """What has a row: a site in one layer, or an entry on some of its axes."""

    site: Site
    at: dict[str, int]

    def head(self, hooked: HookedModel) -> AnyHead | None:
        kind, layer = self.site.kind, self.site.layer or 0
        return head_or_kv_group_at_index(kind, layer, self.at["head"], hooked) if "head" in self.at else None


@check_renamed_args
def screen(
    model: nn.Module,
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    sites: SitesLike | None = None,
    *,
    batch: BatchLike = None,
    by: str = "component",
    method: str = "integrated",
    steps: int = 5,
    exact: int | str = 10,
    rank: str = "mean",
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimates the effect of `patch.activations` from `source` at every component, and measures the largest exactly.

    Args:
        base: tokens [batch pos] of the run that is edited, or anything that `circuits.prompts` takes.
        source: the same, with as many tokens as base in each row, or a single row.
        metric: `fn(output)`, or `fn(output, batch[rows])`, of torch operations: a value per example [n], or a dict of
            several. Default: `logit_diff`, of base's first and second choice.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        sites: one or several, of a layer ("mlp_out.1") or of every one ("z"); default: embed, z and mlp_out.
        by: what has a row: "component", each head (key-value group) where the site has them, else the site of a layer;
            "position", each of these at each position; "neuron"; or "feature", of a spliced SAE.
        method: "gradient", that at base; or "integrated", the mean along the way from base to source.
        steps: runs between base and source, of "integrated"; 0: the gradient at base.
        exact: how many of the first rows of each metric are also swept, from 0; or "all".
        rank: "mean", by |mean estimate|, or "size", by mean |estimate|: signs that differ cancel in the mean.
        batch_size: examples in a forward and its backward pass, and examples × patches where these are measured.
        seed: of the bootstrap and of the sign-flip test, which have `draws` resamples and `flips` flips.

    The estimate is (source − base)·gradient: the metric's at base (Nanda 2023), unreliable where base is near the
    minimum of a loss; or the mean of those at `steps` midpoints between the embeddings of base and source (Hanna et al.
    2024, arXiv:2403.17806). Refused inside a block of `intervene` that edits the model.
    """
    pair = PatchExamples.parse(CALLER, model, base, source, metric, batch, "resample")
    pair = pair.with_batch_size(batch_size)
    options = parse_screen_options(CALLER, exact, seed, draws, flips, rank)
    between = parse_steps(steps, parse_choice(method, METHODS, CALLER, "method"), CALLER)
    by = parse_choice(by, ("component", "position", *UNITS.values()), CALLER, "by")
    rows = _parse_sites_and_axes(sites, pair.hooked, by)
    parts, found = _list_and_estimate_targets(pair.check_not_inside_intervene(), rows, between)
    settings: Row = {"method": method, "by": by, "direction": DIRECTION}
    settings |= {"sites": [str(one.site) for one in rows]} | ({"steps": steps} if between else {})
    descriptions = [_describe_row(pair.hooked, f"patch.activations ({DIRECTION})", one) for one in parts]
    settings |= pair.setting_of_words
    return measure_and_tabulate(
        *found, descriptions, lambda at: _make_row_patch(pair, parts[at]), options, settings
    )


def attribution(
    model: nn.Module,
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    site: SiteLike = "z",
    *,
    batch: BatchLike = None,
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """Estimates the effect of patching each part of `site` from `source` into `base`, from the gradient at base.

    The estimate is (source − base)·∂metric/∂site (Nanda 2023, "Attribution patching").

    Args:
        base: tokens [batch pos] of the run that is edited, or anything that `circuits.prompts` takes.
        source: the same, with as many tokens in each row; the layout may differ.
        metric: `fn(output)`, or `fn(output, batch[rows])`, of torch operations. Default: `logit_diff`.
        site: one site, of one layer ("resid_pre.1") or of every one ("z"). Each of its heads has a row (at k and v
            under grouped-query attention each key-value group), of a spliced SAE each feature, else each position.
        batch: what the metric is given of each example, such as labels; it has len() and takes a slice of rows.
        batch_size: examples in a forward and its backward pass, by default by the model's size.
        seed: of the bootstrap and of the sign-flip test, which have `draws` resamples and `flips` flips.

    A row's `effect` is the estimate, per example and with its interval; `value` is `baseline` plus the
    estimate. Where the metric returns (sum, count) pairs, counts are those at base. The direction, source -> base, is
    named in `intervention`. The estimate is exact where the metric is linear in the site. Where a patch saturates a
    softmax or a LayerNorm it can be far off: check the largest with `patch.activations`. Refused inside a
    block of `intervene` that edits the model.
    """
    caller, direction = "patch.attribution", "source -> base"
    place = parse_place(site, None, caller)
    pair = PatchExamples.parse(caller, model, base, source, metric, batch, "resample").with_batch_size(
        batch_size
    )
    resampling, kind = parse_resampling(seed, draws, flips, caller), place.site.kind
    axis = "feature" if kind.unit == "feature" else "position" if kind.head_axis is None else "head"
    hooks = pair.hooked.hooks_at(place.site)
    rows = [_SiteAndRowAxes(Site(place.site.name, layer), hook, (axis,)) for layer, hook in hooks]
    parts, (sized, unedited, estimates) = _list_and_estimate_targets(
        pair.check_not_inside_intervene(), rows, None
    )
    runs = [_describe_row(pair.hooked, f"{caller} ({direction})", one) for one in parts]
    measured = Measurements(runs, "gradient")
    measured.add_chunk_of_run(-1, unedited)
    for number in range(len(runs)):
        measured.add_chunk_of_run(
            number, {name: (sums + estimates[name][number], n) for name, (sums, n) in unedited.items()}
        )
    settings: Row = {"engine": "gradient", "n": len(pair.base), "batch_size": sized.batch_size}
    description = {"intervention": caller, "direction": direction, "site": str(place.site), "by": axis}
    described = {run["variant"]: [description] for run in runs}
    return tabulate_runs(
        measured, resampling, described, settings | pair.hooked.setting_if_unchecked | pair.setting_of_words
    )


def _parse_sites_and_axes(given: Any, hooked: HookedModel, by: str) -> list[_SiteAndRowAxes]:
    if given is None:
        sites = [Site(name) for name in SITES if Site(name).hook(0) in hooked.hooks]
    else:
        is_list = isinstance(given, Iterable) and not isinstance(given, str)
        sites = [parse_place(site, None, CALLER).site for site in (given if is_list else [given])]
    rows: dict[str, _SiteAndRowAxes] = {}
    for site in sites:
        check_has_neurons_or_features(site, by, CALLER)
        axes = ["head"] * (site.kind.head_axis is not None) + ["position"] * (by == "position")
        for layer, hook in hooked.hooks_at(site):
            rows[hook] = _SiteAndRowAxes(
                Site(site.name, layer), hook, (by,) if by in UNITS.values() else tuple(axes)
            )
    # A layer that is named twice ("z", "z.1") is kept once.
    return list(rows.values())


def _list_and_estimate_targets(
    examples: PatchExamples, sites_and_axes: Sequence[_SiteAndRowAxes], steps: int | None
) -> tuple[list[_PatchTarget], tuple[PatchExamples, PerExample, dict[str, np.ndarray]]]:
    """Returns what has a row, the pair at the batch size that fits, its metrics at base, and the estimates.

    Args:
        steps: runs between base and source whose gradients are averaged; None: the gradient at base.
    """
    longest = int(examples.base.lengths.max())
    # By hook, the sizes of the axes of rows.
    sizes: dict[str, torch.Size] = {}

    def estimate(chunk: PatchExamples) -> tuple[PerExample, Estimates]:
        baseline, whole = _base_metrics_and_effects(chunk, [one.hook for one in sites_and_axes], steps)
        found: Estimates = {}
        for metric, by_hook in whole.items():
            each = {one.hook: _sum_by_row(by_hook[one.hook], one, longest) for one in sites_and_axes}
            sizes.update((hook, x.shape[:-1]) for hook, x in each.items())
            found[metric] = torch.cat([x.reshape(-1, x.shape[-1]) for x in each.values()])
        return baseline, found

    found = examples.estimate_in_batches(estimate)
    parts = [
        _PatchTarget(one.site, dict(zip(one.axes, index, strict=True)))
        for one in sites_and_axes
        for index in np.ndindex(sizes[one.hook])
    ]
    return parts, found


def _sum_by_row(estimate: Tensor, rows: _SiteAndRowAxes, longest: int) -> Tensor:
    """Sums an estimate over all axes of its site but the examples and those of rows: [*row example]."""
    kind = rows.site.kind
    axes = {"head": kind.head_axis, "position": kind.query_axis}
    kept = [axes.get(name) or estimate.ndim - 1 for name in rows.axes]
    summed = [axis for axis in range(1, estimate.ndim) if axis not in kept]
    total = estimate.sum(summed) if summed else estimate
    total = total.permute(*(1 + sorted(kept).index(axis) for axis in kept), 0)
    return total.narrow(rows.axes.index("position"), 0, longest) if "position" in rows.axes else total


def _base_metrics_and_effects(
    chunk: PatchExamples, hooks: list[str], steps: int | None
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """Returns the metrics at base, and (source − base)·gradient by metric and hook, shaped as the activation with each
    example's own tokens first, and zeros behind them.
    """
    inputs = [hook for hook in INPUTS if hook in chunk.hooked.hooks and steps is not None]
    recorded = dict.fromkeys((*hooks, *inputs))
    source, base = chunk.patched_activations(recorded), chunk.run(chunk.base, recorded, graph=steps is None)
    clean = base.output.detach()
    total: dict[str, dict[str, Tensor]] = {}
    for run in chunk.runs_between(base, source, hooks, steps):
        for metric, gradients in chunk.metric_gradients(run, clean, hooks).items():
            sums = total.setdefault(metric, {})
            for hook, gradient in gradients.items():
                sums[hook] = sums.get(hook, 0) + 1 / (steps or 1) * gradient.double()
    changes = {hook: chunk.source_minus_base(base.activations[hook], source[hook]) for hook in hooks}
    found = {
        metric: {
            hook: chunk.own_tokens_first(changes[hook] * gradient, hook) for hook, gradient in by_hook.items()
        }
        for metric, by_hook in total.items()
    }
    return chunk.metrics_at_base(clean), found


def _describe_row(hooked: HookedModel, intervention: str, target: _PatchTarget) -> Row:
    """Returns the columns that say what a row is about."""
    site, head, at = target.site, target.head(hooked), target.at
    at_site = "" if site.name == "z" else site.name
    label = str(site) if head is None else format_head_label(head, hooked, at_site)
    unit = "feature" if "feature" in at else "neuron"
    names = [f"{axis} {number}" for axis, number in at.items() if axis != "head"]
    return {
        "variant": ", ".join([label, *names]),
        "intervention": intervention,
        "site": site.name,
        "layer": site.layer,
        "head": head.head if isinstance(head, Head) else None,
        "position": at.get("position"),
        unit: at.get(unit),
    }


def _make_row_patch(examples: PatchExamples, target: _PatchTarget) -> Edit:
    """Returns the `patch.activations` edit of one row."""
    units = tuple(target.at[unit] for unit in UNITS.values() if unit in target.at)
    place, head = Place(target.site, neurons=units or None), target.head(examples.hooked)
    if head is not None:
        place = Place(Site(target.site.name), HeadSpec(str(head), (head,)))
    positions: Any = None
    if "position" in target.at:
        positions = (target.at["position"],)
        if examples.base.padded:
            # Of the examples that are as long.
            real = examples.base.real
            positions = Snapshot((positions_from_mask(real) == target.at["position"]) & real)
    return Edit("patch.activations", (place,), examples.replacement, positions)
