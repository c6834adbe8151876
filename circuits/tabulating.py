"""From what a sweep measured, per variant, chunk and example, to the rows of its table."""

from __future__ import annotations

from typing import Any

import numpy as np

from circuits.errors import CircuitsError
from circuits.interventions import Intervention, Write
from circuits.metrics import PerExample
from circuits.results import SweepResult, make_frame
from circuits.statistics import holm, summarise

LEVEL = 0.95
BASELINE = "the unedited model"
BASELINE_COLUMNS = ("metric", "value", "ci_low", "ci_high", "n")

Plans = dict[str, tuple[tuple[Intervention, ...], tuple[Write, ...]]]


def tabulate(
    plans: Plans, collected: dict[str, list[PerExample]], settings: dict[str, Any], tested: bool = True
) -> SweepResult:
    """`collected` holds each variant's chunks in order, `BASELINE` first.

    With `tested` off there are no p-values: a distance from the unedited output cannot be less than the unedited
    one's 0, so a test of "no change" would reject for any edit at all.

    `settings` has seed, draws, flips, n and engine, and is kept in the result.
    """
    names = list(collected[BASELINE][0])
    rows: list[dict[str, Any]] = []
    unedited: list[dict[str, Any]] = []
    for metric in names:
        sums = np.stack([_joined(parts, metric, 0, variant) for variant, parts in collected.items()])
        counts = np.stack([_joined(parts, metric, 1, variant) for variant, parts in collected.items()])
        found = summarise(sums, counts, settings["seed"], settings["draws"], settings["flips"], LEVEL)
        unedited.append(
            {"metric": metric, "value": found.value[0], "ci_low": found.low[0], "ci_high": found.high[0]}
            | {"n": settings["n"]}
        )
        for index, (variant, (interventions, writes)) in enumerate(plans.items(), start=1):
            rows.append(
                {
                    "variant": variant,
                    **_about(interventions, writes),
                    "metric": metric,
                    "value": found.value[index],
                    "ci_low": found.low[index],
                    "ci_high": found.high[index],
                    "n": settings["n"],
                    "baseline": found.value[0],
                    "effect": found.effect[index],
                    "effect_ci_low": found.effect_low[index],
                    "effect_ci_high": found.effect_high[index],
                    "p_value": found.p_value[index] if tested else np.nan,
                    "engine": settings["engine"],
                    "null_effect": _unchanged(sums, counts, index),
                }
            )
    for row, adjusted in zip(rows, holm(np.array([row["p_value"] for row in rows])), strict=True):
        row["p_adjusted"] = adjusted
    order = {variant: index for index, variant in enumerate(plans)}
    rows.sort(key=lambda row: order[row["variant"]])
    described = {
        name: [one.describe() for one in interventions] for name, (interventions, _) in plans.items()
    }
    return SweepResult(
        make_frame(rows), make_frame(unedited, BASELINE_COLUMNS), described, settings | {"level": LEVEL}
    )


def _unchanged(sums: np.ndarray, counts: np.ndarray, index: int) -> bool:
    """Whether not one example changed; changes that cancel in the mean are an effect of 0, not none."""
    same = (sums[index] == sums[0]).all() and (counts[index] == counts[0]).all()
    return bool(same and counts[0].any())


def _joined(parts: list[PerExample], metric: str, which: int, variant: str) -> np.ndarray:
    if any(metric not in part for part in parts):
        raise CircuitsError(f"metric {metric}: returned for {BASELINE} but not for {variant}")
    return np.concatenate([part[metric][which] for part in parts])


def _about(interventions: tuple[Intervention, ...], writes: tuple[Write, ...]) -> dict[str, Any]:
    """The columns that say what a variant edits; a number only where it is one."""
    layers = {write.layer for write in writes}
    heads = {head for write in writes for head in (write.heads if write.heads is not None else (None,))}
    positions = {write.positions if isinstance(write.positions, tuple) else None for write in writes}
    layer = layers.pop() if len(layers) == 1 else None
    head = heads.pop() if len(heads) == 1 and layer is not None else None
    where = positions.pop() if len(positions) == 1 else None
    return {
        "intervention": " + ".join(getattr(one, "name", one.label) for one in interventions),
        "site": " + ".join(dict.fromkeys(write.kind.name for write in writes)),
        "layer": layer,
        "head": head,
        "position": where[0] if where is not None and len(where) == 1 else None,
    }
