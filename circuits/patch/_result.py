"""What a screening leaves: estimates, the exact effects of the top rows beside them, and their agreement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.figures.palette import COLOURS
from circuits.figures.style import finished, interval
from circuits.sweeps.result import SweepResult
from circuits.sweeps.table import Row

# Of a sweep's columns, those that say what was measured.
_EXACT = (
    "value",
    "effect",
    "effect_ci_low",
    "effect_ci_high",
    "p_value",
    "p_adjusted",
    "engine",
    "null_effect",
)


@dataclass(frozen=True)
class ScreenResult:
    """What `patch.screen` or `patch.edges` found.

    Attributes:
        frame: one row per candidate and metric, the largest |estimate| of each metric first (`rank` 1). `estimate` is
            of the effect, with a bootstrap interval over the `n` examples. Where the patch was swept, `value`, `effect`
            (the exact one) and what follows are those of the sweep; elsewhere they are empty.
        correlation: one row per metric: `spearman`, the rank correlation of estimate and effect over the `n` rows of
            `of` that were measured, with a percentile interval over examples. NaN for fewer than 3 rows.
        exact: the sweep of the measured rows.
        settings: method, steps, direction, seed and so on.
    """

    frame: pd.DataFrame
    correlation: pd.DataFrame
    exact: SweepResult
    settings: dict[str, Any]

    @property
    def metrics(self) -> list[str]:
        return list(self.correlation["metric"])

    def plot(self, metric: str | None = None) -> Any:
        """A plotly figure, a panel per metric: exact effect against estimate of the measured rows, and the identity."""
        chosen = self.metrics if metric is None else [metric]
        if chosen[0] not in self.metrics:
            raise CircuitsError(f"plot: no metric {metric!r}; it has {', '.join(self.metrics)}")
        return _figure(self, chosen)


def make_screen(
    tables: Mapping[str, pd.DataFrame], exact: SweepResult, correlation: pd.DataFrame, settings: Row
) -> ScreenResult:
    measured = exact.frame[["variant", "metric", *_EXACT]]
    frame = pd.concat(tables.values()).merge(measured, how="left", on=["variant", "metric"])
    whole = [name for name in ("layer", "head", "position", "neuron") if name in frame]
    frame = frame.astype(dict.fromkeys(whole, "Int64"))
    return ScreenResult(frame, correlation, exact, settings)


def _figure(result: ScreenResult, metrics: list[str]) -> Any:
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    agreement = result.correlation.set_index("metric")
    titles = [
        f"{metric}: Spearman {agreement.loc[metric, 'spearman']:.2f} over {agreement.loc[metric, 'n']} of "
        f"{agreement.loc[metric, 'of']}"
        for metric in metrics
    ]
    found = make_subplots(rows=1, cols=len(metrics), subplot_titles=titles)
    for column, metric in enumerate(metrics, start=1):
        dots = result.frame[(result.frame["metric"] == metric) & result.frame["effect"].notna()]
        ends = np.array([dots[["estimate", "effect"]].min().min(), dots[["estimate", "effect"]].max().max()])
        line = graph_objects.Scatter(
            x=ends, y=ends, mode="lines", line={"dash": "dash", "color": "#808080"}, hoverinfo="skip"
        )
        points = graph_objects.Scatter(
            x=list(dots["estimate"]),
            y=list(dots["effect"]),
            error_x=interval(dots["estimate"], dots["estimate_ci_low"], dots["estimate_ci_high"]),
            error_y=interval(dots["effect"], dots["effect_ci_low"], dots["effect_ci_high"]),
            mode="markers",
            marker={"color": COLOURS["light"][0], "size": 7},
            text=list(dots["variant"]),
            hovertemplate="%{text}<br>estimate %{x:.4g}<br>effect %{y:.4g}" + f"<extra>{metric}</extra>",
        )
        for trace in (line, points):
            found.add_trace(trace.update(showlegend=False), row=1, col=column)
        found.update_xaxes(title_text=f"estimated effect on {metric}", row=1, col=column)
    found.update_yaxes(title_text="exact effect", row=1, col=1)
    found.update_layout(height=430, width=80 + 440 * len(metrics), margin={"t": 40, "b": 60})
    said = "A point per patch that was measured, with 95% intervals over examples; dashed: where both agree."
    return finished(found, "Estimated and exact effects", said)
