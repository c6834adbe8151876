"""Screens components: gradient estimates of the effect of every patch, and exact effects of the largest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.base import Replacement
from circuits.interventions.edits import Edit, Place, read_place, refuse_other_units
from circuits.interventions.replacements import DIRECTION
from circuits.model.heads import AnyHead, Head, HeadSpec, at_index, label_in
from circuits.model.hooked_model import HookedModel
from circuits.model.prompts import own_positions
from circuits.model.sites import UNITS, Site, SiteKind
from circuits.model.state import assert_weights_unchanged
from circuits.patch._gradients import (
    Pair,
    between,
    difference,
    midpoints,
    ready_for_gradients,
    summed,
)
from circuits.patch._result import Candidate, Counts, ScreenResult, check_outside_blocks, parse_steps, ranked
from circuits.sweeps.measurements import BASELINE, Row
from circuits.sweeps.metrics import PerExample, read_values
from circuits.tensors import Snapshot
from circuits.validate import read_choice

CALLER = "patch.screen"
#: The default sites: those that write to the residual stream and can differ between source and base.
SITES = ("embed", "z", "mlp_out")
METHODS = ("gradient", "integrated")
LINES = ("input", "site")
#: The hooks at which the network's input is interpolated.
INPUTS = ("hook_embed", "hook_pos_embed")

_LayerSite = tuple[Site, int | None, str]  # a site, a layer of it, and the hook there


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
    line: str = "input",
    exact: int | str = 10,
    rank: str = "mean",
    positions: Any = None,
    source_positions: Any = None,
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimates the effect of `patch.activations` from `source` at every component, and measures the largest exactly.

    Args:
        base: as in `patch.attribution`.
        source: as in `patch.attribution`.
        metric: as in `patch.attribution`.
        batch: as in `patch.attribution`.
        sites: one or several, of a layer ("mlp_out.1") or of every one ("z"); by default embed, z and mlp_out, as far
            as the model has them.
        by: the parts that get a row: "component", each head where the site has heads (at k and v under grouped-query
            attention: each key-value group), else the site of a layer;
            "position", each of these at each position; "neuron", each neuron, at mlp_pre and mlp_post; "feature", each
            feature of a spliced SAE (`circuits.splice`).
        method: "gradient", (source − base)·∂metric/∂site at base (Nanda 2023): one forward pass, and a backward pass
            per metric, for all sites together; unreliable where base is near the minimum of a loss. "integrated", the
            same with the mean of the gradients at `steps` midpoints on a straight line from base to source
            (integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365): `steps` times the cost.
        line: the line of "integrated". "input", the network's embeddings are interpolated, and gradients at all sites
            are taken in these runs (Hanna et al. 2024, arXiv:2403.17806, there for edges): `steps` passes in all.
            "site", the activation at one site of one layer is interpolated as a whole, all else is as at base: `steps`
            passes per site and layer; estimates add up to the exact effect of patching that whole site, but for the
            error of the midpoint rule.
        exact: the number of rows of each metric, the first ones, that are also swept with `patch.activations`; or
            "all".
        rank: the first are, "mean", those with the largest |estimate|, or "size", those whose estimates are largest in
            the mean of absolute values over examples: where an effect's sign differs between examples, as that of a
            loss may, it cancels in the mean. `notes` of the result says where it does.
        positions: only these are patched, as in `patch.activations`; by default all.
        source_positions: those of the source that go there, in order, where prompts and their partners have not one
            length; as in `patch.activations`. Then there is no line from one input to the other: method is "gradient"
            or line "site".
        batch_size: examples in a forward and its backward pass; examples × patches, where patches are measured. Results
            depend on it by rounding only. By default as many as keep to 8,192 tokens and 2^27 numbers in memory, 16
            times as many on an accelerator; `settings` says how many.
        seed: as in `sweep`, for both estimates and effects.
        draws: as in `sweep`.
        flips: as in `sweep`.

    Estimate and effect are the metric of base with the source's activation in it, minus that of base.
    Refused inside a block of `intervene` that edits the model. Raises `CircuitsError` for a metric without a gradient.
    """
    given = {"positions": positions, "source_positions": source_positions, "batch_size": batch_size}
    pair = Pair.read(CALLER, model, base, source, metric, batch, **given)
    read_choice(method, METHODS, CALLER, "method")
    read_choice(line, LINES, CALLER, "line")
    read_choice(by, ("component", "position", "neuron", "feature"), CALLER, "by")
    steps, counts = parse_steps(steps, CALLER), Counts.read(CALLER, exact, seed, draws, flips, rank)
    layer_sites = _parse_sites(sites, pair.surface, by)
    check_outside_blocks(pair)
    if pair.at is not None:
        _check_positions(pair, layer_sites, by, method, line)

    def estimated(size: int) -> tuple[Pair, list[PerExample], list[Candidate]]:
        sized = pair.of_size(size)
        return sized, *_candidates(sized, layer_sites, by, method, steps, line)

    sized, baseline, candidates = within_memory(pair.batch_size, estimated)
    settings: Row = {"method": method, "by": by, "direction": DIRECTION, "sites": _names(layer_sites)}
    settings |= {"steps": steps, "line": line} if method == "integrated" else {}
    settings |= {"words": pair.base.labels()} if pair.base.words is not None else {}
    return ranked(sized, candidates, baseline, counts, settings)


