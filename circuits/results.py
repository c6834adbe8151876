"""The table a sweep leaves, its plot and its files."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import pandas as pd

# fmt: off
COLUMNS = (
    "variant", "intervention", "site", "layer", "head", "position", "metric", "value", "ci_low", "ci_high",
    "n", "baseline", "effect", "effect_ci_low", "effect_ci_high", "p_value", "p_adjusted", "engine",
    "null_effect",
)
# fmt: on
_WHOLE = ("layer", "head", "position", "n")


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    frame: one row per variant and metric. `value` with its interval is the edited model's, `baseline` the
        unedited model's on the same examples, `effect` = value − baseline with a paired interval; `p_value`
        is a paired sign-flip test, `p_adjusted` Holm's adjustment over all rows; `n` is the number of
        examples. `layer`, `head` and `position` are filled in where the variant is about exactly one.
        `null_effect` marks an edit that was made and which changed not one example. A value without any entry
        (ΣC = 0) is NaN.
    baseline: the unedited model, one row per metric.
    interventions: what each variant did, as JSON-able data.
    settings: seed, draws, chunk and so on.
    """

    frame: pd.DataFrame
    baseline: pd.DataFrame
    interventions: dict[str, list[dict[str, Any]]]
    settings: dict[str, Any]

    def plot(self, metric: str | None = None) -> Any:
        """A plotly figure: a point with its interval per variant, the unedited model as a line; a row per
        metric.
        """
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots

        names = list(self.baseline["metric"]) if metric is None else [metric]
        missing = [name for name in names if name not in set(self.baseline["metric"])]
        if missing:
            raise KeyError(f"no metric {missing[0]!r}; it has {', '.join(self.baseline['metric'])}")
        figure = make_subplots(rows=len(names), cols=1, shared_xaxes=True, subplot_titles=names)
        for row, name in enumerate(names, start=1):
            part = self.frame[self.frame["metric"] == name]
            figure.add_trace(
                go.Scatter(
                    x=list(part["variant"]),
                    y=list(part["value"]),
                    error_y={
                        "type": "data",
                        "symmetric": False,
                        "array": list(part["ci_high"] - part["value"]),
                        "arrayminus": list(part["value"] - part["ci_low"]),
                    },
                    mode="markers",
                    name=name,
                    showlegend=False,
                ),
                row=row,
                col=1,
            )
            unedited = float(self.baseline.loc[self.baseline["metric"] == name, "value"].iloc[0])
            if unedited == unedited:
                figure.add_hline(y=unedited, line_dash="dash", annotation_text="unedited", row=row, col=1)
        figure.update_layout(height=140 + 260 * len(names))
        return figure

    def to_parquet(self, path: str | PathLike[str]) -> None:
        self.frame.to_parquet(path, index=False)

    def to_csv(self, path: str | PathLike[str]) -> None:
        self.frame.to_csv(path, index=False)

    def to_json(self, path: str | PathLike[str]) -> None:
        """A list of records; NaN and missing numbers as null."""
        self.frame.to_json(path, orient="records", indent=2, double_precision=15)


def make_frame(rows: list[dict[str, Any]], columns: tuple[str, ...] = COLUMNS) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(columns))
    return frame.astype({name: "Int64" for name in _WHOLE if name in columns})
