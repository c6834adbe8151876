"""Screens components: gradient estimates of the effect of every patch, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.edits import Edit, Place, read_place, refuse_other_units
from circuits.interventions.replacements import DIRECTION
from circuits.model.edit_state import assert_weights_unchanged
from circuits.model.heads import AnyHead, Head, HeadSpec, at_index, label_in
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import own_positions
from circuits.model.sites import UNITS, Site, SiteKind
from circuits.patch._gradients import (
    Pair,
    between,
    difference,
    midpoints,
    ready_for_gradients,
    summed,
)
from circuits.patch._result import Candidate, Counts, ScreenResult, check_outside_blocks, parse_steps, ranked
from circuits.sweeps.measurements import Row
from circuits.sweeps.metrics import PerExample
from circuits.tensors import Snapshot
from circuits.validate import answers_former_names, read_choice

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
    counts = Counts.read(CALLER, exact, seed, draws, flips, rank)
    screened = _Screened.read(pair, sites, by, method, steps)
    sized, baseline, candidates = within_memory(pair.batch_size, screened.estimated)
    return ranked(sized, candidates, baseline, counts, screened.settings)


@dataclass(frozen=True)
class _Screened:
    """What is screened: the sites, the parts of them that have a row, and how their effects are estimated."""

    pair: Pair
    layer_sites: list[_LayerSite]
    by: str
    steps: int | None  # None: the gradient at base

    @classmethod
    def read(cls, pair: Pair, sites: Any, by: str, method: str, steps: int) -> _Screened:
        read_choice(method, METHODS, CALLER, "method")
        read_choice(by, ("component", "position", "neuron", "feature"), CALLER, "by")
        steps, layer_sites = parse_steps(steps, CALLER), _parse_sites(sites, pair.surface, by)
        check_outside_blocks(pair)
        if pair.at is not None and by == "position":
            raise CircuitsError(f'{CALLER}: by="position" has a row for each position; leave positions= out')
        return cls(pair, layer_sites, by, None if method == "gradient" else steps)

    @property
    def settings(self) -> Row:
        names = [str(_site(site, layer)) for site, layer, _ in self.layer_sites]
        settings: Row = {"method": "gradient" if self.steps is None else "integrated", "by": self.by}
        settings |= {"direction": DIRECTION, "sites": names}
        settings |= {} if self.steps is None else {"steps": self.steps}
        words = self.pair.base.words
        return settings if words is None else settings | {"words": self.pair.base.labels()}

    def estimated(self, size: int) -> tuple[Pair, list[PerExample], list[Candidate]]:
        """Returns the pair at this batch size, its metrics at base, and every patch with its estimates."""
        pair, longest = self.pair.of_size(size), int(self.pair.base.lengths.max())
        baseline: list[PerExample] = []
        candidates: dict[str, Candidate] = {}
        for piece in pair.batches():
            values, found = estimates(piece, [hook for _, _, hook in self.layer_sites], self.steps)
            baseline.append(values)
            for site, layer, hook in self.layer_sites:
                row_axes = _row_axes(site.kind, self.by)
                for name, estimate in found[hook].items():
                    sums = summed(estimate, list(row_axes.values()))
                    for index in np.ndindex(sums.shape[1:]):
                        parts = dict(zip(row_axes, index, strict=True))
                        if parts.get("position", 0) < longest:
                            one, entry = _candidate(pair, site, layer, parts), (slice(None), *index)
                            candidates.setdefault(one.name, one).add(name, sums[entry])
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
        sites = [read_place(site, None, CALLER).site for site in (given if is_list else [given])]
    if not sites:
        raise CircuitsError(f'{CALLER}: no site given; name some, such as "z" or ["z", "mlp_out.1"]')
    layer_sites: list[_LayerSite] = []
    for site in sites:
        refuse_other_units(site, by, CALLER)
        layer_sites += [(Site(site.name), layer, hook) for layer, hook in surface.at(site)]
    # A layer that is named twice ("z", "z.1") is kept once.
    return list({hook: layer_site for layer_site in layer_sites for hook in (layer_site[2],)}.values())


def _site(site: Site, layer: int | None) -> Site:
    return site if layer is None else Site(site.name, layer)


def _row_axes(kind: SiteKind, by: str) -> dict[str, int]:
    """Returns the axes that rows index."""
    if by in UNITS.values():
        return {by: len(kind.axes) - 1}
    axes: dict[str, int] = {}
    if kind.head_axis is not None:
        axes["head"] = kind.head_axis
    return axes | ({"position": kind.query_axis} if by == "position" else {})


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
