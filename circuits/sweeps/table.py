"""From what was measured, per variant, chunk and example, to the rows of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from circuits.errors import CircuitsError
from circuits.interventions.base import Cut, Intervention, Step, Swap, Write
from circuits.resampling import Resampling
from circuits.statistics import Summary, holm, summarise_groups
from circuits.sweeps.metrics import PerExample

LEVEL = 0.95
BASELINE = "the unedited model"

Row = dict[str, Any]


@dataclass
class Measured:
    """One variant, or one draw of it: what it edits (as columns), and its chunks in order."""

    name: str
    about: Row
    draw: int | None = None
    parts: list[PerExample] = field(default_factory=list)

    def joined(self, metric: str, which: int) -> np.ndarray:
        if any(metric not in part for part in self.parts):
            raise CircuitsError(f"metric {metric}: returned for {BASELINE} but not for {self.title}")
        return np.concatenate([part[metric][which] for part in self.parts])

    @property
    def title(self) -> str:
        if self.name == BASELINE:
            return BASELINE
        return f"variant {self.name!r}" + ("" if self.draw is None else f", draw {self.draw}")


@dataclass(frozen=True)
class _Series:
    """What becomes one row: sums and counts [example]; whether it is a hypothesis to test."""

    about: Row
    sums: np.ndarray
    counts: np.ndarray
    tested: bool


@dataclass(frozen=True)
class Comparison:
    """Variants and the baseline they are compared with: of one checkpoint and one engine."""

    baseline: Measured
    variants: Sequence[Measured]
    engine: str
    checkpoint: str | None = None

    def series(self) -> dict[str, list[_Series]]:
        """By metric, the baseline first."""
        for variant in self.variants:
            names = [name for part in variant.parts for name in part if name not in self.baseline.parts[0]]
            if names:
                raise CircuitsError(
                    f"metric {min(names)}: returned for {variant.title} but not for {BASELINE}"
                )
        found = {}
        for metric in self.baseline.parts[0]:
            clean = _Series({}, self.baseline.joined(metric, 0), self.baseline.joined(metric, 1), False)
            found[metric] = [clean, *_series(self.variants, metric, clean)]
        return found


def tabulate(
    comparisons: Sequence[Comparison], resampling: Resampling, untested: Collection[str] = ()
) -> list[tuple[list[Row], list[Row]]]:
    """Of each comparison the rows of its variants, in their order, and those of its baseline, one per metric.

    Draws of one variant come after a row that pools them: per example the sums and counts of all draws together.
    Only that row is tested. Metrics in `untested` get no p-value: a distance from the unedited output cannot be
    less than the unedited one's 0, so a test of "no change" would reject for any edit at all.
    """
    asked = [
        (place, metric, series)
        for place, one in enumerate(comparisons)
        for metric, series in one.series().items()
    ]
    groups = [
        (np.stack([one.sums for one in series]), np.stack([one.counts for one in series]))
        for *_, series in asked
    ]
    tables: list[tuple[list[Row], list[Row]]] = [([], []) for _ in comparisons]
    summaries = summarise_groups(groups, resampling, LEVEL)
    for (place, metric, series), group, found in zip(asked, groups, summaries, strict=True):
        rows, unedited = tables[place]
        common = {"checkpoint": comparisons[place].checkpoint, "n": group[0].shape[1]}
        unedited.append({"metric": metric, **_estimate(found, 0), **common})
        unchanged = _unchanged(*group)
        for index, one in enumerate(series[1:], start=1):
            rows.append(
                {
                    **one.about,
                    "metric": metric,
                    **_estimate(found, index),
                    **common,
                    "baseline": found.value[0],
                    "effect": found.effect[index],
                    "effect_ci_low": found.effect_low[index],
                    "effect_ci_high": found.effect_high[index],
                    "ratio": found.ratio[index],
                    "ratio_ci_low": found.ratio_low[index],
                    "ratio_ci_high": found.ratio_high[index],
                    "p_value": found.p_value[index] if one.tested and metric not in untested else np.nan,
                    "engine": comparisons[place].engine,
                    "null_effect": unchanged[index],
                }
            )
    for compared, (rows, _) in zip(comparisons, tables, strict=True):
        order = {
            name: index for index, name in enumerate(dict.fromkeys(one.name for one in compared.variants))
        }
        rows.sort(key=lambda row: (order[row["variant"]], -1 if row["draw"] is None else row["draw"]))
    return tables


def adjust(rows: Sequence[Row]) -> None:
    """Fill in `p_adjusted`, Holm's adjustment over all the rows of one grid."""
    for row, adjusted in zip(rows, holm(np.array([row["p_value"] for row in rows])), strict=True):
        row["p_adjusted"] = adjusted


def about(interventions: Sequence[Intervention], plan: Iterable[Step]) -> Row:
    """The columns that say what a variant edits; a number only where it is one."""
    # Of a path, its receiver.
    places = [step.receiver if isinstance(step, Cut) else step for step in plan]
    layers = {place.layer for place in places}
    writes = [place for place in places if not isinstance(place, Swap)]
    heads = {head for write in writes for head in (write.heads if write.heads is not None else (None,))}
    if len(writes) < len(places):
        heads.add(None)
    positions = {
        place.positions if isinstance(place, Write) and isinstance(place.positions, tuple) else None
        for place in writes
    }
    layer = layers.pop() if len(layers) == 1 else None
    head = heads.pop() if len(heads) == 1 and layer is not None else None
    where = positions.pop() if len(positions) == 1 else None
    sites = [place.component if isinstance(place, Swap) else place.kind.name for place in places]
    return {
        "intervention": " + ".join(one.title for one in interventions),
        "site": " + ".join(dict.fromkeys(sites)),
        "layer": layer,
        "head": head,
        "position": where[0] if where is not None and len(where) == 1 else None,
    }


def _series(variants: Sequence[Measured], metric: str, clean: _Series) -> list[_Series]:
    found: list[_Series] = []
    pooled: dict[str, list[_Series]] = {}
    for one in variants:
        row = {"variant": one.name, "draw": one.draw, **one.about}
        series = _Series(row, one.joined(metric, 0), one.joined(metric, 1), one.draw is None)
        found.append(series)
        if one.draw is not None:
            pooled.setdefault(one.name, []).append(series)
    return found + [_pooled(draws, clean) for draws in pooled.values()]


def _pooled(draws: Sequence[_Series], clean: _Series) -> _Series:
    """Per example the mean draw, so that an example weighs as much as in the baseline it is paired with."""
    first = draws[0].about
    # What the draws do not have in common (heads drawn at random) is said of none of them.
    common = {
        key: value if all(draw.about[key] == value for draw in draws) else None
        for key, value in first.items()
    }
    # As a change from the baseline, so that draws without any effect are exactly none together.
    sums = clean.sums + np.mean([draw.sums - clean.sums for draw in draws], axis=0)
    counts = clean.counts + np.mean([draw.counts - clean.counts for draw in draws], axis=0)
    return _Series(common | {"draw": None}, sums, counts, True)


def _estimate(found: Summary, index: int) -> Row:
    return {"value": found.value[index], "ci_low": found.low[index], "ci_high": found.high[index]}


def _unchanged(sums: np.ndarray, counts: np.ndarray) -> list[bool]:
    """Of which series not one example changed; changes that cancel in the mean are an effect of 0, not none."""
    same = (sums == sums[0]).all(1) & (counts == counts[0]).all(1)
    return [bool(one) for one in same & counts[0].any()]
