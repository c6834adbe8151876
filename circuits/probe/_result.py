"""Fitted linear maps, and the scores of their predictions as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from circuits.figures.results import probe_figure
from circuits.probe._inputs import CLASSIFICATION, Entries, ProbeSite, Target
from circuits.statistics import LEVEL, bootstrap, interval, ratio
from circuits.tables import bounded, chosen_metrics, short_table


@dataclass(frozen=True)
class LinearMap:
    """A fitted probe: prediction = x @ weight + intercept.

    Attributes:
        weight: [d k], for d numbers at the site (heads concatenated) and k numbers or classes of the target; each
            column is a direction at the site.
        intercept: [k], zero where none was fitted.
        ridge: the penalty, 0 for least squares.
        rank: the number of directions at the site with variance above rounding.

    All are float64, on the CPU.
    """

    weight: Tensor
    intercept: Tensor
    ridge: float
    rank: int

    def __repr__(self) -> str:
        shapes = f"weight {list(self.weight.shape)}, intercept {list(self.intercept.shape)}"
        return f"LinearMap({shapes}, ridge={self.ridge:g}, rank={self.rank})"

    def predict(self, x: Tensor) -> Tensor:
        """Returns predictions [... k] for activations [... d]; the predicted class has the largest number."""
        return x.to(self.weight) @ self.weight + self.intercept


_KEYS = ("site", "layer", "head", "target", "split", "metric", *bounded("value"))
_CONTROLS = ("shuffled", *bounded("selectivity"), "untrained", *bounded("over_untrained"))
COLUMNS = (*_KEYS, *_CONTROLS, "n", "entries", "fit_n", "ridge", "rank")
#: What `print` shows.
SHOWN = (*_KEYS, "shuffled", "untrained")
_WHOLE = ("layer", "head", "n", "entries", "fit_n", "rank")


@dataclass(frozen=True)
class ProbeResult:
    """The results of linear probes.

    Attributes:
        frame: one row per site and layer (and head), target, split and metric. `value` with its interval is
            on held-out examples, `n` of them with `entries` entries in the split; the probe was fitted on `fit_n`
            examples with penalty `ridge` (0: least squares), in a space of `rank` dimensions. `shuffled` is the same
            metric of a probe fitted to, and scored on, targets exchanged between examples, `selectivity` = value −
            shuffled; `untrained` that of a probe on the untrained model, `over_untrained` = value − untrained; both
            differences have paired intervals. For mse, negative differences mean a better probe. NaN: there is no such
            control, or no entry.
        weights: (place, target) -> `LinearMap`; places are "resid_post.2", "z.1.3" (head 3).
        settings: seed, draws and so on.
    """

    frame: pd.DataFrame
    weights: Mapping[tuple[str, str], LinearMap]
    settings: Mapping[str, Any]

    def __repr__(self) -> str:
        return short_table(self.frame, SHOWN)

    def plot(self, metric: str | Sequence[str] | None = None) -> Any:
        """Returns a plotly figure with a panel per metric and target: values over layers, with intervals as bands.

        Shuffled targets are dotted, the untrained model is dashed.
        """
        return probe_figure(self.frame[self.frame["metric"].isin(chosen_metrics(self.frame, metric))])


#: (split, metric) -> sums and counts [example], float64, of the held-out examples in order.
Scored = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]


def score(fitted: LinearMap, target: Target, x: Tensor, entries: Entries) -> Scored:
    """Returns the sums and counts of each metric by held-out example, so that any set of examples can be pooled.

    mse: the mean over entries and the d numbers of each. r2: 1 − Σ(y − p)² / Σ(y − ȳ)², ȳ the mean of each number over
    the held-out entries of the split, the sums over all d numbers. cosine, abs_cosine: mean over entries of cos(p, y)
    and of its absolute value, of vectors only; entries whose target is the zero vector do not count, a prediction of
    zero has cosine 0. accuracy: the share of entries whose class has the largest prediction.

    Args:
        x: features of the held-out entries, [entry d] float64.
    """
    held_out = entries.held_out
    chosen = entries.used[held_out]
    true = target.take(held_out, chosen)
    examples = torch.arange(len(held_out))[:, None].expand(chosen.shape)[chosen]
    # Classes in parts, as there may be a vocabulary of them.
    predicted = [
        part.argmax(1) if target.kind == CLASSIFICATION else part
        for part in (fitted.predict(rows.cpu()) for rows in x.split(max(1, 2**22 // target.width)))
    ]
    found: Scored = {}
    for name, mask in entries.splits.items():
        inside = mask[held_out][chosen]
        for metric, (sums, counts) in _measured(torch.cat(predicted)[inside], true[inside], target).items():
            totals = torch.zeros(2, len(held_out), dtype=torch.float64)
            totals.index_add_(1, examples[inside], torch.stack([sums, counts]))
            found[name, metric] = totals[0].numpy(), totals[1].numpy()
    return found


def _measured(predicted: Tensor, true: Tensor, target: Target) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns by metric what each entry adds to its sum and its count."""
    ones = torch.ones(len(true), dtype=torch.float64)
    if target.kind == CLASSIFICATION:
        return {"accuracy": ((predicted == true).double(), ones)}
    # From the first one on, so that the mean of equal numbers is that number, and their spread 0 and no rounding.
    mean = true[:1].sum(0) + (true - true[:1]).mean(0)
    error, spread = (predicted - true).square().sum(1), (true - mean).square().sum(1)
    found = {"mse": (error, ones * target.width), "r2": (spread - error, spread)}
    if target.width == 1:  # a cosine would be the sign
        return found
    lengths = predicted.norm(dim=1) * true.norm(dim=1)
    cosine = torch.where(lengths > 0, (predicted * true).sum(1) / lengths, 0.0)
    directed = (true.norm(dim=1) > 0).double()
    return found | {
        "cosine": (cosine * directed, directed),
        "abs_cosine": (cosine.abs() * directed, directed),
    }


def pooled(draws: Sequence[Scored]) -> Scored | None:
    """Averages the sums and counts of several draws, example by example; None if there is no draw."""
    if not draws:
        return None
    return {
        key: (np.mean([one[key][0] for one in draws], 0), np.mean([one[key][1] for one in draws], 0))
        for key in draws[0]
    }


@dataclass(frozen=True)
class Probe:
    """The probe of one target at one site, its scores and those of its controls; None: there is no such control."""

    site: ProbeSite
    target: str
    fitted: LinearMap
    value: Scored
    shuffled: Scored | None = None
    untrained: Scored | None = None


def tabulate(probes: Sequence[Probe], entries: Entries, seed: int, draws: int) -> pd.DataFrame:
    """Tabulates scores, with percentile bootstrap intervals over held-out examples; all rows share the resamples."""
    n, used = len(entries.held_out), entries.used[entries.held_out]
    counts_of = {name: int((mask[entries.held_out] & used).sum()) for name, mask in entries.splits.items()}
    rows: list[dict[str, Any]] = []
    series: list[tuple[np.ndarray, np.ndarray]] = []
    for one in probes:
        place: dict[str, Any] = {"site": one.site.site.name, "layer": one.site.site.layer}
        place |= {"head": one.site.head, "target": one.target, "n": n, "fit_n": len(entries.fit)}
        place |= {"ridge": one.fitted.ridge, "rank": one.fitted.rank}
        for split, metric in one.value:
            rows.append({**place, "split": split, "metric": metric, "entries": counts_of[split]})
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
