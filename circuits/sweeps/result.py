"""The table a sweep leaves, its plot and its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.sweeps.table import LEVEL, Row

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
    """What a sweep found.

    Attributes:
        frame: one row per variant, metric and checkpoint. `value` with its interval is the edited model's, `baseline`
            the unedited model's on the same examples, `effect` = value − baseline and `ratio` = value / baseline with
            paired intervals; `p_value` is a paired sign-flip test, `p_adjusted` Holm's adjustment over all rows; `n` is
            the number of examples. `layer`, `head` and `position` are filled in where the variant is about exactly one.
            A variant of several draws has a row for their mean, `draw` empty, and then one for each draw, untested.
            `null_effect` marks an edit that was made and which changed not one example. A value without any entry (ΣC =
            0) is NaN.
        baseline: the unedited model, one row per metric and checkpoint.
        interventions: what each variant did, as JSON-able data; for several draws, one after the other.
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
        """How the draws of a variant differ: a row per variant, checkpoint and metric that has draws.

        `mean`, `sd` (n − 1), `smallest`, `median` and `largest` of `value` over `draws` draws, and `baseline`.
        """
        drawn = self.frame[self.frame["draw"].notna()]
        keys = ["variant", "checkpoint", "metric"]
        found = drawn.groupby(keys, sort=False, dropna=False)["value"].agg(
            draws="count", mean="mean", sd="std", smallest="min", median="median", largest="max"
        )
        found["baseline"] = drawn.groupby(keys, sort=False, dropna=False)["baseline"].first()
        return found.reset_index()

    def plot(self, metric: str | None = None, kind: str = "auto") -> Any:
        """A plotly figure with a panel per metric.

        Args:
            kind: "points", a point with its interval per variant and the unedited model as a line; "heatmap", the
                effects of a grid over layers and heads or positions; "auto", a heatmap where there is such a grid.
        """
        from circuits.figures.sweeps import figure

        chosen = self.metrics if metric is None else [metric]
        if chosen[0] not in self.metrics:
            raise CircuitsError(f"plot: no metric {metric!r}; it has {', '.join(self.metrics)}")
        return figure(self.frame, chosen, kind)

    def to_parquet(self, path: str | PathLike[str]) -> None:
        self.frame.to_parquet(path, index=False)

    def to_csv(self, path: str | PathLike[str]) -> None:
        self.frame.to_csv(path, index=False)

    def to_json(self, path: str | PathLike[str]) -> None:
        """A list of records; NaN and missing numbers as null."""
        self.frame.to_json(path, orient="records", indent=2, double_precision=15)


def make_result(
    rows: Sequence[Row], unedited: Sequence[Row], described: dict[str, Any], settings: dict[str, Any]
) -> SweepResult:
    return SweepResult(
        _frame(rows, COLUMNS), _frame(unedited, BASELINE_COLUMNS), described, settings | {"level": LEVEL}
    )


def _frame(rows: Sequence[Row], columns: tuple[str, ...]) -> pd.DataFrame:
    # Column by column, in its final type: a sweep of a small model should not spend its time on its table.
    absent = float("nan")
    return pd.DataFrame({name: _column(name, [row.get(name, absent) for row in rows]) for name in columns})


def _column(name: str, values: list[Any]) -> Any:
    if name in _WHOLE:
        missing = np.array([value is None or value != value for value in values], dtype=bool)
        numbers = [0 if gone else value for value, gone in zip(values, missing, strict=True)]
        return pd.arrays.IntegerArray(np.array(numbers, dtype=np.int64), missing)
    return values
