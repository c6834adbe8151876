"""The result of a sweep: its table, its plot and its files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from circuits.arguments import is_whole, parse_choice, parse_seed, stringify_keys
from circuits.errors import CircuitsError
from circuits.figures.panel_grid import Figure
from circuits.interventions.base import ActivationEdit, EdgePatch, Intervention, Step, WeightEdit
from circuits.statistics import LEVEL, holm_adjusted, p_value_floor_notes, summary_columns
from circuits.sweeps.metric import Measurements, Row
from circuits.table_printing import metrics_asked_for, short_table_text

# fmt: off
COLUMNS = (
    "variant", "draw", "checkpoint", "intervention", "site", "layer", "head", "position", "metric", "value",
    "value_ci_low", "value_ci_high", "n", "baseline", "effect", "effect_ci_low", "effect_ci_high", "ratio",
    "ratio_ci_low", "ratio_ci_high", "p_value", "p_adjusted", "engine", "null_effect",
)
BASELINE_COLUMNS = ("checkpoint", "metric", "value", "value_ci_low", "value_ci_high", "n")
#: What `print` shows of a result.
SHOWN = (
    "variant", "draw", "checkpoint", "metric", "baseline", "value", "effect", "effect_ci_low", "effect_ci_high",
    "p_adjusted",
)
# fmt: on
_WHOLE = ("draw", "layer", "head", "position", "n")


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        frame: one row per variant and metric, and per model where `concat` has joined several. `value` with its
            interval is the edited model's, `baseline` the unedited model's on the same examples, `effect` = value −
            baseline and `ratio` = value / baseline with paired intervals; `p_value` is a paired sign-flip test,
            `p_adjusted` Holm's adjustment over all rows (of `of_metric`: over those of one metric); `n` is the number
            of examples. `layer`, `head` and `position` are filled in where the variant is about exactly one. A variant
            of several draws has a row for their mean, `draw` empty, and then one for each draw, untested. `null_effect`
            marks an edit that was made and which changed not one example by more than rounding. A value without any
            entry (ΣC = 0) is NaN.
        baseline: the unedited model, one row per metric (and model).
        interventions: by variant, its interventions as JSON-able data; for several draws, one after the other.
        settings: seed, draws, batch_size and so on; `naive` says by variant why it did not share forwards.
    """

    frame: pd.DataFrame
    baseline: pd.DataFrame
    interventions: dict[str, list[dict[str, Any]]]
    settings: dict[str, Any]

    def __repr__(self) -> str:
        return "\n".join([short_table_text(self.frame, SHOWN), *p_value_notes(self.frame, self.settings)])

    @classmethod
    def concat(cls, parts: Iterable[SweepResult] | Mapping[str, SweepResult]) -> SweepResult:
        """Returns one result from those of several sweeps: of other variants of one model each, or by label, of
        other models (checkpoints, seeds), whose labels are the column `checkpoint`: numbers where all are, else texts.

        Holm's adjustment is made anew, over all rows. The parts have the same examples, metrics and resampling (`seed`,
        `draws`, `flips`), so that they may come from different processes and machines.

        Raises `CircuitsError` for parts that share a row, and for parts whose unedited models or settings differ.
        """
        labels = stringify_keys(parts, "SweepResult.concat", "models") if isinstance(parts, Mapping) else {}
        results = list(labels.values() or (parts if isinstance(parts, Iterable) else ()))
        if not results or not all(isinstance(one, SweepResult) for one in results):
            raise CircuitsError("SweepResult.concat: give results of sweep, in a list or by model label")
        # Steps stay numbers, so that they are an axis.
        are_numbers = bool(labels) and all(isinstance(label, int | np.integer) for label in parts)
        for at, label in enumerate(parts if are_numbers else labels):
            frame, baseline = results[at].frame, results[at].baseline
            named = {"frame": frame.assign(checkpoint=label), "baseline": baseline.assign(checkpoint=label)}
            results[at] = replace(results[at], **named)
        first = results[0].settings
        for name in ("seed", "draws", "flips", "n", "positions"):
            if any(one.settings.get(name) != first.get(name) for one in results):
                raise CircuitsError(f"SweepResult.concat: {name} differs between parts; give all the same")
        frame = pd.concat([one.frame for one in results])
        baseline = pd.concat([one.baseline for one in results], ignore_index=True)
        row, model = ["variant", "draw", "checkpoint", "metric"], ["checkpoint", "metric"]
        if frame.duplicated(row).any():
            raise CircuitsError(
                f"SweepResult.concat: variant {frame['variant'][frame.duplicated(row)].iloc[0]!r} is in two parts"
            )
        # Machines differ in the last digits.
        spread = baseline.groupby(model, dropna=False)["value"].agg(["min", "max"])
        if len({tuple(one.metrics) for one in results}) > 1 or not np.allclose(
            spread["min"], spread["max"], rtol=1e-4, atol=1e-12, equal_nan=True
        ):
            raise CircuitsError(
                "SweepResult.concat: the unedited models of the parts differ; give all one model, examples and metric"
            )
        order = np.argsort(pd.factorize(frame["checkpoint"], use_na_sentinel=False)[0], kind="stable")
        frame = frame.iloc[order].reset_index(drop=True)
        frame["p_adjusted"] = holm_adjusted(frame["p_value"].to_numpy(dtype=float))
        settings = first | {"naive": {}}
        for one in results:
            settings["naive"] |= one.settings.get("naive", {})
        interventions = {name: given for one in results for name, given in one.interventions.items()}
        return cls(frame, baseline.drop_duplicates(model, ignore_index=True), interventions, settings)

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(self.baseline["metric"]))

    def of_metric(self, metric: str) -> SweepResult:
        """Returns the rows of one metric, a family of tests of its own: Holm's adjustment is over them alone.

        Args:
            metric: its name; "all": all rows.
        """
        if metric == "all" and metric not in self.metrics:
            return self
        parse_choice(metric, self.metrics, "of_metric", "metric")
        frame, baseline = (
            table[table["metric"] == metric].reset_index(drop=True) for table in (self.frame, self.baseline)
        )
        frame = frame.assign(p_adjusted=holm_adjusted(frame["p_value"].to_numpy(dtype=float)))
        return replace(self, frame=frame, baseline=baseline)

    def pivot(
        self, index: str | Sequence[str], columns: str, values: str = "effect", metric: str | None = None
    ) -> pd.DataFrame:
        """Returns a table of the effects, or of another column: `result.pivot("layers", "positions")`.

        Args:
            index: what goes down: one or several columns of `frame`, or arguments they come from (`heads` for `head`).
            columns: what goes across.
            values: the column of the numbers.
            metric: one of them; needed where there are several and none of the columns is `metric`.
        """
        given: list[Any] = list(index) if isinstance(index, list | tuple) else [index]
        if not given or not all(isinstance(name, str) for name in (*given, columns, values)):
            raise CircuitsError("pivot: give names of columns: index, one or several, and columns")
        if metric is None and len(self.metrics) > 1 and "metric" not in (*given, columns):
            raise CircuitsError(f"pivot: give metric=, one of {', '.join(self.metrics)}")
        rows = self.frame if metric is None else self.of_metric(metric).frame
        *down, across, values = (n if n in rows else n.removesuffix("s") for n in (*given, columns, values))
        if unknown := {*down, across, values} - {*rows}:
            raise CircuitsError(f"pivot: no column {unknown.pop()!r}; there are {', '.join(map(str, rows))}")
        if across in down:
            raise CircuitsError(f"pivot: {across} goes down or across, not both")
        rows = rows[rows["draw"].isna()].dropna(subset=[*down, across])
        if rows.duplicated([*down, across]).any():
            raise CircuitsError(f"pivot: several variants have the same {', '.join(down)} and {across}")
        return rows.pivot(index=down if len(down) > 1 else down[0], columns=across, values=values)

    def plot(self, metric: str | None = None) -> Figure:
        """Returns a plotly figure with a panel per metric: a heatmap of the effects of a grid over layers and heads, or
        over either and positions; else a point with its interval per variant, and the unedited model as a line.
        """
        from circuits.figures.results import sweep_figure

        return sweep_figure(self.frame, metrics_asked_for(self.frame, metric), self.settings.get("words"))

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes a list of records, all digits of each number; NaN, infinite and missing numbers are null."""
        finite = self.frame.replace([float("inf"), -float("inf")], float("nan"))
        records = finite.astype(object).where(finite.notna(), None).to_dict("records")
        Path(path).write_text(json.dumps(records, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def p_value_notes(frame: pd.DataFrame, settings: dict[str, Any]) -> list[str]:
    """Returns the lines below a table whose p-values cannot be small: see `p_value_floor_notes`."""
    p_values = frame["p_value"].to_numpy(dtype=float)
    return p_value_floor_notes(p_values, int(frame["n"].max()), settings["flips"]) if len(frame) else []


def _rows_to_frame(rows: Sequence[Row], columns: tuple[str, ...]) -> pd.DataFrame:
    values = {name: [row.get(name, np.nan) for row in rows] for name in columns}
    typed = {name: pd.array(one, "Int64") if name in _WHOLE else one for name, one in values.items()}
    return pd.DataFrame(typed)


def parse_resampling(seed: Any, draws: Any, flips: Any, caller: str) -> dict[str, int]:
    """Returns the settings of the random draws of a table; the draws depend on nothing else but the number of
    examples.
    """
    seed = parse_seed(seed, caller)
    if not all(is_whole(count, 1) and count <= 10**7 for count in (draws, flips)):
        raise CircuitsError(f"{caller}: draws and flips are from 1 to 10**7, got {draws} and {flips}")
    return {"seed": seed, "draws": int(draws), "flips": int(flips)}


def tabulate_runs(
    measured: Measurements,
    resampling: dict[str, int],
    described: dict[str, Any],
    settings: dict[str, Any],
    untested: Collection[str] = (),
) -> SweepResult:
    """Returns the table of measurements: by variant in the order of `described`, by draw, by metric.

    Draws of one variant come after a row that pools them: per example the sums and counts of all draws together. Only
    that row is tested. Metrics in `untested` get no p-value: a distance from the unedited output cannot be less than
    the unedited one's 0, so a test of "no change" would reject for any edit at all.
    """
    rows: list[Row] = []
    unedited: list[Row] = []
    for metric in measured.chunks[0][0]:
        runs, values = _append_mean_draws(measured, metric)
        columns = summary_columns(values[0], values[1], level=LEVEL, **resampling)
        series: list[Row] = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        common = {
            "metric": metric,
            "checkpoint": None,
            "n": values.shape[-1],
            "baseline": columns["value"][0],
        }
        unedited.append(series[0] | common)
        for run, row in zip(runs, series[1:], strict=True):
            if run.get("draw") is not None or metric in untested:
                row["p_value"] = np.nan
            rows.append({"engine": measured.engine, **run, **row, **common})
    order = {name: at for at, name in enumerate(dict.fromkeys([*described, *(r["variant"] for r in rows)]))}
    rows.sort(key=lambda row: (order[row["variant"]], -1 if row.get("draw") is None else row["draw"]))
    for row, adjusted in zip(rows, holm_adjusted(np.array([row["p_value"] for row in rows])), strict=True):
        row["p_adjusted"] = adjusted
    frame = _rows_to_frame(rows, COLUMNS)
    settings = resampling | settings | {"level": LEVEL}
    return SweepResult(frame, _rows_to_frame(unedited, BASELINE_COLUMNS), described, settings)


def edited_place_columns(interventions: Sequence[Intervention], plan: Iterable[Step]) -> Row:
    """Returns the columns that say what a variant edits; a number only where it is exactly one."""
    # A path is listed by its receiver.
    places = [step.receiver if isinstance(step, EdgePatch) else step for step in plan]
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


def _append_mean_draws(measurements: Measurements, metric: str) -> tuple[list[Row], np.ndarray]:
    """Returns the runs and their sums and counts [2 run example], the unedited run first, and after them the mean draw
    of each variant that has draws.
    """
    values, runs = measurements.sums_and_counts(metric), list(measurements.runs)
    by_variant: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        if run.get("draw") is not None:
            by_variant.setdefault(run["variant"], []).append(index)
    pooled = []
    for indices in by_variant.values():
        first = runs[indices[0]]
        # Columns in which the draws differ (heads drawn at random) stay empty.
        alike = {
            key: value if all(runs[index][key] == value for index in indices) else None
            for key, value in first.items()
        }
        runs.append(alike | {"draw": None})
        # The mean draw of each example, so that it weighs as much as in the baseline it is paired with; computed as a
        # change from the baseline, so that draws without any effect pool to exactly none.
        changes = values[:, [1 + index for index in indices]] - values[:, :1]
        pooled.append(values[:, :1] + changes.mean(1, keepdims=True))
    return runs, np.concatenate([values, *pooled], axis=1) if pooled else values
