"""The result of a sweep: its table, its plot and its files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.interventions.base import ActivationEdit, Cut, Intervention, Step, WeightEdit
from circuits.statistics import LEVEL, Resampling, Summary, holm, summarise_groups
from circuits.sweeps.metrics import PerExample

# fmt: off
COLUMNS = (
    "variant", "draw", "checkpoint", "intervention", "site", "layer", "head", "position", "metric", "value",
    "ci_low", "ci_high", "n", "baseline", "effect", "effect_ci_low", "effect_ci_high", "ratio", "ratio_ci_low",
    "ratio_ci_high", "p_value", "p_adjusted", "engine", "null_effect",
)
BASELINE_COLUMNS = ("checkpoint", "metric", "value", "ci_low", "ci_high", "n")
# fmt: on
_WHOLE = ("draw", "layer", "head", "position", "n")


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        frame: one row per variant, metric and checkpoint. `value` with its interval is the edited model's, `baseline`
            the unedited model's on the same examples, `effect` = value − baseline and `ratio` = value / baseline with
            paired intervals; `p_value` is a paired sign-flip test, `p_adjusted` Holm's adjustment over all rows; `n` is
            the number of examples. `layer`, `head` and `position` are filled in where the variant is about exactly one.
            A variant of several draws has a row for their mean, `draw` empty, and then one for each draw, untested.
            `null_effect` marks an edit that was made and which changed not one example. A value without any entry (ΣC =
            0) is NaN.
        baseline: the unedited model, one row per metric and checkpoint.
        interventions: by variant, its interventions as JSON-able data; for several draws, one after the other.
        settings: seed, draws, chunk and so on.
    """

    frame: pd.DataFrame
    baseline: pd.DataFrame
    interventions: dict[str, list[dict[str, Any]]]
    settings: dict[str, Any]

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(self.baseline["metric"]))

    def spread(self) -> pd.DataFrame:
        """Summarises the draws of each variant: a row per variant, checkpoint and metric that has draws.

        `mean`, `sd` (n − 1), `smallest`, `median` and `largest` of `value` over `draws` draws, and `baseline`.
        """
        draw_rows = self.frame[self.frame["draw"].notna()]
        keys = ["variant", "checkpoint", "metric"]
        summary = draw_rows.groupby(keys, sort=False, dropna=False)["value"].agg(
            draws="count", mean="mean", sd="std", smallest="min", median="median", largest="max"
        )
        summary["baseline"] = draw_rows.groupby(keys, sort=False, dropna=False)["baseline"].first()
        return summary.reset_index()

    def plot(self, metric: str | None = None, kind: str = "auto") -> Any:
        """Returns a plotly figure with a panel per metric.

        Args:
            kind: "points", a point with its interval per variant and the unedited model as a line; "heatmap", the
                effects of a grid over layers and heads or positions; "auto", a heatmap where there is such a grid.
        """
        from circuits.figures.sweeps import figure

        chosen = self.metrics if metric is None else [metric]
        if chosen[0] not in self.metrics:
            raise CircuitsError(f"plot: no metric {metric!r}; it has {', '.join(self.metrics)}")
        return figure(self.frame, chosen, kind, self.settings.get("words"))

    def to_parquet(self, path: str | PathLike[str]) -> None:
        self.frame.to_parquet(path, index=False)

    def to_csv(self, path: str | PathLike[str]) -> None:
        self.frame.to_csv(path, index=False)

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes a list of records; NaN and missing numbers as null."""
        self.frame.to_json(path, orient="records", indent=2, double_precision=15)


def make_result(
    rows: Sequence[Row], unedited: Sequence[Row], described: dict[str, Any], settings: dict[str, Any]
) -> SweepResult:
    return SweepResult(
        _frame(rows, COLUMNS), _frame(unedited, BASELINE_COLUMNS), described, settings | {"level": LEVEL}
    )


def _frame(rows: Sequence[Row], columns: tuple[str, ...]) -> pd.DataFrame:
    # Built column by column in the final dtype, as this is much faster for many rows.
    absent = float("nan")
    return pd.DataFrame({name: _column(name, [row.get(name, absent) for row in rows]) for name in columns})


def _column(name: str, values: list[Any]) -> Any:
    if name in _WHOLE:
        missing = np.array([value is None or value != value for value in values], dtype=bool)
        numbers = [0 if gone else value for value, gone in zip(values, missing, strict=True)]
        return pd.arrays.IntegerArray(np.array(numbers, dtype=np.int64), missing)
    return values


BASELINE = "the unedited model"

Row = dict[str, Any]


@dataclass
class Measured:
    """One variant, or one draw of it: the places it edits (as columns), and its values by chunk in order."""

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
    """The data of one row: sums and counts [example], and whether the row is tested."""

    about: Row
    sums: np.ndarray
    counts: np.ndarray
    tested: bool


@dataclass(frozen=True)
class Comparison:
    """Variants and the baseline they are compared with, all of one checkpoint and one engine."""

    baseline: Measured
    variants: Sequence[Measured]
    engine: str
    checkpoint: str | None = None

    def series(self) -> dict[str, list[_Series]]:
        """Returns the series by metric, the baseline first."""
        for variant in self.variants:
            names = [name for part in variant.parts for name in part if name not in self.baseline.parts[0]]
            if names:
                raise CircuitsError(
                    f"metric {min(names)}: returned for {variant.title} but not for {BASELINE}"
                )
        by_metric = {}
        for metric in self.baseline.parts[0]:
            clean = _Series({}, self.baseline.joined(metric, 0), self.baseline.joined(metric, 1), False)
            by_metric[metric] = [clean, *_series(self.variants, metric, clean)]
        return by_metric


def tabulate(
    comparisons: Sequence[Comparison], resampling: Resampling, untested: Collection[str] = ()
) -> list[tuple[list[Row], list[Row]]]:
    """Returns, for each comparison, the rows of its variants in their order, and those of its baseline, one per metric.

    Draws of one variant come after a row that pools them: per example the sums and counts of all draws together.
    Only that row is tested. Metrics in `untested` get no p-value: a distance from the unedited output cannot be
    less than the unedited one's 0, so a test of "no change" would reject for any edit at all.
    """
    series_by_place = [
        (place, metric, series)
        for place, one in enumerate(comparisons)
        for metric, series in one.series().items()
    ]
    groups = [
        (np.stack([one.sums for one in series]), np.stack([one.counts for one in series]))
        for *_, series in series_by_place
    ]
    tables: list[tuple[list[Row], list[Row]]] = [([], []) for _ in comparisons]
    summaries = summarise_groups(groups, resampling, LEVEL)
    for (place, metric, series), group, summary in zip(series_by_place, groups, summaries, strict=True):
        rows, unedited = tables[place]
        common = {"checkpoint": comparisons[place].checkpoint, "n": group[0].shape[1]}
        unedited.append({"metric": metric, **_estimate(summary, 0), **common})
        unchanged = _unchanged(*group)
        for index, one in enumerate(series[1:], start=1):
            rows.append(
                {
                    **one.about,
                    "metric": metric,
                    **_estimate(summary, index),
                    **common,
                    "baseline": summary.value[0],
                    "effect": summary.effect[index],
                    "effect_ci_low": summary.effect_low[index],
                    "effect_ci_high": summary.effect_high[index],
                    "ratio": summary.ratio[index],
                    "ratio_ci_low": summary.ratio_low[index],
                    "ratio_ci_high": summary.ratio_high[index],
                    "p_value": summary.p_value[index] if one.tested and metric not in untested else np.nan,
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
    """Fills in `p_adjusted`, Holm's adjustment over all the rows of one grid."""
    for row, adjusted in zip(rows, holm(np.array([row["p_value"] for row in rows])), strict=True):
        row["p_adjusted"] = adjusted