def _candidates(
    pair: Pair, layer_sites: list[_LayerSite], by: str, method: str, steps: int, line: str
) -> tuple[list[PerExample], list[Candidate]]:
    """Returns the metrics at base, batch by batch, and every patch with its estimates."""
    baseline: list[PerExample] = []
    candidates: dict[str, Candidate] = {}
    for piece in pair.batches():
        with ready_for_gradients(pair.surface), assert_weights_unchanged(pair.surface.model, CALLER):
            values, estimates = _estimates(piece, [hook for _, _, hook in layer_sites], method, steps, line)
        baseline.append(values)
        for site, layer, hook in layer_sites:
            row_axes = _row_axes(site.kind, by)
            for name, estimate in estimates[hook].items():
                sums = summed(estimate, list(row_axes.values()))
                for index in np.ndindex(sums.shape[1:]):
                    parts = dict(zip(row_axes, index, strict=True))
                    if parts.get("position", 0) >= int(pair.base.lengths.max()):
                        continue
                    head = (
                        at_index(site.kind, layer or 0, parts.pop("head"), pair.surface)
                        if "head" in parts
                        else None
                    )
                    label = _label(pair.surface, site, layer, head, parts)
                    if label not in candidates:
                        description = _description(label, site, layer, head, parts)
                        candidates[label] = Candidate(
                            description,
                            partial(_patch, site, layer, head, parts, pair.replacement, pair),
                        )
                    entry = (slice(None), *index)
                    candidates[label].add(name, sums[entry])
    return baseline, list(candidates.values())


def _estimates(
    piece: Pair, hooks: list[str], method: str, steps: int, line: str
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """Returns the metrics at base, and (source − base)·gradient, shaped as the activation, by hook and metric."""
    input_hooks = [hook for hook in INPUTS if hook in piece.surface.hooks]
    recorded_hooks = dict.fromkeys((*hooks, *input_hooks))
    source_activations = piece.patched(recorded_hooks)
    base_run = piece.run(piece.base, recorded_hooks, graph=method == "gradient")
    clean = base_run.output.detach()
    patched = {
        hook: piece.at_positions(base_run.activations[hook], source_activations[hook], hook) for hook in hooks
    }
    gradient_sums: dict[str, dict[str, Tensor]] = {hook: {} for hook in hooks}

    def add(gradient_hooks: list[str], interpolated_hooks: list[str], fraction: float, weight: float) -> None:
        """Adds the gradients at one point between base and source to the sums, with its weight."""
        run = base_run
        if interpolated_hooks:
            interpolated = {
                hook: between(
                    base_run.activations[hook],
                    source_activations[hook] if line == "input" else patched[hook],
                    fraction,
                )
                for hook in interpolated_hooks
            }
            run = piece.run(piece.base, gradient_hooks, interpolated, graph=True)
        for name, gradients in piece.gradients(run, piece.values(run.output, clean), gradient_hooks).items():
            for hook, gradient in gradients.items():
                gradient_sums[hook][name] = gradient_sums[hook].get(name, 0) + weight * gradient.double()

    if method == "gradient":
        add(hooks, [], 0.0, 1.0)
    else:
        for gradient_hooks, interpolated_hooks in (
            [(hooks, input_hooks)] if line == "input" else [([hook], [hook]) for hook in hooks]
        ):
            for fraction in midpoints(steps):
                add(gradient_hooks, interpolated_hooks, fraction, 1 / steps)
    estimates = {
        hook: {
            name: piece.finite(
                piece.in_order(difference(base_run.activations[hook], patched[hook]) * gradient, hook),
                name,
                hook,
            )
            for name, gradient in by_metric.items()
        }
        for hook, by_metric in gradient_sums.items()
    }
    return read_values(
        piece.values(clean, clean), "metric", len(piece.base), BASELINE, piece.metric.advice
    ), estimates


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


def _check_positions(pair: Pair, layer_sites: list[_LayerSite], by: str, method: str, line: str) -> None:
    """Refuses positions that the rows, the line of the estimate or a site with a key axis cannot take."""
    if by == "position":
        raise CircuitsError(f'{CALLER}: by="position" has a row for each position; leave positions= out')
    if pair.source_at is None:
        return
    if method == "integrated" and line == "input":
        raise CircuitsError(
            f'{CALLER}: with source_positions= no line leads from one input to the other; give method="gradient" or '
            'line="site"'
        )
    for site, _, _ in layer_sites:
        if "key" in site.kind.axes:
            raise CircuitsError(
                f"{CALLER}: source_positions= cannot say which keys go together at {site}; screen q, k, v or z"
            )


def _names(layer_sites: list[_LayerSite]) -> list[str]:
    return [str(_site(site, layer)) for site, layer, _ in layer_sites]


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


def _label(
    surface: HookedModel, site: Site, layer: int | None, head: AnyHead | None, parts: dict[str, int]
) -> str:
    where = str(_site(site, layer))
    if head is not None:
        where = label_in(head, surface, "" if site.name == "z" else site.name)
    return ", ".join([where, *(f"{part} {number}" for part, number in parts.items())])


def _description(
    label: str, site: Site, layer: int | None, head: AnyHead | None, parts: dict[str, int]
) -> Row:
    numbers = {"head": head.head if isinstance(head, Head) else None}
    numbers |= {name: parts.get(name) for name in ("position", "feature" if "feature" in parts else "neuron")}
    title = f"patch.activations ({DIRECTION})"
    return {"variant": label, "intervention": title, "site": site.name, "layer": layer, **numbers}


def _patch(
    site: Site,
    layer: int | None,
    head: AnyHead | None,
    parts: dict[str, int],
    replacement: Replacement,
    pair: Pair,
) -> Edit:
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
    return Edit("patch.activations", (place,), replacement, positions)
