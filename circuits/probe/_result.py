"""Tabulates the scores of probes, with their controls and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from circuits.errors import CircuitsError
from circuits.probe._fit import LinearMap
from circuits.probe._scores import Scored
from circuits.probe._sites import ProbeSite
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.tables import short_table

# fmt: off
COLUMNS = (
    "site", "layer", "head", "position", "target", "split", "metric", "value", "value_ci_low", "value_ci_high",
    "shuffled", "selectivity", "selectivity_ci_low", "selectivity_ci_high",
    "untrained", "over_untrained", "over_untrained_ci_low", "over_untrained_ci_high",
    "n", "entries", "fit_n", "ridge", "rank",
)
#: What `print` shows.
SHOWN = (
    "site", "layer", "head", "position", "target", "split", "metric", "value", "value_ci_low", "value_ci_high",
    "shuffled", "untrained",
)
# fmt: on
_WHOLE = ("layer", "head", "position", "n", "entries", "fit_n", "rank")


@dataclass(frozen=True)
class ProbeResult:
    """The results of linear probes.

    Attributes:
        frame: one row per site and layer (and head, position), target, split and metric. `value` with its interval is
            on held-out examples, `n` of them with `entries` entries in the split; the probe was fitted on `fit_n`
            examples with penalty `ridge` (0: least squares), in a space of `rank` dimensions. `shuffled` is the same
            metric of a probe fitted to, and scored on, targets exchanged between examples, `selectivity` = value −
            shuffled; `untrained` that of a probe on the untrained model, `over_untrained` = value − untrained; both
            differences have paired intervals. For mse, negative differences mean a better probe. NaN: there is no such
            control, or no entry.
        weights: (place, target) -> `LinearMap`; places are "resid_post.2", "z.1.3" (head 3), "resid_post.2@4" (position
            4).
        errors: the cross-validated mean squared error of each of several penalties: place, target, ridge, mse.
        settings: seed, folds, draws and so on.
    """

    frame: pd.DataFrame
    weights: Mapping[tuple[str, str], LinearMap]
    errors: pd.DataFrame
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        return short_table(self.frame, SHOWN)

    def plot(self, metric: str | Sequence[str] | None = None) -> Any:
        """Returns a plotly figure with a panel per metric and target: values over layers, with intervals as bands.

        Shuffled targets are dotted, the untrained model is dashed.
        """
        from circuits.figures.probes import figure

        known = list(dict.fromkeys(self.frame["metric"]))
        chosen = known if metric is None else [metric] if isinstance(metric, str) else list(metric)
        for one in chosen:
            if one not in known:
                raise CircuitsError(f"plot: no metric {one!r}; it has {', '.join(known)}")
        return figure(self.frame[self.frame["metric"].isin(chosen)])


@dataclass(frozen=True)
class Measured:
    """One probe's scores, and those of its controls; None where there is no such control."""

    site: ProbeSite
    target: str
    fitted: LinearMap
    entries: Mapping[str, int]  # by split
    value: Scored
    shuffled: Scored | None
    untrained: Scored | None


def tabulate(measured: Sequence[Measured], n: int, fit_n: int, seed: int, draws: int) -> pd.DataFrame:
    """Tabulates scores, with percentile bootstrap intervals over held-out examples; all rows share the resamples."""
    rows: list[dict[str, Any]] = []
    series: list[tuple[np.ndarray, np.ndarray]] = []
    for one in measured:
        description: dict[str, Any] = {
            "site": one.site.site.name,
            "layer": one.site.site.layer,
            "head": one.site.head,
            "position": one.site.position,
            "target": one.target,
            "n": n,
            "fit_n": fit_n,
            "ridge": one.fitted.ridge,
            "rank": one.fitted.rank,
        }
        for split, metric in one.value:
            rows.append({**description, "split": split, "metric": metric, "entries": one.entries[split]})
            no_entries = (np.zeros(n), np.zeros(n))
            for scored in (one.value, one.shuffled, one.untrained):
                series.append(no_entries if scored is None else scored[split, metric])
    sums, counts = (np.stack(part) for part in zip(*series, strict=True))
    value = ratio(sums.sum(1), counts.sum(1)).reshape(-1, 3)
    resampled = bootstrap(sums, counts, seed, draws).reshape(draws, -1, 3)
    estimates = {"value": value[:, 0], "shuffled": value[:, 1], "untrained": value[:, 2]}
    estimates["value_ci_low"], estimates["value_ci_high"] = interval(resampled[..., 0], LEVEL)
    for control, name in ((1, "selectivity"), (2, "over_untrained")):
        estimates[name] = value[:, 0] - value[:, control]
        bounds = interval(resampled[..., 0] - resampled[..., control], LEVEL)
        estimates[f"{name}_ci_low"], estimates[f"{name}_ci_high"] = bounds
    frame = pd.DataFrame(rows).assign(**estimates)[list(COLUMNS)]
    return frame.astype(dict.fromkeys(_WHOLE, "Int64"))