def about(interventions: Sequence[Intervention], plan: Iterable[Step]) -> Row:
    """Returns the columns that say what a variant edits; a number only where it is exactly one."""
    # A path is listed by its receiver.
    places = [step.receiver if isinstance(step, Cut) else step for step in plan]
    layers = {place.layer for place in places}
    writes = [place for place in places if not isinstance(place, WeightEdit)]
    # A key-value group is several heads.
    heads: set[int | None] = set()
    for write in writes:
        heads |= {None} if write.heads is None or write.groups else set(write.heads)
    if len(writes) < len(places):
        heads.add(None)
    positions = {
        place.positions if isinstance(place, ActivationEdit) and isinstance(place.positions, tuple) else None
        for place in writes
    }
    layer = layers.pop() if len(layers) == 1 else None
    head = heads.pop() if len(heads) == 1 and layer is not None else None
    where = positions.pop() if len(positions) == 1 else None
    sites = [place.component if isinstance(place, WeightEdit) else place.kind.name for place in places]
    return {
        "intervention": " + ".join(one.title for one in interventions),
        "site": " + ".join(dict.fromkeys(sites)),
        "layer": layer,
        "head": head,
        "position": where[0] if where is not None and len(where) == 1 else None,
    }


def _series(variants: Sequence[Measured], metric: str, clean: _Series) -> list[_Series]:
    all_series: list[_Series] = []
    pooled: dict[str, list[_Series]] = {}
    for one in variants:
        row = {"variant": one.name, "draw": one.draw, **one.about}
        series = _Series(row, one.joined(metric, 0), one.joined(metric, 1), one.draw is None)
        all_series.append(series)
        if one.draw is not None:
            pooled.setdefault(one.name, []).append(series)
    return all_series + [_pooled(draws, clean) for draws in pooled.values()]


def _pooled(draws: Sequence[_Series], clean: _Series) -> _Series:
    """Returns the mean draw per example, so that an example weighs as much as in the baseline it is paired with."""
    first = draws[0].about
    # Columns in which the draws differ (heads drawn at random) stay empty.
    common = {
        key: value if all(draw.about[key] == value for draw in draws) else None
        for key, value in first.items()
    }
    # Computed as a change from the baseline, so that draws without any effect pool to exactly none.
    sums = clean.sums + np.mean([draw.sums - clean.sums for draw in draws], axis=0)
    counts = clean.counts + np.mean([draw.counts - clean.counts for draw in draws], axis=0)
    return _Series(common | {"draw": None}, sums, counts, True)


def _estimate(summary: Summary, index: int) -> Row:
    return {"value": summary.value[index], "ci_low": summary.low[index], "ci_high": summary.high[index]}


def _unchanged(sums: np.ndarray, counts: np.ndarray) -> list[bool]:
    """Tells which series have not one example that changed; changes that cancel in the mean are an effect of 0, not
    none.
    """
    same = (sums == sums[0]).all(1) & (counts == counts[0]).all(1)
    return [bool(one) for one in same & counts[0].any()]
