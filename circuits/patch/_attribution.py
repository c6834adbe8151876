"""Attribution patching: first-order estimates of the effect of patching each component, from one gradient."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from torch import nn

from circuits.engine.batch_size import within_memory
from circuits.errors import CircuitsError
from circuits.interventions.edits import read_place, refuse_other_units
from circuits.model.heads import Head, at_index, label_in
from circuits.model.hooked_model import HookedModel
from circuits.model.sites import Site, SiteKind
from circuits.model.types import MetricLike, SiteLike, TokensLike
from circuits.patch._gradients import Pair, summed
from circuits.patch._screen import estimates
from circuits.sweeps.measurements import Measurements, Row
from circuits.sweeps.table import SweepResult, read_resampling, tabulate
from circuits.validate import read_choice

CALLER = "patch.attribution"
DIRECTION = "source -> base"


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
    place = read_place(site, None, CALLER)
    pair = Pair.read(CALLER, model, base, source, metric, batch, batch_size=batch_size)
    resampling = read_resampling(seed, draws, flips, CALLER)
    places, kind = pair.surface.at(place.site), place.site.kind
    by = _parse_by(by, place.site)

    def estimated(size: int) -> tuple[int, Measurements]:
        return size, _measured(pair.of_size(size), places, kind, by)

    size, measured = within_memory(pair.batch_size, estimated)
    settings: Row = {"engine": "gradient", "n": len(pair.base), "batch_size": size}
    settings |= pair.surface.settings
    settings |= {"words": pair.base.labels()} if pair.base.words is not None else {}
    description = {"intervention": CALLER, "direction": DIRECTION, "site": str(place.site), "by": by}
    described = {run["variant"]: [description] for run in measured.runs}
    return tabulate([measured], resampling, described, settings)


def _measured(pair: Pair, places: list[tuple[int | None, str]], kind: SiteKind, by: str) -> Measurements:
    """Returns the metrics at base and, for each patch, these with its estimate added."""
    measured = Measurements([], "gradient")
    for piece in pair.batches():
        values, found = estimates(piece, [hook for _, hook in places], steps=None)
        measured.begin(values)
        numbers = count()
        for layer, hook in places:
            shifts = {name: summed(shift, _axes(kind, by)) for name, shift in found[hook].items()}
            for index in np.ndindex(next(iter(shifts.values())).shape[1:]):
                row = _row(pair.surface, kind, layer, by, index)
                if (row["position"] or 0) >= int(pair.base.lengths.max()):
                    continue
                entry = (slice(None), *index)
                number = next(numbers)
                if number == len(measured.runs):
                    measured.runs.append(row)
                parts = {
                    name: (sums + shifts[name][entry], entries) for name, (sums, entries) in values.items()
                }
                measured.add(number, parts)
    return measured


def _axes(kind: SiteKind, by: str) -> list[int]:
    """Returns the axes of an activation that `by` names, in its order."""
    named = {"head": kind.head_axis, "position": kind.query_axis, "neuron": -1, "feature": -1}
    return [(named[part] or 0) % len(kind.axes) for part in by.split(",") if part != "layer"]


def _row(surface: HookedModel, kind: SiteKind, layer: int | None, by: str, index: tuple[int, ...]) -> Row:
    parts = dict(zip([part for part in by.split(",") if part != "layer"], index, strict=True))
    where = kind.name if layer is None else f"{kind.name}.{layer}"
    one = at_index(kind, layer or 0, parts["head"], surface) if "head" in parts else None
    labels = [where if one is None else label_in(one, surface)]
    labels += [f"{part} {number}" for part, number in parts.items() if part != "head"]
    return {
        "variant": ", ".join(labels),
        "intervention": f"{CALLER} ({DIRECTION})",
        "site": kind.name,
        "layer": layer,
        "head": one.head if isinstance(one, Head) else None,
        "position": parts.get("position"),
    }


def _parse_by(by: str, site: Site) -> str:
    by = read_choice(
        by, ("auto", "head", "position", "head,position", "neuron", "feature", "layer"), CALLER, "by"
    )
    kind = site.kind
    if by == "auto":
        return "position" if kind.head_axis is None else "head"
    if "head" in by and kind.head_axis is None:
        raise CircuitsError(f"{CALLER}: site {site} has no heads; by= position, neuron or layer")
    refuse_other_units(site, by, CALLER)
    return by
