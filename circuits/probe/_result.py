"""The table a probe leaves."""

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

# fmt: off
COLUMNS = (
    "site", "layer", "head", "position", "target", "split", "metric", "value", "ci_low", "ci_high",
    "shuffled", "selectivity", "selectivity_ci_low", "selectivity_ci_high",
    "untrained", "over_untrained", "over_untrained_ci_low", "over_untrained_ci_high",
    "n", "entries", "fit_n", "ridge", "rank",
)
# fmt: on
_WHOLE = ("layer", "head", "position", "n", "entries", "fit_n", "rank")


@dataclass(frozen=True)
class ProbeResult:
    """What probes found.

    Attributes:
        frame: one row per site and layer (and head, position), target, split and metric. `value` with its interval is
            on held-out examples, `n` of them with `entries` entries in the split; the probe was fitted on `fit_n`
            examples with penalty `ridge` (0: least squares), in a space of `rank` dimensions. `shuffled` is the same
            metric of the same probe fitted to, and scored by, targets exchanged between examples, `selectivity` = value
            − shuffled; `untrained` that of the same probe on the untrained model, `over_untrained` = value − untrained;
            both with paired intervals. For mse negative differences are the good ones. NaN: no such control, or no
            entry.
        weights: (place, target) -> `LinearMap`; places are "resid_post.2", "z.1.3" (head 3), "resid_post.2@4" (position
            4).
        errors: of several penalties, the cross-validated mean squared error of each: place, target, ridge, mse.
        settings: seed, folds, draws and so on.
    """

    frame: pd.DataFrame
    weights: Mapping[tuple[str, str], LinearMap]
    errors: pd.DataFrame
    settings: Mapping[str, Any]

    def plot(self, metric: str | Sequence[str] | None = None) -> Any:
        """A plotly figure: a panel per metric and target, values over layers with their intervals as bands.

        Dotted: shuffled targets. Dashed: the untrained model.
        """
        from circuits.figures.probes import figure

        found = list(dict.fromkeys(self.frame["metric"]))
        chosen = found if metric is None else [metric] if isinstance(metric, str) else list(metric)
        for one in chosen:
            if one not in found:
                raise CircuitsError(f"plot: no metric {one!r}; it has {', '.join(found)}")
        return figure(self.frame[self.frame["metric"].isin(chosen)])


@dataclass(frozen=True)
class Measured:
    """One probe's scores, and those of its controls (None: there is none)."""

    spot: ProbeSite
    target: str
    fitted: LinearMap
    entries: Mapping[str, int]  # by split
    value: Scored
    shuffled: Scored | None
    untrained: Scored | None


def tabulate(measured: Sequence[Measured], n: int, fit_n: int, seed: int, draws: int) -> pd.DataFrame:
    """Intervals are percentile bootstrap over the held-out examples, the same resamples for everything."""
    rows: list[dict[str, Any]] = []
    series: list[tuple[np.ndarray, np.ndarray]] = []
    for one in measured:
        about: dict[str, Any] = {
            "site": one.spot.site.name,
            "layer": one.spot.site.layer,
            "head": one.spot.head,
            "position": one.spot.position,
            "target": one.target,
            "n": n,
            "fit_n": fit_n,
            "ridge": one.fitted.ridge,
            "rank": one.fitted.rank,
        }
        for split, metric in one.value:
            rows.append({**about, "split": split, "metric": metric, "entries": one.entries[split]})
            nothing = (np.zeros(n), np.zeros(n))
            for scored in (one.value, one.shuffled, one.untrained):
                series.append(nothing if scored is None else scored[split, metric])
    sums, counts = (np.stack(part) for part in zip(*series, strict=True))
    value = ratio(sums.sum(1), counts.sum(1)).reshape(-1, 3)
    resampled = bootstrap(sums, counts, seed, draws).reshape(draws, -1, 3)
    found = {"value": value[:, 0], "shuffled": value[:, 1], "untrained": value[:, 2]}
    found["ci_low"], found["ci_high"] = interval(resampled[..., 0], LEVEL)
    for control, name in ((1, "selectivity"), (2, "over_untrained")):
        found[name] = value[:, 0] - value[:, control]
        bounds = interval(resampled[..., 0] - resampled[..., control], LEVEL)
        found[f"{name}_ci_low"], found[f"{name}_ci_high"] = bounds
    frame = pd.DataFrame(rows).assign(**found)[list(COLUMNS)]
    return frame.astype(dict.fromkeys(_WHOLE, "Int64"))
