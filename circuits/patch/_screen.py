"""Estimates the effect of patching every component from gradients, and measures the largest exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from circuits.circuit._measurement import concatenated
from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.edits import Edit, Place, check_units, parse_place
from circuits.interventions.replacements import DIRECTION
from circuits.model.edit_state import assert_weights_unchanged
from circuits.model.heads import AnyHead, Head, HeadSpec, at_index, label_in
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import own_positions
from circuits.model.sites import UNITS, Site, SiteKind
from circuits.model.types import MetricLike, SiteLike, TokensLike
from circuits.patch._gradients import (
    Pair,
    between,
    difference,
    midpoints,
    ready_for_gradients,
    summed,
)
from circuits.patch._result import (
    Candidate,
    ScreenOptions,
    ScreenResult,
    check_outside_blocks,
    parse_steps,
    ranked,
)
from circuits.sweeps.measurements import Measurements, Row
from circuits.sweeps.metrics import PerExample
from circuits.sweeps.table import SweepResult, parse_resampling, tabulate
from circuits.tensors import Snapshot
from circuits.validate import answers_former_names, parse_choice

CALLER = "patch.screen"
#: The default sites: those that write to the residual stream and can differ between source and base.
SITES = ("embed", "z", "mlp_out")
METHODS = ("gradient", "integrated")
#: The hooks at which the network's input is interpolated.
INPUTS = ("hook_embed", "hook_pos_embed")

_LayerSite = tuple[Site, int | None, str]  # a site, a layer of it, and the hook there


@answers_former_names
def screen(
    model: Any,
    base: Any,
    source: Any,
    metric: Any = None,
    sites: Any = None,
    *,
    batch: Any = None,
    by: str = "component",
    method: str = "integrated",
    steps: int = 5,
    exact: int | str = 10,
    rank: str = "mean",
    positions: Any = None,
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimates the effect of `patch.activations` from `source` at every component, and measures the largest exactly.

    Args:
        base: tokens [batch pos] of the run that is edited, or anything that `circuits.prompts` takes.
        source: the same, with as many tokens as base in each row, or a single row.
        metric: as in `sweep`, made of torch operations. Default: `logit_diff`, of base's first and second choice.
        batch: as in `sweep`.
        sites: one or several, of a layer ("mlp_out.1") or of every one ("z"); default: embed, z and mlp_out.
        by: what has a row: "component", each head (key-value group) where the site has them, else the site of a layer;
            "position", each of these at each position; "neuron"; or "feature", of a spliced SAE.
        method: "gradient" or "integrated", see below.
        steps: runs between base and source, of "integrated".
        exact: the number of rows of each metric, the first ones, that are also swept; or "all".
        rank: "mean", by |mean estimate|, or "size", by mean |estimate|: signs that differ cancel in the mean.
        positions: only these are patched, as in `patch.activations`; by default all.
        batch_size: examples in a forward and its backward pass, and examples × patches where these are measured.
        seed: of the statistics, as in `sweep`; likewise `draws` and `flips`.

    The estimate is (source − base)·gradient: the metric's at base (Nanda 2023), unreliable where base is near the
    minimum of a loss; or the mean of those at `steps` midpoints between the embeddings of base and source (Hanna et al.
    2024, arXiv:2403.17806). Refused inside a block of `intervene` that edits the model.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch, positions=positions, batch_size=batch_size)
    counts = ScreenOptions.read(CALLER, exact, seed, draws, flips, rank)
    parse_choice(method, METHODS, CALLER, "method")
    parse_choice(by, ("component", "position", "neuron", "feature"), CALLER, "by")
    steps, layer_sites = parse_steps(steps, CALLER), _parse_sites(sites, pair.surface, by)
    check_outside_blocks(pair)
    if pair.at is not None and by == "position":
        raise CircuitsError(f'{CALLER}: by="position" has a row for each position; leave positions= out')

    def parts(kind: SiteKind) -> list[str]:
        return (
            [by]
            if by in UNITS.values()
            else ["head"] * (kind.head_axis is not None) + [by] * (by == "position")
        )

    screened = Screened(pair, layer_sites, parts, steps if method == "integrated" else None)
    sized, baseline, candidates = within_memory(pair.batch_size, screened.estimated)
    names = [str(_site(site, layer)) for site, layer, _ in layer_sites]
    settings: Row = {"method": method, "by": by, "direction": DIRECTION, "sites": names}
    settings |= {"steps": steps} if method == "integrated" else {}
    return ranked(sized, candidates, baseline, counts, settings | pair.words)


def attribution(
    model: nn.Module,
    base: TokensLike,
    source: TokensLike,
    metric: MetricLike = None,
    site: SiteLike = "z",
    *,
    batch: Any = None,
    by: str = "auto",
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> SweepResult:
    """Estimates the effect of patching each part of `site` from `source` into `base`, from the gradient at base.

    The estimate is (source − base)·∂metric/∂site (Nanda 2023, "Attribution patching").

    Args:
        base: as in `screen`.
        source: as in `screen`; the layout may differ.
        metric: as in `screen`.
        site: one site, of one layer ("resid_pre.1") or of every one ("z").
        batch: as in `sweep`.
        by: the parts that get a row: "head", "position", "head,position", "neuron", "feature" (of a spliced
            SAE) or "layer"; "auto" takes heads where the site has them (at k and v under grouped-query attention:
            key-value groups), else positions.
        batch_size: examples in a forward and its backward pass, by default as in `screen`.
        seed: of the statistics, as in `sweep`; likewise `draws` and `flips`.

    A row's `effect` is the estimate, per example and with its interval; `value` is `baseline` plus the
    estimate. Where the metric returns (sum, count) pairs, counts are those at base. The direction, source -> base, is
    named in `intervention`. The estimate is exact where the metric is linear in the site. Where a patch saturates a
    softmax or a LayerNorm it can be far off: check the largest with `patch.activations`. Edits of blocks around this
    call are not in force.
    """
    caller = "patch.attribution"
    place = parse_place(site, None, caller)
    pair = Pair.read(caller, model, base, source, metric, batch, batch_size=batch_size)
    resampling = parse_resampling(seed, draws, flips, caller)
    choices = ("auto", "head", "position", "head,position", "neuron", "feature", "layer")
    kind, by = place.site.kind, parse_choice(by, choices, caller, "by")
    if by == "auto":
        by = "position" if kind.head_axis is None else "head"
    if "head" in by and kind.head_axis is None:
        raise CircuitsError(f"{caller}: site {place.site} has no heads; by= position, neuron or layer")
    check_units(place.site, by, caller)
    parts = [part for part in by.split(",") if part != "layer"]
    layer_sites = [(Site(kind.name), layer, hook) for layer, hook in pair.surface.at(place.site)]
    screened = Screened(pair, layer_sites, lambda _: parts, None)
    sized, baseline, candidates = within_memory(pair.batch_size, screened.estimated)
    direction = "source -> base"
    runs = [one.description | {"intervention": f"{caller} ({direction})"} for one in candidates]
    measured, unedited = Measurements(runs, "gradient"), concatenated(baseline)
    measured.begin(unedited)
    for number, one in enumerate(candidates):
        shifted = {name: (sums + one.estimates(name), n) for name, (sums, n) in unedited.items()}
        measured.add(number, shifted)
    settings: Row = {"engine": "gradient", "n": len(pair.base), "batch_size": sized.batch_size}
    description = {"intervention": caller, "direction": direction, "site": str(place.site), "by": by}
    described = {run["variant"]: [description] for run in runs}
    return tabulate(measured, resampling, described, settings | pair.surface.settings | pair.words)


@dataclass(frozen=True)
class Screened:
    """What is screened: the sites, the parts of them that have a row, and how their effects are estimated."""

    pair: Pair
    layer_sites: list[_LayerSite]
    parts: Callable[[SiteKind], list[str]]  # the axes of a site of which each entry has a row
    steps: int | None  # None: the gradient at base

    def estimated(self, size: int) -> tuple[Pair, list[PerExample], list[Candidate]]:
        """Returns the pair at this batch size, its metrics at base, and every patch with its estimates."""
        pair, longest = self.pair.of_size(size), int(self.pair.base.lengths.max())
        baseline: list[PerExample] = []
        candidates: dict[str, Candidate] = {}
        for piece in pair.batches():
            values, found = estimates(piece, [hook for _, _, hook in self.layer_sites], self.steps)
            baseline.append(values)
            for site, layer, hook in self.layer_sites:
                names = self.parts(site.kind)
                axes = {"head": site.kind.head_axis, "position": site.kind.query_axis}
                kept = [axes.get(name) or len(site.kind.axes) - 1 for name in names]
                for metric, estimate in found[hook].items():
                    sums = summed(estimate, kept)
                    for index in np.ndindex(sums.shape[1:]):
                        parts = dict(zip(names, index, strict=True))
                        if parts.get("position", 0) < longest:
                            one, entry = _candidate(pair, site, layer, parts), (slice(None), *index)
                            candidates.setdefault(one.name, one).add(metric, sums[entry])
        return pair, baseline, list(candidates.values())


def estimates(
    piece: Pair, hooks: list[str], steps: int | None
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """Returns the metrics at base, and (source − base)·gradient, shaped as the activation, by hook and metric.

    Args:
        steps: runs between base and source whose gradients are averaged; None: the gradient at base.
    """
    with ready_for_gradients(piece.surface), assert_weights_unchanged(piece.surface.model, piece.caller):
        inputs = [hook for hook in INPUTS if hook in piece.surface.hooks and steps is not None]
        recorded = dict.fromkeys((*hooks, *inputs))
        source, base_run = piece.patched(recorded), piece.run(piece.base, recorded, graph=steps is None)
        clean, at_base = base_run.output.detach(), base_run.activations
        total: dict[str, dict[str, Tensor]] = {hook: {} for hook in hooks}
        for fraction in [None] if steps is None else midpoints(steps):
            run = base_run
            if fraction is not None:
                line = {hook: between(at_base[hook], source[hook], fraction) for hook in inputs}
                run = piece.run(piece.base, hooks, line, graph=True)
            for name, gradients in piece.gradients(run, piece.values(run.output, clean), hooks).items():
                for hook, gradient in gradients.items():
                    total[hook][name] = total[hook].get(name, 0) + 1 / (steps or 1) * gradient.double()
        found: dict[str, dict[str, Tensor]] = {hook: {} for hook in hooks}
        for hook, by_metric in total.items():
            change = difference(at_base[hook], piece.at_positions(at_base[hook], source[hook], hook))
            for name, gradient in by_metric.items():
                found[hook][name] = piece.finite(piece.in_order(change * gradient, hook), name, hook)
        return piece.baseline(clean), found


def _parse_sites(given: Any, surface: HookedModel, by: str) -> list[_LayerSite]:
    if given is None:
        sites = [Site(name) for name in SITES if Site(name).hook(0) in surface.hooks]
    else:
        is_list = isinstance(given, Iterable) and not isinstance(given, str)
        sites = [parse_place(site, None, CALLER).site for site in (given if is_list else [given])]
    if not sites:
        raise CircuitsError(f'{CALLER}: no site given; name some, such as "z" or ["z", "mlp_out.1"]')
    layer_sites: list[_LayerSite] = []
    for site in sites:
        check_units(site, by, CALLER)
        layer_sites += [(Site(site.name), layer, hook) for layer, hook in surface.at(site)]
    # A layer that is named twice ("z", "z.1") is kept once.
    return list({hook: layer_site for layer_site in layer_sites for hook in (layer_site[2],)}.values())


def _site(site: Site, layer: int | None) -> Site:
    return site if layer is None else Site(site.name, layer)


def _candidate(pair: Pair, site: Site, layer: int | None, parts: dict[str, int]) -> Candidate:
    """Returns the row of one part of a site, by its index on the axes of rows, without estimates."""
    parts, head = dict(parts), None
    label = str(_site(site, layer))
    if "head" in parts:
        head = at_index(site.kind, layer or 0, parts.pop("head"), pair.surface)
        label = label_in(head, pair.surface, "" if site.name == "z" else site.name)
    unit = "feature" if "feature" in parts else "neuron"
    description = {
        "variant": ", ".join([label, *(f"{part} {number}" for part, number in parts.items())]),
        "intervention": f"patch.activations ({DIRECTION})",
        "site": site.name,
        "layer": layer,
        "head": head.head if isinstance(head, Head) else None,
        "position": parts.get("position"),
        unit: parts.get(unit),
    }
    return Candidate(description, partial(_patch, pair, site, layer, head, parts))


def _patch(pair: Pair, site: Site, layer: int | None, head: AnyHead | None, parts: dict[str, int]) -> Edit:
    """Returns the `patch.activations` edit of one row."""
    units = tuple(parts[unit] for unit in UNITS.values() if unit in parts)
    place = Place(_site(site, layer), neurons=units or None)
    if head is not None:
        place = Place(site, HeadSpec(str(head), (head,)))
    positions = (parts["position"],) if "position" in parts else pair.at
    if "position" in parts and pair.base.padded:
        # Of the examples that are as long.
        real = pair.base.real
        positions = Snapshot((own_positions(real) == parts["position"]) & real)
    return Edit("patch.activations", (place,), pair.replacement, positions)
