"""Screening: gradient estimates of what patching every component would do, with the exact effect of the largest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from circuits.errors import CircuitsError
from circuits.interventions.arguments import read_place
from circuits.interventions.edits import Edit, Place
from circuits.interventions.replacements import DIRECTION, FromTokens
from circuits.model.heads import Head, HeadSpec
from circuits.model.sites import Site, SiteKind
from circuits.model.surface import Surface
from circuits.patch._gradients import EXAMPLES_PER_PASS, Pair, between, change, midpoints, undisturbed
from circuits.patch._ranking import Candidate, Counts, ranked, read_steps, refuse_inside_blocks
from circuits.patch._result import ScreenResult
from circuits.sweeps.metrics import PerExample, read_values
from circuits.sweeps.table import BASELINE, Row
from circuits.tensors import Snapshot
from circuits.validate import read_choice

CALLER = "patch.screen"
#: The parts that write to the residual stream and that a source may change.
SITES = ("embed", "z", "mlp_out")
METHODS = ("gradient", "integrated")
LINES = ("input", "site")
#: Where the input of the network is moved.
INPUTS = ("hook_embed", "hook_pos_embed")

_Where = tuple[Site, int | None, str]  # a site, and of it one layer and its hook


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
    seed: int = 0,
    draws: int = 1000,
    flips: int = 9999,
) -> ScreenResult:
    """Estimate what `patch.activations` from `source` would do at every component, and measure it for the largest.

    Args:
        base: as in `patch.attribution`.
        source: see `base`.
        metric: see `base`.
        batch: see `base`.
        sites: one or several, of a layer ("mlp_out.1") or of every one ("z"); by default embed, z and mlp_out, as far
            as the model has them.
        by: what gets a row: "component", each head where the site has heads, else the site of a layer; "position", that
            at each position; "neuron", at mlp_pre and mlp_post.
        method: "gradient", (source − base)·∂metric/∂site at base (Nanda 2023): one forward pass, and a backward pass
            per metric, for all sites together; of little use where base is near the minimum of a loss. "integrated",
            the same with the mean of the gradients at `steps` midpoints on a straight line from base to source
            (integrated gradients, Sundararajan et al. 2017, arXiv:1703.01365): `steps` times the cost.
        line: which line. "input", the network's embeddings move, and gradients at all sites are taken in the runs on
            the way (Hanna et al. 2024, arXiv:2403.17806, there for edges): `steps` passes in all. "site", the
            activation at one site of one layer moves as a whole, all else as at base: `steps` passes per site and
            layer, whose estimates add up to the exact effect of patching that whole site, but for the error of the
            steps.
        exact: how many rows, of the largest |estimate| of each metric, are also swept with `patch.activations`; or
            "all".
        seed: as in `sweep`, for estimates and effects alike.
        draws: see `seed`.
        flips: see `seed`.

    Both numbers are of base with the source's activation in it, minus base. Refused inside a block of `intervene`
    that edits the model. Raises `CircuitsError` for a metric without a gradient.
    """
    pair = Pair.read(CALLER, model, base, source, metric, batch)
    read_choice(method, METHODS, CALLER, "method")
    read_choice(line, LINES, CALLER, "line")
    read_choice(by, ("component", "position", "neuron"), CALLER, "by")
    steps, counts = read_steps(steps, CALLER), Counts.read(CALLER, exact, seed, draws, flips)
    where = _read_sites(sites, pair.surface, by)
    refuse_inside_blocks(pair)

    taken = FromTokens(Snapshot(pair.source))
    baseline: list[PerExample] = []
    candidates: dict[str, Candidate] = {}
    for piece in pair.pieces(EXAMPLES_PER_PASS):
        with undisturbed(pair.surface):
            values, estimates = _estimates(piece, [hook for _, _, hook in where], method, steps, line)
        baseline.append(values)
        for site, layer, hook in where:
            axes = _kept(site.kind, by, pair.surface)
            for name, estimate in estimates[hook].items():
                sums = _summed(estimate, list(axes.values()))
                for index in np.ndindex(sums.shape[1:]):
                    parts = dict(zip(axes, index, strict=True))
                    label = _label(site, layer, parts)
                    if label not in candidates:
                        about = _about(label, site, layer, parts)
                        candidates[label] = Candidate(about, partial(_patch, site, layer, parts, taken))
                    at = (slice(None), *index)
                    candidates[label].add(name, sums[at])
    settings: Row = {"method": method, "by": by, "direction": DIRECTION, "sites": _names(where)}
    settings |= {"steps": steps, "line": line} if method == "integrated" else {}
    return ranked(pair, list(candidates.values()), baseline, counts, settings)


def _estimates(
    piece: Pair, hooks: list[str], method: str, steps: int, line: str
) -> tuple[PerExample, dict[str, dict[str, Tensor]]]:
    """The metrics at base; and by hook and metric (source − base)·gradient, [n ...] as the activation."""
    moving = [hook for hook in INPUTS if hook in piece.surface.hooks]
    recorded = dict.fromkeys((*hooks, *moving))
    theirs = piece.run(piece.source, recorded).at
    ours = piece.run(piece.base, recorded, graph=method == "gradient")
    clean = ours.output.detach()
    totals: dict[str, dict[str, Tensor]] = {hook: {} for hook in hooks}

    def add(wanted: list[str], moved: list[str], fraction: float, weight: float) -> None:
        run = ours
        if moved:
            way = {hook: between(ours.at[hook], theirs[hook], fraction) for hook in moved}
            run = piece.run(piece.base, wanted, way, graph=True)
        for name, slopes in piece.slopes(run, piece.values(run.output, clean), wanted).items():
            for hook, slope in slopes.items():
                totals[hook][name] = totals[hook].get(name, 0) + weight * slope.double()

    if method == "gradient":
        add(hooks, [], 0.0, 1.0)
    else:
        for wanted, moved in [(hooks, moving)] if line == "input" else [([hook], [hook]) for hook in hooks]:
            for fraction in midpoints(steps):
                add(wanted, moved, fraction, 1 / steps)
    found = {
        hook: {
            name: piece.finite(change(ours.at[hook], theirs[hook]) * slope, name, hook)
            for name, slope in by_metric.items()
        }
        for hook, by_metric in totals.items()
    }
    return read_values(piece.values(clean, clean), "metric", len(piece.base), BASELINE), found


def _read_sites(given: Any, surface: Surface, by: str) -> list[_Where]:
    if given is None:
        sites = [Site(name) for name in SITES if Site(name).hook(0) in surface.hooks]
    else:
        several = isinstance(given, Iterable) and not isinstance(given, str)
        sites = [read_place(site, None, CALLER).site for site in (given if several else [given])]
    if not sites:
        raise CircuitsError(f'{CALLER}: no site given; name some, such as "z" or ["z", "mlp_out.1"]')
    found: list[_Where] = []
    for site in sites:
        if by == "neuron" and site.kind.axes[-1] != "d_mlp":
            raise CircuitsError(f"{CALLER}: site {site} has no neurons; those are at mlp_pre and mlp_post")
        found += [(Site(site.name), layer, hook) for layer, hook in surface.at(site)]
    # A layer named twice ("z", "z.1") is one.
    return list({hook: place for place in found for hook in (place[2],)}.values())


def _names(where: list[_Where]) -> list[str]:
    return [str(_site(site, layer)) for site, layer, _ in where]


def _site(site: Site, layer: int | None) -> Site:
    return site if layer is None else Site(site.name, layer)


def _kept(kind: SiteKind, by: str, surface: Surface) -> dict[str, int]:
    """What a row is about, on which axis: heads, unless they share key-value heads and cannot be patched alone."""
    if by == "neuron":
        return {"neuron": len(kind.axes) - 1}
    found: dict[str, int] = {}
    if kind.head_axis is not None and surface.head_count(kind) == surface.n_heads:
        found["head"] = kind.head_axis
    return found | ({"position": kind.query_axis} if by == "position" else {})


def _summed(estimate: Tensor, kept: list[int]) -> np.ndarray:
    """Summed over all axes but the examples and `kept`: [n ...], in the order of `kept`."""
    others = [axis for axis in range(1, estimate.ndim) if axis not in kept]
    total = estimate.sum(others) if others else estimate
    order = [1 + sorted(kept).index(axis) for axis in kept]
    return total.permute(0, *order).cpu().numpy()


def _label(site: Site, layer: int | None, parts: dict[str, int]) -> str:
    where = str(_site(site, layer))
    if "head" in parts:
        where = Head(layer or 0, parts["head"]).label + ("" if site.name == "z" else f".{site.name}")
    return ", ".join([where, *(f"{part} {number}" for part, number in parts.items() if part != "head")])


def _about(label: str, site: Site, layer: int | None, parts: dict[str, int]) -> Row:
    numbers = {name: parts.get(name) for name in ("head", "position", "neuron")}
    title = f"patch.activations ({DIRECTION})"
    return {"variant": label, "intervention": title, "site": site.name, "layer": layer, **numbers}


def _patch(site: Site, layer: int | None, parts: dict[str, int], taken: FromTokens) -> Edit:
    """`patch.activations` of what a row is about."""
    place = Place(_site(site, layer), neurons=(parts["neuron"],) if "neuron" in parts else None)
    if "head" in parts:
        head = Head(layer or 0, parts["head"])
        place = Place(site, HeadSpec(str(head), (head,)))
    positions = (parts["position"],) if "position" in parts else None
    return Edit("patch.activations", (place,), taken, positions)
